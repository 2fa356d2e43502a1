"""The command that serves a target with a draft in SGLang. Loads neither torch nor sglang.

SGLang's defaults that are kept, and why they are right for the supported versions: the prefix cache stays on, since the
draft's keys and values are in the same slots as the target's and are found again with them; at most 48 requests run
at once with DFLASH (`--max-running-requests` raises it); the layers, the mask token and the attention of each draft
layer are read from the draft's config.json.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from ops.lib.sglang.version import VERSIONS, versions_of
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.sizes import rope_limit
from ops.lib.vision.family_config import text_part
from ops.lib.vision.processor_files import served_pixels

LAUNCHER = "sglang.launch_server"
PATCHED_LAUNCHER = "ops.lib.sglang.launch_server"
# By version: the targets that lack what DFLASH needs; see `patch_setter` in adapter.py. A command is written where no
# SGLang is installed as well, so these stand here; a test reads the same from the installed version.
_LACKING = frozenset(
    {
        *("qwen3_vl", "qwen2_5_vl", "qwen2", "qwen2_moe", "gemma3", "gemma3_text", "shieldgemma2", "llama4"),
        *("glm4_moe", "apertus", "longcat_flash", "minimax_m2"),
    }
)
PATCHED_TYPES: Mapping[str, frozenset[str]] = {
    "0.5.21": _LACKING | {"qwen3_5_text", "qwen3_5_moe_text", "minimax_m3_vl"},
    "0.5.23": _LACKING | {"exaone_moe"},
}
# The classes of targets that transformers has no type or another class for, and that lack it in all versions; a test
# beside that one reads them.
PATCHED_CLASSES = frozenset(
    {
        *("BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM"),
        *("Cosmos3ForConditionalGeneration", "MiniMaxM3SparseForCausalLM", "ExaoneMoEForCausalLM"),
    }
)
# Of the targets that SGLang serves, those that keep a convolution state (linear attention, Mamba, short convolutions),
# which SGLang stores in bfloat16 whatever the dtype of the model; a test compares them with the installed configs.
CONVOLUTION_TYPES = frozenset(
    {
        *("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        *("lfm2", "lfm2_moe", "lfm2_vl", "nemotron_h"),
    }
)
# The server_args of a capture that change what the target computes; the others choose kernels and memory.
NUMBER_FORMATS = ("kv_cache_dtype", "mamba_ssm_dtype", "quantization")
IMAGE_BACKENDS = {"pillow": "pil", "torchvision": "torchvision"}  # as in tokens.json -> SGLang's name


@frozen(kw_only=True)
class Served:
    """The settings for serving a target. model_type: as in its config.json. image_backend: as in tokens.json.

    pixels: min_pixels and max_pixels of the training's images, both, if they differ from the target's. dtype: of
    weights and cache; SGLang's default would turn a float32 checkpoint into float16. server_args: SGLang's arguments in
    the training's capture, from features.json. versions: those of SGLang that may serve. lacking: whether the target's
    class in SGLang lacks what DFLASH needs, whatever the model_type says. rope_limit: the tokens of the longest text
    that was trained on, where the target's RoPE follows the longest text.
    """

    model_type: str
    vision: bool
    dtype: str
    image_backend: str | None = "pillow"
    pixels: Mapping[str, int] = Factory(dict)
    trust_remote_code: bool = False
    server_args: Mapping[str, Any] = Factory(dict)
    versions: tuple[str, ...] = VERSIONS
    lacking: bool = False
    rope_limit: int | None = None

    @property
    def captured_flags(self) -> list[str]:
        """The server arguments that repeat the number formats of the target's capture."""
        return number_formats(self.server_args)

    @property
    def unfit_versions(self) -> tuple[str, ...]:
        """The versions of SGLang whose launcher fails for this target with a draft, so that dflow's must be used."""
        return tuple(each for each in self.versions if self.lacking or self.model_type in PATCHED_TYPES.get(each, ()))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the server needs."""
        if self.model_type in CONVOLUTION_TYPES and self.dtype != "bfloat16":
            return {"SGLANG_MAMBA_CONV_DTYPE": self.dtype}
        return {}

    @classmethod
    def as_trained(
        cls,
        target: Mapping[str, Any],
        config: Mapping[str, Any],
        captured: Mapping[str, Any],
        model_dir: Path,
        engine: str | None = None,
    ) -> Served:
        """The serving settings with which a draft gets the hidden states that it was trained on.

        target, config: content of target.json and of the checkpoint's config.json. captured: the entry of this name in
        the draft's training.json. model_dir: the checkpoint. engine: as set in export_draft; None: any supported
        SGLang.
        """
        return cls(
            model_type=target["model_type"],
            vision=target["vision"],
            dtype=checkpoint_dtype(config),
            image_backend=(captured.get("image_backend") or "pillow") if target["vision"] else None,
            pixels=served_pixels(captured, model_dir),
            trust_remote_code=trusts_own_code(model_dir, target),
            server_args=captured.get("server_args") or {},
            versions=versions_of(engine),
            lacking=not PATCHED_CLASSES.isdisjoint(config.get("architectures") or ()),
            rope_limit=rope_limit(text_part(config)),
        )


@frozen(kw_only=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 30000

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"


@frozen(kw_only=True)
class DraftOption:
    """A draft to serve: its serving directory, its number of verified tokens, and SGLang's name of its algorithm."""

    path: str
    block_size: int
    algorithm: str = "DFLASH"


