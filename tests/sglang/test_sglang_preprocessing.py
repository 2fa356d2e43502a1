"""SGLang's own multimodal processor and tokenize_chat, given the same messages and images, make the same of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import frozen
from chat_samples import run_tokenize
from fake_stage import FakeStage
from family_checkpoints import FAMILIES, make_checkpoint
from finetune_cases import train
from preprocessing_cases import CASES, SAME, write_cases
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.sglang.mm_processor import ServedPrompt, ServedPrompts
from ops.lib.sglang.requests import VisionTokens
from ops.lib.sglang.version import installed_version
from ops.lib.target.model import Target
from ops.lib.vision.images import decode
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

BACKENDS = ("pillow", "torchvision")
TARGETS = [name for name, row in FAMILIES.items() if row.vision]


@frozen(eq=False)
class Pair:
    """One checkpoint and image backend: what tokenize_chat made of every case, and SGLang of its prompts."""

    checkpoint: Path
    ours: dict[str, TokenSample]
    theirs: dict[str, ServedPrompt]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return {
        name: make_checkpoint(name, tmp_path_factory.mktemp(name), lively=False, num_hidden_layers=4)
        for name in TARGETS
    }


@pytest.fixture(scope="module")
def pairs(checkpoints, tmp_path_factory) -> dict[tuple[str, str], Pair]:
    samples = write_cases(tmp_path_factory.mktemp("samples"))
    made = {}
    for name, checkpoint in checkpoints.items():
        for backend in BACKENDS:
            settings = {"processor": str(checkpoint), "image_backend": backend, "min_loss_tokens": 1}
            stage = run_tokenize(tmp_path_factory.mktemp("tokens"), samples, **settings)
            reader = TokenReader(stage.artifact(TokenShards))
            ours = {sample.id: sample for sample in map(reader.sample, range(len(reader)))}
            with ServedPrompts.open(checkpoint, backend) as served:
                theirs = {case: served.prompt(messages[:-1], images) for case, (messages, images) in CASES.items()}
            made[name, backend] = Pair(checkpoint, ours, theirs)
    return made


@pytest.fixture(params=[(name, backend) for name in TARGETS for backend in BACKENDS], ids="-".join)
def pair(request, pairs) -> Pair:
    return pairs[request.param]


@pytest.mark.parametrize("case", SAME)
def test_sglang_gets_the_ids_pixels_and_grids_of_tokenize_chat_bit_for_bit(pair, case):
    ours, theirs = pair.ours[case], pair.theirs[case]
    assert theirs.input_ids.tolist() == ours.input_ids[: ours.prompt_tokens].tolist()
    assert theirs.image_grid_thw.tolist() == ours.image_grid_thw.tolist()
    assert theirs.pixel_values.numel() == ours.pixel_values.numel()
    assert torch.equal(theirs.pixel_values, ours.pixel_values.reshape(theirs.pixel_values.shape))


@pytest.mark.parametrize("name", TARGETS)
def test_sglang_counts_positions_as_transformers_does_for_our_ids_and_as_the_capture_backend_does(pairs, name):
    pair = pairs[name, "pillow"]
    target = Target.from_directory(pair.checkpoint, {})
    vision = VisionTokens.of(target.model.config)
    compared = 0
    for case in SAME:
        ours, theirs = pair.ours[case], pair.theirs[case]
        if theirs.mrope_positions is None:
            continue
        ids = ours.input_ids[: ours.prompt_tokens]
        expected, delta = target.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=(ids == vision.image_token_id).int()[None],
            image_grid_thw=ours.image_grid_thw,
            attention_mask=torch.ones_like(ids[None]),
        )
        captured, captured_delta = vision.positions(ids, ours.image_grid_thw)
        assert expected[:, 0].tolist() == theirs.mrope_positions.tolist() == captured.tolist()
        assert delta.flatten().tolist() == theirs.mrope_position_delta.flatten().tolist()
        assert delta.flatten().tolist() == captured_delta.flatten().tolist()
        assert theirs.mrope_positions[1].tolist() != list(range(len(ids)))
        compared += 1
    assert compared == len(SAME) - 1


@pytest.mark.parametrize("name", TARGETS)
def test_swapped_images_do_not_pass_for_the_same(pairs, name):
    """The control of the equalities above."""
    messages, images = CASES["two images"]
    with ServedPrompts.open(pairs[name, "pillow"].checkpoint) as served:
        swapped = served.prompt(messages[:-1], images[::-1])
    ours = pairs[name, "pillow"].ours["two images"]
    assert swapped.input_ids.tolist() == ours.input_ids[: ours.prompt_tokens].tolist()
    assert swapped.image_grid_thw.tolist() != ours.image_grid_thw.tolist()
    print(f"{name}: swapped images differ by {largest(swapped.pixel_values, ours.pixel_values):.2f}")
    assert largest(swapped.pixel_values, ours.pixel_values) > 0.5


@pytest.mark.parametrize("name", TARGETS)
def test_the_two_image_backends_differ_where_an_image_is_resized_and_only_there(pairs, name):
    pillow, torchvision = (pairs[name, backend].theirs for backend in BACKENDS)
    differences = {
        case: largest(pillow[case].pixel_values, torchvision[case].pixel_values) for case in SAME if CASES[case][1]
    }
    print(f"{name}: pillow against torchvision: {differences}")
    assert differences.pop("no resize") < 1e-6
    assert differences.pop("40x40") < 1e-6
    assert min(differences.values()) > 5e-3
    assert len(differences) == 8


@pytest.mark.parametrize("case", [name for name in SAME if CASES[name][1]])
def test_torchvisions_pixels_are_those_of_transformers_own_torchvision_processor(checkpoints, case):
    checkpoint = checkpoints["qwen3_vl"]
    real = Qwen2VLImageProcessor.from_pretrained(checkpoint)
    for image in CASES[case][1]:
        expected = real(images=[decode(image)], return_tensors="pt")
        ours = load_processor(str(checkpoint), image_backend="torchvision").pixels(decode(image))
        assert torch.equal(expected["pixel_values"], ours["pixel_values"])
        assert expected["image_grid_thw"].tolist() == ours["image_grid_thw"].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_saved_of_a_processor_does_not_depend_on_the_image_backend(checkpoints, tmp_path, backend):
    load_processor(str(checkpoints["qwen3_vl"])).save(tmp_path / "pillow")
    load_processor(str(checkpoints["qwen3_vl"]), image_backend=backend).save(tmp_path / "other")
    for file in sorted((tmp_path / "pillow").iterdir()):
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_torchvision_gives_the_same_bytes_with_any_number_of_workers(checkpoints, tmp_path):
    samples = write_cases(tmp_path)
    settings = {"processor": str(checkpoints["qwen3_vl"]), "image_backend": "torchvision", "min_loss_tokens": 1}
    stages = [run_tokenize(tmp_path / str(count), samples, workers=count, **settings) for count in (1, 4)]
    assert stages[0].artifact(TokenShards).digest == stages[1].artifact(TokenShards).digest
    assert TokenReader(stages[0].artifact(TokenShards)).info["image_backend"] == "torchvision"


@pytest.mark.parametrize("name", TARGETS)
def test_a_photo_that_its_exif_data_turn_is_turned_by_us_and_not_by_sglang(pairs, name):
    """A known difference between training and serving: clients have to turn such photos themselves."""
    ours, theirs = (
        side["turned"].image_grid_thw[0].tolist() for side in (pairs[name, "pillow"].ours, pairs[name, "pillow"].theirs)
    )
    print(f"{name}: grid of a turned photo: ours {ours}, SGLang's {theirs}")
    assert ours == [1, theirs[2], theirs[1]]
    assert theirs == pairs[name, "pillow"].theirs["jpeg"].image_grid_thw[0].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_image_sizes_than_the_targets_own_have_to_be_told_to_the_server_both_at_once(
    checkpoints, tmp_path, backend
):
    checkpoint = checkpoints["qwen3_vl"]
    settings = {"processor": str(checkpoint), "max_pixels": 1024, "image_backend": backend, "min_loss_tokens": 1}
    (tmp_path / "samples").mkdir()
    stage = run_tokenize(tmp_path, write_cases(tmp_path / "samples"), **settings)
    reader = TokenReader(stage.artifact(TokenShards))
    ours = {sample.id: sample for sample in map(reader.sample, range(len(reader)))}["too large"]
    messages, images = CASES["too large"]
    equal = {}
    for bounds in ({}, {"max_pixels": 1024}, {"min_pixels": 256, "max_pixels": 1024}):
        with ServedPrompts.open(checkpoint, backend, server_args={"mm_process_config": {"image": bounds}}) as served:
            theirs = served.prompt(messages[:-1], images)
        equal[len(bounds)] = theirs.image_grid_thw.tolist() == ours.image_grid_thw.tolist()
        if equal[len(bounds)]:
            assert torch.equal(theirs.pixel_values, ours.pixel_values)
    assert equal == {0: False, 1: installed_version() != "0.5.21", 2: True}  # transformers 5.19 takes one alone too


@pytest.mark.parametrize("name", ["builtin", *TARGETS])
def test_a_target_that_dflow_wrote_is_served_with_the_images_that_it_was_made_with(name, checkpoints, tmp_path):
    """Fine-tuned from random weights, or loaded: nothing is missing in its folder, and the images are of its size."""
    (tmp_path / "samples").mkdir()
    samples = write_cases(tmp_path / "samples")
    if name == "builtin":
        stage = run_tokenize(tmp_path / "tokens", samples, min_loss_tokens=1, vocab_size=400, max_pixels=1024)
        made = train(tmp_path / "target", stage.artifact(TokenShards), steps=1, eval_samples=None)
    else:
        made = FakeStage(tmp_path / "target")
        load_target(LoadTarget(checkpoint=str(checkpoints[name])), made)
        stage = FakeStage(tmp_path / "tokens", {"samples": samples, "target": made.artifact(TargetModel)})
        tokenize_chat(TokenizeChat(samples=Ref("inject"), target=Ref("target"), min_loss_tokens=1), stage)
    reader = TokenReader(stage.artifact(TokenShards))
    with ServedPrompts.open(made.out_dir / "model") as served:
        for ours in map(reader.sample, range(len(reader))):
            messages, images = CASES[ours.id]
            theirs = served.prompt(messages[:-1], images)
            if ours.id in SAME:
                assert theirs.input_ids.tolist() == ours.input_ids[: ours.prompt_tokens].tolist()
                assert theirs.image_grid_thw.tolist() == ours.image_grid_thw.tolist()


def test_a_text_model_has_no_multimodal_processor(tmp_path):
    checkpoint = make_checkpoint("qwen3", tmp_path, num_hidden_layers=4)
    with pytest.raises(DataError, match="SGLang has no multimodal processor for a text model"):
        ServedPrompts.open(checkpoint)


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
