"""The command that serves a target with a draft in vLLM. Loads neither torch nor vllm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.lib.drafts.backbone.speculators import FOLDER
from ops.lib.sglang.serve_command import Address, DraftOption, Served

PROGRAM = "vllm"
METHODS = {"DFLASH": "dflash", "DSPARK": "dspark"}  # SGLang's name of an algorithm -> vLLM's
# Types that vLLM has to run by transformers' models: its own class gives a draft no states of its layers, or (Gemma 4)
# rows of the embedding without their scale.
BY_TRANSFORMERS = frozenset({"cohere2", "gemma3_text", "gemma4_text", "glm4_moe", "glm4_moe_lite", "qwen2_moe"})
# Types for which it serves no draft: its own class gives no states, and it refuses transformers' model.
REFUSED = frozenset({"lfm2", "lfm2_moe"})
LOCAL = Address(port=8000)  # vLLM's own default


def launch_command(
    target: str,
    served: Served,
    draft: DraftOption | None,
    *,
    address: Address = LOCAL,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command that starts vLLM, as a list that begins with "vllm"; without a draft it serves only the target.

    target: the checkpoint directory (model/ of a TargetModel) or a model id. draft: its path is a directory in either
    format. extra: further arguments for vLLM, which override earlier ones.
    """
    command = [PROGRAM, "serve", target, "--dtype", served.dtype]
    if draft is not None:
        command += ["--speculative-config", json.dumps(speculative_config(draft))]
        command += ["--per-request-spec-decode-metrics", "summary"]
        if served.model_type in BY_TRANSFORMERS:
            command += ["--model-impl", "transformers"]
    images = image_arguments(served)
    if images:
        command += ["--mm-processor-kwargs", json.dumps(images)]
    if served.trust_remote_code:
        command.append("--trust-remote-code")
    if served.rope_limit is not None:  # more would give its long angles to every text
        command += ["--max-model-len", str(served.rope_limit)]
    return [*command, "--host", address.host, "--port", str(address.port), *extra]


def speculative_config(draft: DraftOption) -> dict[str, Any]:
    """The speculative config for vLLM, which counts the proposals of a step: one fewer than the verified tokens."""
    return {"method": METHODS[draft.algorithm], "model": draft.path, "num_speculative_tokens": draft.block_size - 1}


def image_arguments(served: Served) -> dict[str, Any]:
    """vLLM's arguments for the processor, so that it prepares images as in training: resizing library and pixel limits.

    transformers' newer name, backend = "pil", would be refused: vLLM passes it to the video processor too, which has
    none.
    """
    if not served.vision or served.image_backend is None:
        return {}
    return {"use_fast": served.image_backend == "torchvision", **served.pixels}


def environment(served: Served) -> dict[str, str]:
    """The environment variables that a vLLM server needs.

    With images, vLLM's older model runner silently gives the draft one row of the target's 3-D positions, and fewer
    tokens are accepted. The newer one counts 1-D positions; vLLM refuses to start where it cannot be used.
    """
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if served.vision else {}


def draft_for_vllm(directory: Path) -> Path:
    """The draft directory to give to vLLM: in speculators' format if the export has one, else the serving directory."""
    own = directory / FOLDER
    return own if own.is_dir() else directory


def refusal(model_type: str) -> str:
    """A sentence on a target of REFUSED."""
    return (
        f"vLLM serves no draft for a target of the type {model_type}, whose class there gives no states of its layers: "
        "it refuses to start with one"
    )


def warnings_for_vllm(served: Served) -> list[str]:
    """Warnings about a target that vLLM refuses, and about settings that cannot be passed to vLLM."""
    refused = [refusal(served.model_type)] if served.model_type in REFUSED else []
    if not served.captured_flags:
        return refused
    return [
        *refused,
        f"the features of the training were captured by SGLang with {' '.join(served.captured_flags)}, and vLLM's own "
        "formats of these numbers differ: its target computes something else than the draft was trained on",
    ]
