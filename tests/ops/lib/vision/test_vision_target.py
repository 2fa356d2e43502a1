"""What a target sees: solid colours, from PNG files through ingest, inject and tokenize to the log-probabilities."""

from __future__ import annotations

import io
import math

import attrs
import pytest
import torch
from colour_chats import COLOURS, HELD_OUT, Case
from family_checkpoints import FAMILIES, make_checkpoint, picture, token_sample
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.lib.data.files import read_jsonl
from ops.lib.data.image_packs import read_packed
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.target.model import Target
from ops.lib.vision.batch import collate
from ops.lib.vision.processor import load_processor


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
