"""vLLM's own renderer and tokenize_chat, given the same messages and images, make the same of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from attrs import frozen
from chat_requests import chat_of, image_settings, renderer, tokenized
from family_checkpoints import FAMILIES, make_checkpoint
from http_servers import running_command
from preprocessing_cases import CASES, TEXTS
from torch import Tensor

from ops.lib.data.token_shards import TokenSample
from ops.lib.vision.processor import load_processor

BACKENDS = ("pillow", "torchvision")
TARGETS = [name for name, row in FAMILIES.items() if row.vision]
SEVERAL = [(name, backend) for name in TARGETS for backend in BACKENDS]


@frozen(eq=False)
class Rendered:
    """A prompt as vLLM's engine gets it. pixels: before normalisation, which the vision tower does itself."""

    input_ids: list[int]
    grids: list[list[int]]
    pixels: Tensor

    @classmethod
    def of(cls, input_ids: list[int], items: Sequence[Any]) -> Rendered:
        """From vLLM's ids and its image items, one per image."""
        return cls(
            input_ids=input_ids,
            grids=[item["image_grid_thw"].data.tolist() for item in items],
            pixels=torch.cat([item["pixel_values"].data for item in items]) if items else torch.zeros(0),
        )


def render(made: Any, messages: list[dict[str, Any]], images: list[bytes]) -> Rendered:
    from vllm.renderers import ChatParams

    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})  # the default of a request
    _, [prompt] = made.render_chat([chat_of(messages, images)], params, skip_mm_cache=True)
    return Rendered.of(list(prompt["prompt_token_ids"]), prompt["mm_kwargs"]["image"] if images else [])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        name: make_checkpoint(name, tmp_path_factory.mktemp(name), lively=False, num_hidden_layers=4)
        for name in TARGETS
    }


@pytest.fixture(scope="module", params=SEVERAL, ids="-".join)
def pair(request, checkpoints, tmp_path_factory):
    """All cases' prompts by dflow and by vLLM, for one family and image backend."""
    name, backend = request.param
    checkpoint = checkpoints[name]
    made = renderer(checkpoint, backend, {})
    theirs = {case: render(made, messages[:-1], images) for case, (messages, images) in CASES.items()}
    return checkpoint, backend, tokenized(tmp_path_factory.mktemp("tokens"), checkpoint, backend), theirs


def normalised(pixels: Tensor, checkpoint) -> Tensor:
    """Normalise pixels as vLLM's vision tower does on the device."""
    images = load_processor(str(checkpoint)).image_processor
    mean, std = (
        torch.tensor(values).repeat_interleave(pixels.shape[1] // 3) for values in (images.image_mean, images.image_std)
    )
    return (pixels.float() / 255 - mean) / std


@pytest.mark.parametrize("case", CASES)
def test_vllm_gets_the_ids_grids_and_pixels_of_tokenize_chat(pair, case):
    """A photo that its EXIF data turn, too, which SGLang does not turn."""
    checkpoint, backend, ours, theirs = pair
    difference = compared(ours[case], theirs[case], checkpoint)
    print(f"{case}: largest difference of the pixels {difference:.1e}")
    assert difference <= (0 if backend == "pillow" else 1e-6)


def compared(ours: TokenSample, theirs: Rendered, checkpoint: Path) -> float:
    """The largest difference of the pixels of one prompt by dflow and by vLLM; ids and grids must be equal."""
    assert theirs.input_ids == ours.input_ids[: ours.prompt_tokens].tolist()
    assert theirs.grids == ours.image_grid_thw.tolist()
    if not theirs.grids:
        return 0.0
    return float((normalised(theirs.pixels, checkpoint) - ours.pixel_values).abs().max())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_the_render_endpoint_answers_with_the_ids_grids_and_pixels_of_tokenize_chat(name, tmp_path):
    """`vllm launch render`, which needs no GPU, asked over HTTP."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import MultiModalFeatures

    checkpoint = make_checkpoint(name, tmp_path / "checkpoint", lively=False, num_hidden_layers=4)
    vision = FAMILIES[name].vision
    cases = CASES if vision else TEXTS
    ours = tokenized(tmp_path, checkpoint, cases=cases)
    command = [str(Path(sys.executable).with_name("vllm")), "launch", "render", str(checkpoint), "--dtype", "float32"]
    if vision:
        command += ["--mm-processor-kwargs", json.dumps(image_settings("pillow"))]
    with running_command(command, tmp_path, os.environ) as server:
        for case, (messages, images) in cases.items():
            body = {"messages": chat_of(messages[:-1], images)}
            url = f"{server.url}/v1/chat/completions/render"
            answer = httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status().json()
            items = mm_kwargs_from_features(MultiModalFeatures(**answer["features"]))["image"] if images else []
            assert compared(ours[case], Rendered.of(answer["token_ids"], items), checkpoint) == 0


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
