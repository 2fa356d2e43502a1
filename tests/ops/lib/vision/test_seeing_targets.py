"""Targets whose images their own processor reads: every family gives what transformers gives, alone and in batches.

The processors of Gemma 4 and LFM2-VL need torchvision. Where it is missing, their samples are put together here, from
Gemma 4's image processor for Pillow, and from patches of the form that LFM2-VL's has.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.smolvlm.processing_smolvlm as smolvlm
from attrs import evolve, frozen
from batch_cases import draft_for_family, without_end
from family_checkpoints import picture
from PIL import Image
from seeing_targets import FAMILIES, VOCABULARY, seeing_checkpoint
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from dsl.errors import DataError
from ops.capture_targets.backend import HuggingFaceBackend, device_batch
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.target.checkpoint_check import pixel_mistakes
from ops.lib.target.model import Target, check_patches_fit, describe_target
from ops.lib.target.probe import TOLERANCE, plain_answer, speculated_answers
from ops.lib.vision.any_images import Seen
from ops.lib.vision.processor import Processor, load_processor
from ops.lib.vision.processor_files import lacks_image_processor
from ops.tokenize_chat.encode import TOO_LONG, ChatEncoder, load_each, prompt_ids, prompt_sample, with_images, with_seen
from ops.tokenize_chat.run import check_images

BACKEND = "torchvision" if importlib.util.find_spec("torchvision") else "pillow"
KINDS = tuple(FAMILIES)
NEW = 8
Messages = list[dict[str, Any]]
Pictures = Sequence[Image.Image]


@frozen(eq=False)
class Case:
    """A target that does not stop at EOS, and samples of text and of one and two images of different sizes."""

    folder: Path
    encoder: ChatEncoder
    target: Target
    rows: Mapping[str, tuple[Messages, Pictures]]
    samples: Mapping[str, TokenSample]

    @property
    def processor(self) -> Processor:
        return self.encoder.processor

    @property
    def layers(self) -> range:
        return range(self.target.num_layers - 1)


def turn(*parts: str | None) -> Messages:
    """A question, in which None is an image, and its answer."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "It is red."}]},
    ]


