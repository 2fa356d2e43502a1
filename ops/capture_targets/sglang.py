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
from ops.capture_targets.sglang_targets import capture_note, check_config
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.sglang.process import context_length
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.model import read_config, target_info
from ops.lib.training.rank_group import meeting_store

# What SGLang raises, between parsing arguments and its first allocation, for arguments that it cannot use.
STARTING_ERRORS = (ValueError, TypeError, AssertionError, AttributeError, RuntimeError)


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
    def info(self, text: str) -> None: ...


@define(eq=False)
class SglangBackend:
    """A backend that runs the target by SGLang in this process, or this rank's share of the target."""

    runtime: SglangRuntime

    @classmethod
    def start(cls, config: CaptureTargets, stage: LoadingStage, readers: Mapping[str, TokenReader]) -> SglangBackend:
        """Check everything, then load the target.

        Raises DataError for a target that SGLang cannot capture, and for samples that exceed its context or memory.
        Raises ConfigError for server arguments that SGLang rejects, and for ranks that cannot share the target evenly.
        """
        target: TargetModel = stage.inputs["target"]
        stage.info(check_target(target, config))
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
        return cls(runtime)

    def forward(
        self, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
    ) -> list[States]:
        """The states of each sample, concatenated without padding into as many passes as necessary."""
        captured = self.runtime.states(samples, layer_ids, final_hidden=final_hidden)
        return [States(features_SF, final_SM) for features_SF, final_SM in captured]

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on a rank of this model; a collective of these ranks."""
        return self.runtime.any_rank(flag)

    def close(self) -> None:
        self.runtime.close()


@frozen
class Longest:
    """The sample with the most tokens: its id and their number."""

    id: str
    tokens: int


def longest_sample(readers: Mapping[str, TokenReader]) -> Longest:
    """The longest sample of all captured splits."""
    record = max((row for reader in readers.values() for row in reader.records), key=lambda row: row["tokens"])
    return Longest(record["id"], record["tokens"])


def check_length(longest: Longest, limit: int, what: str) -> None:
    """Check before capturing that the longest sample fits one pass. Raises DataError. what: the limit's name.

    A longer sample is not dropped, because the features' samples must be those of the tokens.
    """
    if longest.tokens > limit:
        raise DataError(
            f"sample {longest.id}: {longest.tokens:,} tokens, more than {what} of {limit:,}: drop such samples "
            f"with max_length = {limit} of tokenize_chat"
        )


def check_target(target: TargetModel, options: CaptureTargets) -> str:
    """Check that SGLang can capture a target with these options, and say how. Raises as `check_config`."""
    config = read_config(target.path / "model")
    check_config(config, options)
    return capture_note(config) or ""


def group_store(stage: LoadingStage, tp_degree: int) -> dist.Store:
    """The store through which the ranks of one group meet, inside the store of all ranks."""
    return dist.PrefixStore(
        f"capture_targets/group {stage.rank // tp_degree}", meeting_store(stage.rank, stage.world_size)
    )
