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
LOCAL = Address(port=8000)  # vLLM's own default


def launch_command(
    target: str,
    served: Served,
    draft: DraftOption | None,
    *,
    address: Address = LOCAL,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command, as a list of arguments that begins with "vllm"; without a draft only the target is served.

    target: the checkpoint directory (model/ of a TargetModel) or a model id. draft: its path is that of a directory in
    either format. extra: further arguments for vLLM, which override those before them.
    """
    command = [PROGRAM, "serve", target, "--dtype", served.dtype]
    if draft is not None:
        command += ["--speculative-config", json.dumps(speculative_config(draft))]
        command += ["--per-request-spec-decode-metrics", "summary"]
    images = image_arguments(served)
    if images:
        command += ["--mm-processor-kwargs", json.dumps(images)]
    if served.trust_remote_code:
        command.append("--trust-remote-code")
    return [*command, "--host", address.host, "--port", str(address.port), *extra]


def speculative_config(draft: DraftOption) -> dict[str, Any]:
    """vLLM counts the proposals of a step, which are one fewer than the tokens that are verified at once."""
    return {"method": METHODS[draft.algorithm], "model": draft.path, "num_speculative_tokens": draft.block_size - 1}


def image_arguments(served: Served) -> dict[str, Any]:
    """How the images of the training were prepared, for the processor that vLLM loads: by which library they are
    resized, and to which sizes if those of the target differ.

    transformers' newer name, backend = "pil", is refused there: it goes to the processor of videos too, which has none.
    """
    if not served.vision or served.image_backend is None:
        return {}
    return {"use_fast": served.image_backend == "torchvision", **served.pixels}


def environment(served: Served) -> dict[str, str]:
    """Environment variables that the server needs.

    vLLM's older model runner gives the draft a row of the 3-D positions of a target with images, silently, and fewer
    tokens are accepted; the newer one counts 1-D positions. vLLM refuses to start where that cannot be used.
    """
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if served.vision else {}


def draft_for_vllm(directory: Path) -> Path:
    """The directory of a draft that vLLM is given: that of speculators' format, if the export has one. It also reads
    the serving directory itself.
    """
    own = directory / FOLDER
    return own if own.is_dir() else directory


def warnings_for_vllm(served: Served) -> list[str]:
    """What vLLM cannot be told."""
    if not served.captured_flags:
        return []
    return [
        f"the features of the training were captured by SGLang with {' '.join(served.captured_flags)}, and vLLM's own "
        "formats of these numbers differ: its target computes something else than the draft was trained on"
    ]
