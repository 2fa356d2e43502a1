"""What a target sees: solid colours, from PNG files through ingest, inject and tokenize to the log-probabilities."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import attrs
import pytest
import torch
from attrs import frozen
from fake_stage import FakeStage
from family_checkpoints import FAMILIES, make_checkpoint, picture, token_sample
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_jsonl
from ops.lib.data.image_packs import read_packed
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.target.model import Target
from ops.lib.target.save import PROCESSOR, copy_files
from ops.lib.vision.batch import collate
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (50, 60, 210), "yellow": (220, 210, 50)}
TRAIN, HELD_OUT = 24, 6  # pictures of each colour
STEPS, BATCH = 70, 16


@frozen(eq=False)
class Case:
    """A checkpoint directory, its target, and samples with and without images by id."""

    checkpoint: Path
    target: Target
    samples: dict[str, TokenSample]

    def row(self, name: str) -> torch.Tensor:
        """The log-probabilities of one sample alone, [S - 1]."""
        return token_log_probs(self.target, collate([self.samples[name]]))[0]


def solid(colour: str, generator: torch.Generator) -> Image.Image:
    """A picture of one colour: its size, its shade and the noise on it are drawn."""
    width, height = torch.randint(16, 41, (2,), generator=generator).tolist()
    shade = torch.tensor(COLOURS[colour]) + torch.randint(-30, 31, (3,), generator=generator)
    pixels = shade + torch.randint(-15, 16, (height, width, 3), generator=generator)
    return Image.fromarray(pixels.clamp(0, 255).to(torch.uint8).numpy())


def write_data(folder: Path) -> Path:
    """JSON lines beside their PNG files: held-out pictures stand there once with every colour as the answer."""
    generator = torch.Generator().manual_seed(0)
    rows = []

    def add(split, name, answer, image=None, question="What colour is it?"):
        if image is not None:
            image.save(folder / f"{name}.png")
        turns = [{"role": "user", "text": question}, {"role": "assistant", "text": answer}]
        picture_of = {} if image is None else {"image": f"{name}.png"}
        rows.append({"id": name, "split": split, "conversations": turns, **picture_of})

    for number in range(TRAIN):
        for colour in COLOURS:
            add("train", f"{colour}-{number}", f"It is {colour}.", solid(colour, generator))
    for number in range(8):
        add("train", f"text-{number}", "There are three of them.", question=f"Count to {number}.")
    for number in range(HELD_OUT):
        for colour in COLOURS:
            image = solid(colour, generator)
            for said in COLOURS:
                add("test", f"{colour}-{number}-said-{said}", f"It is {said}.", image)
    halves = Image.new("RGB", (48, 32), COLOURS["red"])
    halves.paste(COLOURS["blue"], (24, 0, 48, 32))
    add("test", "halves", "It is blue.", halves)
    add("test", "words", "There are three of them.", question="Count to eight, then describe the line.")
    add("test", "few-words", "All of them.", question="What is it?")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"


def train(target: Target, samples: list[TokenSample]) -> None:
    """A plain loop: AdamW on the tokens of the answers."""
    target.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(target.model.parameters(), lr=5e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs = collate([samples[row] for row in torch.randperm(len(samples), generator=generator)[:BATCH]])
        learnt = inputs.loss_mask[:, 1:]
        logits = target.forward(inputs, use_cache=False).logits[:, :-1]
        cross_entropy(logits[learnt], inputs.input_ids[:, 1:][learnt]).backward()
        torch.nn.utils.clip_grad_norm_(target.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> ImageSamples:
    """The data behind ingest and inject."""
    source = write_data(tmp_path_factory.mktemp("pictures"))
    stage = FakeStage(tmp_path_factory.mktemp("ingest"))
    ingest(Ingest(source=str(source), seed=0), stage)
    samples = stage.artifact(Samples)
    stage = FakeStage(tmp_path_factory.mktemp("inject"), {"samples": samples})
    inject_images(InjectImages(samples=Ref("ingest")), stage)
    return stage.artifact(ImageSamples)


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory) -> Case:
    """A Qwen3-VL of two layers that was taught colours, saved and loaded again; its samples are the held-out ones."""
    start = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("start"), lively=False, num_hidden_layers=2)
    stage = FakeStage(tmp_path_factory.mktemp("tokenize"), {"samples": packed})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), processor=str(start), min_loss_tokens=1), stage)
    tokens = stage.artifact(TokenShards)
    target = Target.from_directory(start, {})
    reader = TokenReader(tokens, "train")
    train(target, [reader.sample(index) for index in range(len(reader))])
    checkpoint = tmp_path_factory.mktemp("trained")
    target.model.save_pretrained(checkpoint)
    copy_files(start, checkpoint, PROCESSOR)
    held_out = TokenReader(tokens, "test")
    samples = [held_out.sample(index) for index in range(len(held_out))]
    return Case(checkpoint, Target.from_directory(checkpoint, {}), {sample.id: sample for sample in samples})


@pytest.fixture(scope="module", params=["trained", *FAMILIES])
def case(request, tmp_path_factory) -> Case:
    """The trained target, and a random one of every family, with samples of three lengths, images where they can."""
    if request.param == "trained":
        whole = request.getfixturevalue("trained")
        return attrs.evolve(whole, samples={name: whole.samples[name] for name in MIXED})
    checkpoint = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=4)
    processor = load_processor(str(checkpoint))
    samples = [
        token_sample(processor, "What is it?", name="few-words"),
        token_sample(processor, "Count to eight, then describe the line.", "There are three of them.", name="words"),
    ]
    if FAMILIES[request.param].vision:
        samples += [
            token_sample(processor, "What is it?", images=[picture(24, 40)], name="image"),
            token_sample(processor, "Count.", images=[picture(16, 16, 1), picture(48, 24, 2)], name="two images"),
        ]
    return Case(checkpoint, Target.from_directory(checkpoint, {}), {sample.id: sample for sample in samples})


MIXED = ("few-words", "red-0-said-red", "words", "halves", "yellow-3-said-blue")


@pytest.mark.parametrize("colour", COLOURS)
def test_of_a_solid_colour_the_right_name_is_the_most_probable(trained, colour):
    for number in range(HELD_OUT):
        inputs = collate([trained.samples[f"{colour}-{number}-said-{said}"] for said in COLOURS])
        answers = (token_log_probs(trained.target, inputs) * inputs.loss_mask[:, 1:]).sum(dim=1)
        assert dict(zip(COLOURS, answers.tolist(), strict=True))[colour] == answers.max()
        assert answers.max() > math.log(0.5)


def test_log_probs_equal_those_computed_from_the_logits_token_by_token(case):
    inputs = collate(list(case.samples.values()))
    with torch.no_grad():
        logits = case.target.forward(inputs).logits
    expected = torch.zeros(inputs.input_ids.shape[0], inputs.input_ids.shape[1] - 1)
    for row, sample in enumerate(case.samples.values()):
        for place in range(1, len(sample.input_ids)):
            probabilities = torch.exp(logits[row, place - 1].double())
            right = probabilities[sample.input_ids[place]]
            expected[row, place - 1] = math.log(right) - math.log(probabilities.sum())
    got = token_log_probs(case.target, inputs)
    assert (torch.float32, False) == (got.dtype, got.requires_grad)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"), [(torch.float32, 1e-4, 0.0), (torch.bfloat16, 5e-2, 1e-2)], ids=["float32", "bfloat16"]
)
def test_a_batch_of_images_and_texts_equals_its_samples_one_by_one(trained, dtype, atol, rtol):
    case = attrs.evolve(trained, target=Target.from_directory(trained.checkpoint, {}, dtype=dtype))
    together = token_log_probs(case.target, collate([case.samples[name] for name in MIXED]))
    for row, name in enumerate(MIXED):
        length = len(case.samples[name].input_ids) - 1
        torch.testing.assert_close(together[row, :length], case.row(name), atol=atol, rtol=rtol)
        assert not together[row, length:].any()


def test_in_every_family_a_batch_equals_its_samples_one_by_one(case):
    together = token_log_probs(case.target, collate(list(case.samples.values())))
    for row, name in enumerate(case.samples):
        alone = case.row(name)
        torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-4, rtol=0.0)


def test_a_permuted_batch_gives_permuted_results(case):
    inputs = collate(list(case.samples.values()))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    assert order.tolist() != list(range(len(inputs)))
    expected = token_log_probs(case.target, inputs)[order]
    torch.testing.assert_close(token_log_probs(case.target, inputs.permute(order)), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["words", "few-words"])
def test_a_text_only_sample_equals_the_model_called_with_ids_alone(case, name):
    ids = case.samples[name].input_ids
    case.target.forget_positions()
    with torch.no_grad():
        logits = case.target.model(input_ids=ids[None]).logits[0, :-1]
    expected = logits.log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(case.row(name), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("change", ["blank", "shuffled", "other"])
def test_another_image_gives_other_log_probs_behind_it_and_the_same_before_it(trained, change):
    sample = trained.samples["halves"]
    pixels = sample.pixel_values
    generator = torch.Generator().manual_seed(0)
    changed = {
        "blank": torch.zeros_like(pixels),
        "shuffled": pixels[torch.randperm(len(pixels), generator=generator)],
        "other": pixels.flip(0),
    }[change]
    before = trained.row("halves")
    after = token_log_probs(trained.target, collate([attrs.evolve(sample, pixel_values=changed)]))[0]
    image = (sample.input_ids == trained.target.family.image_token_id).nonzero()[:, 0]
    first, behind = int(image[0]), int(image[-1])
    torch.testing.assert_close(before[:first], after[:first], atol=1e-6, rtol=0.0)
    assert (before[behind:] - after[behind:]).abs().max() > 1e-2


@pytest.mark.parametrize("call", ["forward", "hidden"])
def test_the_image_on_disk_reaches_the_models_forward_as_transformers_would_prepare_it(trained, packed, call):
    rows = {row["id"]: row for row in read_jsonl(packed.path / "samples.jsonl")}
    theirs = Qwen2VLImageProcessorPil.from_pretrained(trained.checkpoint)
    pixels, grids, is_image = [], [], []
    for name in MIXED:
        kinds = torch.zeros(len(trained.samples[name].input_ids), dtype=torch.int64)
        for reference in rows[name]["images"]:
            image = Image.open(io.BytesIO(read_packed(packed.path, reference)))
            features = theirs(images=[image], return_tensors="pt")
            pixels.append(features["pixel_values"])
            grids.append(features["image_grid_thw"])
            image_tokens = int(features["image_grid_thw"].prod()) // theirs.merge_size**2
            start = trained.samples[name].input_ids.tolist().index(trained.target.model.config.image_token_id)
            kinds[start : start + image_tokens] = 1
        is_image.append(kinds)
    module = trained.target.model if call == "forward" else trained.target.model.model
    seen = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        getattr(trained.target, call)(collate([trained.samples[name] for name in MIXED]))
    handle.remove()
    ((args, kwargs),) = seen
    assert () == args
    assert 3 == len(pixels)
    assert torch.equal(torch.cat(pixels), kwargs["pixel_values"])
    assert torch.equal(torch.cat(grids), kwargs["image_grid_thw"])
    padded = torch.nn.utils.rnn.pad_sequence(is_image, batch_first=True)
    assert padded.tolist() == kwargs["mm_token_type_ids"].tolist()


def test_a_sample_of_one_token_has_no_log_prob(trained):
    one = attrs.evolve(trained.samples["words"], input_ids=torch.tensor([5]), loss_mask=torch.tensor([True]))
    assert (1, 0) == tuple(token_log_probs(trained.target, collate([one])).shape)
