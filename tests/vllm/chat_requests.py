"""Conversations as clients send them to vLLM, and as tokenize_chat makes them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chat_samples import run_tokenize
from preprocessing_cases import CASES, Cases, write_cases

from ops.artifacts import TokenShards
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.sglang.serve_command import Served
from ops.lib.vllm.serve_command import image_arguments


def chat_of(messages: Sequence[dict[str, Any]], images: Sequence[bytes]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form, every image as a data URL."""
    urls = iter(f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images)
    return [
        {
            "role": message["role"],
            "content": [
                {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def tokenized(
    folder: Path, checkpoint: Path, backend: str = "pillow", *, cases: Cases = CASES, **settings: Any
) -> dict[str, TokenSample]:
    """tokenize_chat's samples of the cases, by name."""
    (folder / "samples").mkdir()
    samples = write_cases(folder / "samples", cases)
    stage = run_tokenize(
        folder, samples, processor=str(checkpoint), image_backend=backend, min_loss_tokens=1, **settings
    )
    reader = TokenReader(stage.artifact(TokenShards))
    return {sample.id: sample for sample in map(reader.sample, range(len(reader)))}


def image_settings(backend: str, pixels: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """The arguments by which dflow tells vLLM how images are prepared."""
    served = Served(model_type="any", vision=True, dtype="float32", image_backend=backend, pixels=dict(pixels))
    return image_arguments(served)


def renderer(checkpoint, backend: str, pixels: dict[str, int]) -> Any:
    """vLLM's renderer as `vllm serve` makes it with dflow's arguments."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    settings = image_settings(backend, pixels)
    arguments = EngineArgs(model=str(checkpoint), dtype="float32", mm_processor_kwargs=settings)
    return renderer_from_config(VllmConfig(model_config=arguments.create_model_config()))
