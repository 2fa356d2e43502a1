"""The nodes of benchmarks/execution.py as ops of dflow."""

from __future__ import annotations

from pathlib import Path

import work
from attrs import frozen

from dsl.op import Artifact, field, op
from dsl.stage import Stage


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="chain_ops:append")
@frozen(kw_only=True)
class Append:
    """Writes the previous text and one more value."""

    before: Text | None = None
    value: str = field(default="", help="what is added")
    name: str = field(default="", neutral=True, help="name of the call in calls.txt")
    seconds: float = field(default=0.0, neutral=True, help="how long it takes")
    output = Text


def append(config: Append, stage: Stage) -> None:
    before = stage.inputs["before"].path / "text.txt" if config.before is not None else None
    work.append(config.name, stage.out_dir / "text.txt", config.value, before, config.seconds)


@op(version=1, run="chain_ops:large")
@frozen(kw_only=True)
class Large:
    """Writes a large file from a small one."""

    source: str = field(external=True, help="the small file")
    megabytes: int = field(default=100, help="how large")
    output = Text


def large(config: Large, stage: Stage) -> None:
    work.large(stage.out_dir / "text.txt", Path(config.source).read_text(), config.megabytes)
