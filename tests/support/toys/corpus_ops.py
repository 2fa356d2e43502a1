"""Ops for the corpus of mistakes."""

from typing import Literal

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import Samples, TokenShards


@op(version=1, run="corpus_ops:make", single_process=True)
@frozen(kw_only=True)
class Make:
    """An op that makes samples from nothing, or from a file."""

    file: str = field(default="builtin", external=True)
    model: str = field(default="builtin", external=True, model_id=True, pinned_by="revision")
    revision: str | None = None
    seed: int | None = None
    output = Samples


@op(version=1, run="corpus_ops:join", sequence_parallel=True)
@frozen(kw_only=True)
class Join:
    """An op that makes samples from samples."""

    parts: tuple[Samples, ...]
    tokens: TokenShards | None = None
    share: float = field(default=0.5, validator=validators.and_(validators.ge(0), validators.lt(1)))
    most: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    exact: bool = False
    title: str = field(default="t", validator=validators.min_len(1))
    colour: Literal["red", "blue"] = "red"
    layers: tuple[int, ...] = ()
    weights: dict[str, float] = field(default={})
    token: str = ""
    output = Samples


@op(version=1, run="corpus_ops:cut")
@frozen(kw_only=True)
class Cut:
    """An op that makes tokens from samples."""

    samples: Samples
    length: int = field(validator=validators.gt(0))
    output = TokenShards