def launch_command(
    target: str,
    served: Served,
    draft: DraftOption | None,
    *,
    address: Address = Address(),
    extra: Sequence[str] = (),
) -> list[str]:
    """The command that starts SGLang, as a list that begins with "python"; without a draft it serves only the target.

    target: the checkpoint directory (model/ of a TargetModel) or a model id. extra: further arguments for SGLang, which
    override earlier ones.
    """
    launcher = PATCHED_LAUNCHER if served.unfit_versions and draft is not None else LAUNCHER
    command = ["python", "-m", launcher, "--model-path", target, "--dtype", served.dtype]
    if draft is not None:
        command += ["--speculative-algorithm", draft.algorithm, "--speculative-draft-model-path", draft.path]
        command += ["--speculative-num-draft-tokens", str(draft.block_size)]
    if served.vision and served.image_backend is not None:
        # "auto" uses torchvision if it is installed, whose pixels differ from those of pillow by two grey levels.
        command += ["--image-processor-backend", IMAGE_BACKENDS[served.image_backend]]
    if served.vision and served.pixels:  # a single one would be silently ignored
        command += ["--mm-process-config", json.dumps({"image": dict(served.pixels)})]
    if served.trust_remote_code:
        command.append("--trust-remote-code")
    command += served.captured_flags
    if served.rope_limit is not None:  # a pass in which a draft's block is beyond it has other angles for all its texts
        block = 0 if draft is None else draft.block_size
        command += ["--context-length", str(served.rope_limit - block)]
    return [*command, "--host", address.host, "--port", str(address.port), *extra]


def number_formats(server_args: Mapping[str, Any] | None) -> list[str]:
    """The command line arguments of a capture's server_args that serving must repeat."""
    values = server_args or {}
    return [
        part for name in NUMBER_FORMATS if name in values for part in (f"--{name.replace('_', '-')}", str(values[name]))
    ]


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """The dtype in which a checkpoint is stored and served, from its config.json."""
    for part in (config, config.get("text_config") or {}):
        dtype = part.get("dtype") or part.get("torch_dtype")
        if dtype:
            return str(dtype).removeprefix("torch.")
    return "float32"


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command as a line for a shell, with its environment variables."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


# What SGLang prints when it refuses DFLASH, DSPARK, or any model, on this machine.
REFUSAL = re.compile(
    r"^.*(?:speculative decoding (?:is not supported by|only supports CUDA)|No accelerator \(CUDA).*$", re.MULTILINE
)
