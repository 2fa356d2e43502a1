"""vLLM's own renderer and tokenize_chat, given the same messages and images, make the same of them."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch
from attrs import frozen
from chat_samples import run_tokenize
from family_checkpoints import FAMILIES, make_checkpoint
from preprocessing_cases import CASES, write_cases
from torch import Tensor

from ops.artifacts import TokenShards
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.sglang.serve_command import Served
from ops.lib.vision.processor import load_processor
from ops.lib.vllm.serve_command import image_arguments

BACKENDS = ("pillow", "torchvision")
TARGETS = [name for name, row in FAMILIES.items() if row.vision]
SEVERAL = [(name, backend) for name in TARGETS for backend in BACKENDS]


@frozen(eq=False)
class Rendered:
    """What vLLM's engine gets of a prompt: its pixels before normalisation, which the vision tower does itself."""

    input_ids: list[int]
    grids: list[list[int]]
    pixels: Tensor


def renderer(checkpoint, backend: str, pixels: dict[str, int]) -> Any:
    """As `vllm serve` with dflow's arguments makes it."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    served = Served(model_type="any", vision=True, dtype="float32", image_backend=backend, pixels=pixels)
    arguments = EngineArgs(model=str(checkpoint), dtype="float32", mm_processor_kwargs=image_arguments(served))
    return renderer_from_config(VllmConfig(model_config=arguments.create_model_config()))


def render(made: Any, messages: list[dict[str, Any]], images: list[bytes]) -> Rendered:
    from vllm.renderers import ChatParams

    urls = iter(f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images)
    chat = [
        {
            "role": message["role"],
            "content": [
                {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})  # the default of a request
    _, [prompt] = made.render_chat([chat], params, skip_mm_cache=True)
    items = prompt["mm_kwargs"]["image"] if images else []
    return Rendered(
        input_ids=list(prompt["prompt_token_ids"]),
        grids=[item["image_grid_thw"].data.tolist() for item in items],
        pixels=torch.cat([item["pixel_values"].data for item in items]) if items else torch.zeros(0),
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        name: make_checkpoint(name, tmp_path_factory.mktemp(name), lively=False, num_hidden_layers=4)
        for name in TARGETS
    }


def tokenized(folder, checkpoint, backend: str, **settings: Any) -> dict[str, TokenSample]:
    (folder / "samples").mkdir()
    samples = write_cases(folder / "samples")
    stage = run_tokenize(
        folder, samples, processor=str(checkpoint), image_backend=backend, min_loss_tokens=1, **settings
    )
    reader = TokenReader(stage.artifact(TokenShards))
    return {sample.id: sample for sample in map(reader.sample, range(len(reader)))}


@pytest.fixture(scope="module", params=SEVERAL, ids="-".join)
def pair(request, checkpoints, tmp_path_factory):
    """The prompts of all cases by dflow and by vLLM, for one family and image backend."""
    name, backend = request.param
    checkpoint = checkpoints[name]
    made = renderer(checkpoint, backend, {})
    theirs = {case: render(made, messages[:-1], images) for case, (messages, images) in CASES.items()}
    return checkpoint, backend, tokenized(tmp_path_factory.mktemp("tokens"), checkpoint, backend), theirs


def normalised(pixels: Tensor, checkpoint) -> Tensor:
    """As the vision tower of vLLM does it on the device."""
    images = load_processor(str(checkpoint)).image_processor
    mean, std = (
        torch.tensor(values).repeat_interleave(pixels.shape[1] // 3) for values in (images.image_mean, images.image_std)
    )
    return (pixels.float() / 255 - mean) / std


@pytest.mark.parametrize("case", CASES)
def test_vllm_gets_the_ids_grids_and_pixels_of_tokenize_chat(pair, case):
    """A photo that its EXIF data turn, too, which SGLang does not turn."""
    checkpoint, backend, ours, theirs = pair
    ours, theirs = ours[case], theirs[case]
    assert theirs.input_ids == ours.input_ids[: ours.prompt_tokens].tolist()
    assert theirs.grids == ours.image_grid_thw.tolist()
    if CASES[case][1]:
        difference = (normalised(theirs.pixels, checkpoint) - ours.pixel_values).abs().max().item()
        print(f"{case}: largest difference of the pixels {difference:.1e}")
        assert difference <= (0 if backend == "pillow" else 1e-6)


def test_other_image_sizes_than_the_targets_own_are_told_to_vllm(checkpoints, tmp_path):
    ours = tokenized(tmp_path, checkpoints["qwen3_vl"], "pillow", max_pixels=1024)["too large"]
    messages, images = CASES["too large"]
    limits = {"min_pixels": 256, "max_pixels": 1024}
    grids = [
        render(renderer(checkpoints["qwen3_vl"], "pillow", pixels), messages[:-1], images).grids
        for pixels in ({}, limits)
    ]
    assert [False, True] == [grid == ours.image_grid_thw.tolist() for grid in grids]


def test_the_name_that_transformers_prefers_is_refused_by_the_processor_of_videos(checkpoints):
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    arguments = EngineArgs(model=str(checkpoints["qwen3_vl"]), dtype="float32", mm_processor_kwargs={"backend": "pil"})
    messages, images = CASES["png"]
    with pytest.raises(ImportError, match="Video processor cannot be loaded - requested pil backend"):
        made = renderer_from_config(VllmConfig(model_config=arguments.create_model_config()))
        render(made, messages[:-1], images)