ROWS: Mapping[str, tuple[Messages, Pictures]] = {
    "text": (turn("What is it?"), ()),
    "one": (turn(None, "\n\nDescribe the image in a few words."), (picture(40, 20, 1),)),
    "two": (turn("See ", None, None, " and count") + turn("Which is large?"), (picture(30, 30, 2), picture(20, 70, 3))),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(kind: str) -> Case:
        if kind not in made:
            made[kind] = make_case(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return case


@pytest.fixture(autouse=True)
def _numbers_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor asks for a library that puts the frames of videos into words; images need none of it."""
    monkeypatch.setattr(smolvlm, "num2words", smolvlm.num2words or str)


def make_case(kind: str, folder: Path) -> Case:
    seeing_checkpoint(kind, folder)
    processor = load_processor(str(folder), image_backend=BACKEND)
    encoder = ChatEncoder(processor)
    mask = processor.tokenizer.convert_tokens_to_ids("<|mask|>")
    target = without_end(Target.from_directory(folder, describe_target(folder, mask, processor.eos_token_ids)))
    samples = {name: sample_of(encoder, kind, name, *row) for name, row in ROWS.items()}
    return Case(folder, encoder, target, ROWS, samples)


def sample_of(encoder: ChatEncoder, kind: str, name: str, messages: Messages, pictures: Pictures) -> TokenSample:
    encoded = encoder.encode(messages)
    if not pictures:
        return with_images(name, encoded, (), encoder.processor)
    if encoder.processor.blind:
        seen = BY_HAND[kind](pictures)
    else:
        seen = load_each(range(len(pictures)), lambda place: png(pictures[place]), encoder.processor)
    return with_seen(name, encoder.with_seen(messages, (), encoded, seen), seen)


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def gemma4_images(pictures: Pictures) -> Seen:
    made = Gemma4ImageProcessorPil(**FAMILIES["gemma4"].images)(images=list(pictures), return_tensors="pt")
    counts = made.pop("num_soft_tokens_per_image")
    texts = tuple(f"<|image>{'<|image|>' * int(count)}<image|>" for count in counts)
    return Seen(texts, tuple(map(int, counts)), dict(made))


def lfm2_images(pictures: Pictures) -> Seen:
    """Patches of 4 x 4 pixels, 64 at most of an image; four of them are a token."""
    shapes = [(image.height // 8 * 2, image.width // 8 * 2) for image in pictures]
    values, mask = torch.zeros(len(shapes), 64, 48), torch.zeros(len(shapes), 64, dtype=torch.int32)
    for row, (height, width) in enumerate(shapes):
        generator = torch.Generator().manual_seed(row)
        values[row, : height * width] = torch.rand(height * width, 48, generator=generator) * 2 - 1
        mask[row, : height * width] = 1
    counts = tuple(height * width // 4 for height, width in shapes)
    texts = tuple(f"<|image_start|>{'<image>' * count}<|image_end|>" for count in counts)
    tensors = {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}
    return Seen(texts, counts, tensors)


BY_HAND = {"gemma4": gemma4_images, "lfm2_vl": lfm2_images}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_what_the_processor_makes_of_the_whole_conversation(cases: Any, kind: str) -> None:
    case = cases(kind)
    if case.processor.blind:
        pytest.skip(case.processor.blind)
    tokenizer, own = case.processor.tokenizer, case.processor.own
    assert own is not None
    for name, (messages, pictures) in case.rows.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        made = dict(
            own.processor(
                text=[text],
                images=[list(pictures)] if pictures else None,
                return_tensors="pt",
                add_special_tokens=False,
            )
        )
        sample = case.samples[name]
        torch.testing.assert_close(sample.input_ids, made.pop("input_ids")[0], rtol=0, atol=0)
        learnt = tokenizer.decode(sample.input_ids[sample.loss_mask])
        assert learnt == "It is red.<|im_end|>" * (len(messages) // 2)
        assert not sample.loss_mask[: sample.prompt_tokens].any() or name == "two"
        for other in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            made.pop(other, None)
        stored = {key: value for key, value in sample.seen.items() if key != "image_tokens"}
        assert stored.keys() == made.keys()
        for key, tensor in made.items():
            assert torch.equal(tensor, stored[key])
        images = [png(image) for image in pictures]
        prompt = prompt_sample(name, "image", messages[:-1], load_each(images, bytes, case.processor), case.encoder)
        assert torch.equal(prompt.input_ids, sample.prompt().input_ids)
        _, tokens = prompt_ids(name, messages[:-1], images, case.encoder)
        assert tokens == sample.prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_answers_in_the_ids_that_were_generated_stand_behind_prompts_with_images(cases: Any, kind: str) -> None:
    case = cases(kind)
    if case.processor.blind:
        pytest.skip(case.processor.blind)
    encoder, tokenizer = case.encoder, case.processor.tokenizer
    (messages, pictures), end = case.rows["two"], case.processor.eos_token_ids[0]
    unusual = [token for letter in "It is red." for token in tokenizer.encode(letter, add_special_tokens=False)] + [end]
    own = {"generated_ids": unusual, "tokenizer": encoder.vocabulary}
    seen = load_each(range(2), lambda place: png(pictures[place]), case.processor)
    generated = [message | own if message["role"] == "assistant" else message for message in messages]
    [served] = encoder.serve_batch([generated], [()], ["a"], [()])
    assert not isinstance(served, Unusable)
    assert [(1,), (3,)] == [context.turns for context in served.contexts]  # the first is no history of the second
    for context in served.contexts:
        said = messages[: context.turns[0] + 1]
        sample = with_seen("a", encoder.with_seen(said, (), encoder.encode_context(said, context), seen), seen)
        prompt = prompt_sample("a", "image", said[:-1], seen, encoder)
        assert [*prompt.input_ids.tolist(), *unusual] == sample.input_ids.tolist()
        assert sample.prompt_tokens == prompt.prompt_tokens == len(sample.input_ids) - int(sample.loss_mask.sum())
        assert sample.loss_mask[sample.prompt_tokens :].all()


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_log_probs_are_those_of_the_whole_model_alone_and_in_a_batch(cases: Any, kind: str) -> None:
    case = cases(kind)
    samples = list(case.samples.values())
    together, final_BSM = device_batch(case.target, samples, case.layers, final_hidden=True)
    log_probs = token_log_probs(case.target, case.target.inputs(samples))
    assert final_BSM is not None
    for row, sample in enumerate(samples):
        arguments: dict[str, Any] = {name: tensor for name, tensor in sample.seen.items() if name != "image_tokens"}
        types = case.target.family.TYPE_IDS.get(kind)
        if types and sample.seen:
            arguments[types] = (sample.input_ids == case.target.family.image_token_id).long()[None]
        with torch.inference_mode():
            whole = case.target.model(
                input_ids=sample.input_ids[None], **arguments, output_hidden_states=True, use_cache=False
            )
        expected = torch.cat([whole.hidden_states[k + 1] for k in case.layers], dim=-1)[0]
        alone, _ = device_batch(case.target, [sample], case.layers)
        assert torch.equal(alone[0], expected)
        length = len(sample.input_ids)
        assert (together[row, :length] - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (final_BSM[row, :length] - whole.hidden_states[-1][0]).abs().max() <= 1e-4
        chosen = whole.logits[0, :-1].log_softmax(-1).gather(1, sample.input_ids[1:, None])[:, 0]
        torch.testing.assert_close(log_probs[row, : length - 1], chosen, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_by_partly_right_proposals_and_by_a_random_draft_are_the_plain_ones(cases: Any, kind: str) -> None:
    case = cases(kind)
    target, samples = case.target, list(case.samples.values())
    with torch.inference_mode():
        plain = [plain_answer(target, sample) for sample in samples]
        found = speculated_answers(target, samples, plain)
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in found]
    assert max(difference for _, difference in found) <= TOLERANCE
    draft = draft_for_family(hidden_size=64, vocab_size=VOCABULARY, num_target_layers=target.num_layers)
    expected = [tuple(tokens[: NEW + 1]) for tokens, _ in plain]
    settings = DecodeSettings(NEW)
    assert expected == [one.tokens for one in decode_plain_batch(target, samples, settings)]
    assert expected == [one.tokens for one in decode_speculative_batch(target, draft, samples, settings)]
    assert expected[1] == decode_plain(target, samples[1], NEW).tokens
    assert expected[1] == decode_speculative(target, draft, samples[1], NEW).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_image_is_seen(cases: Any, kind: str) -> None:
    case = cases(kind)
    sample = case.samples["two"]
    places = (sample.input_ids == case.target.family.image_token_id).nonzero()[:, 0].tolist()
    first_token_of_second = places[int(sample.seen["image_tokens"][0])]
    before = token_log_probs(case.target, case.target.inputs([sample]))[0]
    for image in (0, 1):
        changed = token_log_probs(case.target, case.target.inputs([with_changed_pixel(sample, image)]))[0]
        differs = (before - changed).abs() > 1e-6
        assert differs[places[-1] :].any()  # of the text behind both images
        if image == 1:
            assert not differs[: first_token_of_second - 1].any()


def with_changed_pixel(sample: TokenSample, image: int) -> TokenSample:
    """The sample with another value in one place of the first or the last of what the towers see."""
    values = sample.seen["pixel_values"].clone()
    dimension = 1 if values.ndim == 5 and len(values) == 1 else 0  # tiles of one sample, or images
    tile = values.select(dimension, -1 if image else 0)
    tile[(0,) * tile.ndim] += 2.0
    return evolve(sample, seen={**sample.seen, "pixel_values": values})


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_is_left_out_and_wrong_numbers_of_tokens_are_refused_with_the_sample(
    cases: Any, kind: str
) -> None:
    case = cases(kind)
    one, two = case.samples["one"], case.samples["two"]
    with pytest.raises(DataError, match=r'sample "one": \d+ image tokens in the text, but its images have 0'):
        case.target.inputs([one, evolve(one, seen={})])
    first = int((one.input_ids == case.target.family.image_token_id).nonzero()[0])
    shorter = torch.cat([one.input_ids[:first], one.input_ids[first + 1 :]])
    with pytest.raises(DataError, match='sample "one"'):
        case.target.inputs([evolve(one, input_ids=shorter)])
    counts = one.seen["image_tokens"] - 1
    wrong = evolve(one, input_ids=shorter, loss_mask=torch.zeros(len(shorter), dtype=torch.bool))
    wrong = evolve(wrong, seen={**one.seen, "image_tokens": counts})
    with pytest.raises(DataError, match=r'sample "one": .*image'):
        HuggingFaceBackend(case.target).forward([two, wrong], case.layers)
    with pytest.raises(Unusable):
        encoded = case.encoder.encode(case.rows["two"][0])
        seen = Seen(("x",), (1,), one.seen)
        case.encoder.with_seen(case.rows["two"][0], (), encoded, seen)


def test_a_prompt_with_more_image_tokens_than_are_taken_is_refused_while_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = load_processor(str(seeing_checkpoint("gemma3", tmp_path / "gemma3")))
    encoder, images = ChatEncoder(processor), [png(picture(32, 32))] * 2
    assert processor.own is not None
    most = sum(load_each(images, bytes, processor).image_tokens)  # type: ignore[union-attr]
    for limit, refused in ((most, False), (most - 1, True)):
        monkeypatch.setattr("ops.tokenize_chat.encode.MOST_IMAGE_TOKENS", limit)
        try:
            prompt_ids("a", turn(None, None, "What is it?")[:-1], images, encoder)
            assert not refused
        except Unusable as fault:
            assert refused and fault.reason == TOO_LONG


def test_samples_that_pass_alone_are_the_result_where_only_their_batch_is_refused(cases: Any) -> None:
    case = cases("gemma3")
    samples = list(case.samples.values())

    def refuse_batches(_module: Any, _given: Any, named: dict[str, Any]) -> None:
        if len(named["input_ids"]) > 1:
            raise ValueError("images of a batch")

    expected = device_batch(case.target, samples, case.layers, final_hidden=True)
    hook = case.target.model.base_model.register_forward_pre_hook(refuse_batches, with_kwargs=True)
    try:
        found = device_batch(case.target, samples, case.layers, final_hidden=True)
    finally:
        hook.remove()
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert one.shape == other.shape
        for row, sample in enumerate(samples):
            length = len(sample.input_ids)
            torch.testing.assert_close(one[row, :length], other[row, :length], rtol=1e-4, atol=1e-4)


def test_a_fault_of_the_device_is_not_said_of_the_images(cases: Any) -> None:
    case = cases("gemma3")

    def failing(said: str) -> Any:
        def fail(_module: Any, _given: Any) -> None:
            raise RuntimeError(said)

        return case.target.model.base_model.register_forward_pre_hook(fail)

    for said, expected in (
        (
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported at another call",
            RuntimeError,
        ),
        ("shape mismatch: value tensor of shape [3, 64] cannot be broadcast", DataError),
    ):
        hook = failing(said)
        try:
            with pytest.raises(expected, match=said.partition(":")[0]) as raised:
                device_batch(case.target, [case.samples["one"]], case.layers)
        finally:
            hook.remove()
        assert ("the model does not take these images" in str(raised.value)) is (expected is DataError)


def test_what_its_processor_cannot_do_is_said_and_texts_are_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing_checkpoint("smolvlm", tmp_path / "smolvlm")
    monkeypatch.setattr(smolvlm, "num2words", None)
    blind = load_processor(str(tmp_path / "smolvlm"))
    assert not blind.sees
    assert "the processor of smolvlm needs another library: Package `num2words` is required" in blind.blind
    assert len(ChatEncoder(blind).encode(turn("What is it?")).input_ids)
    (tmp_path / "in").mkdir()
    row = {"id": "a", "images": [{}]}
    (tmp_path / "in" / "samples.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r'sample "a" has an image, but the processor of smolvlm needs another'):
        check_images(tmp_path / "in" / "samples.jsonl", blind)
    if BACKEND == "pillow":
        seeing_checkpoint("gemma4", tmp_path / "gemma4")
        expected = "the processor of gemma4 needs another library: install torchvision"
        assert expected == load_processor(str(tmp_path / "gemma4")).blind
    seeing_checkpoint("lfm2_vl", tmp_path / "lfm2_vl")
    assert 'not resized by pillow: set image_backend = "torchvision"' in load_processor(str(tmp_path / "lfm2_vl")).blind


def test_limits_of_pixels_are_refused_and_the_processor_is_read_again_as_it_was_saved(tmp_path: Path) -> None:
    folder = seeing_checkpoint("gemma3", tmp_path / "target")
    with pytest.raises(
        DataError, match=r"Gemma3ImageProcessor takes no max_pixels: leave max_pixels out, and set .*preprocessor"
    ):
        load_processor(str(folder), max_pixels=9000)
    assert "takes no max_pixels" in pixel_mistakes(str(folder), None, 9000)["max_pixels"]
    assert {} == pixel_mistakes(str(folder), None, None)
    assert not lacks_image_processor(folder)
    processor = load_processor(str(folder))
    assert (None, 0, 1, "gemma3") == (
        processor.pixel_limits,
        processor.patch_dim,
        processor.merge_size,
        processor.images_of,
    )
    processor.save(tmp_path / "saved")
    saved = load_processor(str(tmp_path / "saved"))
    assert processor.own is not None
    assert saved.own is not None
    image = picture(40, 20)
    assert processor.own.see([image]).texts == saved.own.see([image]).texts
    (folder / "preprocessor_config.json").unlink()
    assert lacks_image_processor(folder)


@pytest.mark.parametrize("kind", ["gemma3", "idefics3"])
def test_tokens_for_another_family_are_refused(cases: Any, kind: str) -> None:
    case = cases(kind)
    info = {"images_of": kind, "image_token_id": case.target.family.image_token_id}
    check_patches_fit(info, case.target.family)
    with pytest.raises(DataError, match="they are of a llava_onevision processor; give tokenize_chat"):
        check_patches_fit({**info, "images_of": "llava_onevision"}, case.target.family)
    with pytest.raises(DataError, match="they are of a Qwen's processor"):
        check_patches_fit({"image_token_id": info["image_token_id"]}, case.target.family)
