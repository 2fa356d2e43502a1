"""Capture with SGLang: the features come from the code that will serve the target.

Imported by name, by run.py, because SGLang is not always installed. The calls of SGLang are in ops/lib/sglang; this
module has what a capture needs besides: which targets are supported, how long samples may be, and which ranks share a
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch.distributed as dist
from attrs import define, frozen

from dsl.errors import ConfigError, DataError
from ops.artifacts import TargetModel
from ops.capture_targets.backend import States
from ops.capture_targets.op import CaptureTargets, default_batch_tokens
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.sglang.layers import Recipe
from ops.lib.sglang.process import context_length
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.model import read_config, target_info
from ops.lib.training.ranks import meeting_store
from ops.lib.vision.families import VisionFamily, family_of

# Compared with transformers' states, see docs/sglang.md.
MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
# What SGLang raises, between parsing arguments and its first allocation, for arguments that it cannot use.
STARTING_ERRORS = (ValueError, TypeError, AssertionError, AttributeError, RuntimeError)
PATCH_DIM_OF_QWEN25 = 1176  # the only width of pixel rows that SGLang's Qwen2.5-VL interprets as pixels


class LoadingStage(Protocol):
    """The part of a Stage that loading a target needs."""

    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> str: ...


@define(eq=False)
class SglangBackend:
    """A target of SGLang's in this process, or this rank's share of one."""

    runtime: SglangRuntime
    recipe: Recipe

    @classmethod
    def start(cls, config: CaptureTargets, stage: LoadingStage, readers: Mapping[str, TokenReader]) -> SglangBackend:
        """Load the target after all checks.

        Raises DataError for a target that SGLang cannot capture, and for samples longer than the target's context or
        than what memory holds; ConfigError for server arguments that SGLang rejects, and for ranks that cannot
        share the target evenly.
        """
        target: TargetModel = stage.inputs["target"]
        check_target(target, config)
        given = config.server_args or {}
        longest = longest_sample(readers)
        trust = trusts_own_code(target.path / "model", target_info(target))
        check_length(longest, context_length(target.path / "model", trust), "the target's context")
        try:
            runtime = SglangRuntime.start(
                target.path / "model",
                device=stage.device,
                dtype=config.dtype,
                pool_tokens=max(config.batch_tokens or default_batch_tokens(stage.device), longest.tokens),
                context_length=longest.tokens,
                server_args={"trust_remote_code": trust, **given},
                tp_rank=stage.rank % config.tp_degree,
                tp_size=config.tp_degree,
                store=group_store(stage, config.tp_degree) if config.tp_degree > 1 else None,
            )
        except STARTING_ERRORS as error:
            if not given:
                raise
            shown = ", ".join(f"{name} = {value!r}" for name, value in given.items())
            raise ConfigError(f"SGLang does not start with server_args {shown}: {error}") from error
        with ExitStack() as undo:
            undo.callback(runtime.close)
            check_length(longest, runtime.pool_tokens, "what memory holds,")
            undo.pop_all()
        return cls(runtime, config.recipe)

    def forward(
        self, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
    ) -> list[States]:
        """The samples one after the other, without padding."""
        captured = self.runtime.states(samples, layer_ids, final_hidden=final_hidden, recipe=self.recipe)
        return [States(features_SF, final_SM) for features_SF, final_SM in captured]

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on a rank of this model."""
        return self.runtime.any_rank(flag)

    def close(self) -> None:
        self.runtime.close()


@frozen
class Longest:
    """The sample with the most tokens."""

    id: str
    tokens: int


def longest_sample(readers: Mapping[str, TokenReader]) -> Longest:
    """The longest sample of all captured splits."""
    record = max((row for reader in readers.values() for row in reader.records), key=lambda row: row["tokens"])
    return Longest(record["id"], record["tokens"])


def check_length(longest: Longest, limit: int, what: str) -> None:
    """Raises DataError for a sample too long for a pass, before anything is captured.

    It is not dropped, because the features' samples must be those of the tokens.
    """
    if longest.tokens > limit:
        raise DataError(
            f"sample {longest.id}: {longest.tokens:,} tokens, more than {what} of {limit:,}: drop such samples "
            f"with max_length = {limit} of tokenize_chat"
        )


def check_target(target: TargetModel, options: CaptureTargets) -> None:
    """Raises DataError for a target that was not compared with SGLang, and ConfigError for its ranks."""
    config = read_config(target.path / "model")
    model_type, remedy = config.get("model_type"), 'use backend = "huggingface"'
    if model_type not in MODEL_TYPES:
        raise DataError(
            f"the sglang backend captures {', '.join(MODEL_TYPES)}, and the target is a {model_type}: {remedy}"
        )
    family = family_of(config)
    if model_type == "qwen2_5_vl" and isinstance(family, VisionFamily) and family.patch_dim != PATCH_DIM_OF_QWEN25:
        raise DataError(
            f"SGLang's Qwen2.5-VL interprets pixel rows of {PATCH_DIM_OF_QWEN25} numbers as pixels, others as "
            f"embeddings, and the target's have {family.patch_dim}: {remedy}"
        )
    rope = family.text_config.get("rope_parameters") or family.text_config.get("rope_scaling") or {}
    if model_type in INTERLEAVED and family.has_vision and not rope.get("mrope_interleaved"):
        raise DataError(
            f"config.json: the rope_parameters of this {model_type} lack mrope_interleaved = true; transformers "
            "rotates that way by default, but SGLang does not, so images would have other states: add it, or "
            f"{remedy}"
        )
    check_degree(config, options.tp_degree, int((options.server_args or {}).get("ep_size", 1)))


def check_degree(config: Mapping[str, Any], tp_degree: int, ep_size: int = 1) -> None:
    """Raises ConfigError for ranks that cannot share a target of this config.json evenly.

    SGLang's rule: ranks have equal numbers of query heads and of columns of each MLP; key/value heads are divided, or
    replicated if there are fewer of them than ranks.
    """
    text, seeing = config.get("text_config") or config, config.get("vision_config") or {}
    dense = not text.get("num_experts") or bool(text.get("mlp_only_layers"))
    names = ["num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "shared_expert_intermediate_size"]
    named = {name: text.get(name) for name in [*names, *(["intermediate_size"] if dense else [])]}
    named |= {f"vision_config.{name}": seeing.get(name) for name in ("num_heads", "intermediate_size")}
    uneven = [f"{name} = {size}" for name, size in named.items() if size and size % tp_degree]
    columns = text.get("moe_intermediate_size")
    if columns and columns % max(1, tp_degree // ep_size):  # whole experts are dealt out first
        uneven.append(f"moe_intermediate_size = {columns}")
    shared = text.get("num_key_value_heads")
    if shared and shared % tp_degree and tp_degree % shared:
        uneven.append(f"num_key_value_heads = {shared}")
    if uneven:
        raise ConfigError(
            f"tp_degree = {tp_degree} does not divide {', '.join(uneven)} of the target's config.json, so "
            "these ranks cannot share it: change tp_degree"
        )


def group_store(stage: LoadingStage, tp_degree: int) -> dist.Store:
    """The rendezvous of one group, in the store of all ranks."""
    return dist.PrefixStore(
        f"capture_targets/group {stage.rank // tp_degree}", meeting_store(stage.rank, stage.world_size)
    )
