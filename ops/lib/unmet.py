"""What configs lack, on this machine or in their files: field -> sentence with the way out. Loads no torch, no sglang.

The executor asks these functions before a run's first stage, so that nobody trains for days and then lacks a library,
or has a line of a file to mend.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from dsl.errors import DataError
from ops.capture_targets.op import CaptureTargets
from ops.check_export.op import CheckExport
from ops.evaluate.benchmark_rows import check_benchmark
from ops.evaluate.op import Evaluate
from ops.lib.sglang.version import require_sglang
from ops.regenerate_answers.op import RegenerateAnswers
from ops.tokenize_chat.op import TokenizeChat


def capture_targets_unmet(config: CaptureTargets) -> dict[str, str]:
    """SGLang, where it captures."""
    return _sglang("backend", 'backend = "sglang"') if config.backend == "sglang" else {}


def check_export_unmet(config: CheckExport) -> dict[str, str]:
    """SGLang, where the live stage must not be passed over."""
    if config.live != "required":
        return {}
    return {name: f'{text}; live = "auto" passes the stage over' for name, text in _sglang("live", "the gate").items()}


def tokenize_chat_unmet(config: TokenizeChat) -> dict[str, str]:
    """torchvision, where it resizes images."""
    return _torchvision(config.image_backend)


def regenerate_answers_unmet(config: RegenerateAnswers) -> dict[str, str]:
    """torchvision, where it resizes images, and the server's API key."""
    missing = _torchvision(config.image_backend)
    if config.api_key_env is not None and not os.environ.get(config.api_key_env, "").strip():
        missing["api_key_env"] = (
            f"this environment variable is not set: export {config.api_key_env}=... with the server's API key"
        )
    return missing


def evaluate_unmet(config: Evaluate) -> dict[str, str]:
    """A benchmark file without mistakes: it is read when all else is done. One that is not there is told as such."""
    if config.benchmark is None or not Path(config.benchmark).exists():
        return {}
    try:
        check_benchmark(Path(config.benchmark))
    except DataError as error:
        return {"benchmark": str(error)}
    return {}


def _sglang(field: str, what: str) -> dict[str, str]:
    try:
        require_sglang(what)
    except DataError as error:
        return {field: str(error)}
    return {}


def _torchvision(image_backend: str) -> dict[str, str]:
    if image_backend != "torchvision" or importlib.util.find_spec("torchvision") is not None:
        return {}
    return {
        "image_backend": "torchvision is not installed here: install the build of it that fits the installed torch, "
        'or take image_backend = "pillow"'
    }
