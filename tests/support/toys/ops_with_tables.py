"""An op with tables in its config: two that a field chooses, and one that is always there."""

import sys
from pathlib import Path

from dsl.graph import Graph
from dsl.op import OpSpec
from dsl.op_table import load_op
from dsl.read_toml import read_graph

OPS = '''
from typing import Literal
from attrs import frozen, validators
from dsl.convert import ChosenBy, Needs
from dsl.op import Artifact, field, op


NEEDS = "'{{name}}' needs kind = \\"{}\\""


@frozen
class Text(Artifact):
    """text.txt"""


@frozen(kw_only=True)
class Low:
    """Low ranks."""
    rank: int = field(default=256, validator=validators.ge(1), help="of the low matrix")
    form: Literal["square", "round"] = field(default="square", help="which form")
    width: int | None = field(default=None, validator=Needs(8, "8 needs a label", given=("label",)), help="of a row")
    label: str | None = field(default=None, help="its name")
    headers: dict[str, str] = field(default={}, help="by name")
    chunk: int = field(default=4, neutral=True, help="rows at a time")

    @property
    def size(self):
        return self.rank * 2


@frozen(kw_only=True)
class High:
    level: float = field(help="how high", schema={"minimum": 0})
    depth: int = 1
    pause: float = field(default=0.0, neutral=True, help="seconds")

    def twice(self):
        return self.level * 2


@frozen(kw_only=True)
class Pace:
    steps: int = field(default=10, help="how many")


@op(version=1, run="ranked_ops:train")
@frozen(kw_only=True)
class Train:
    """Trains."""
    kind: Literal["plain", "low", "high"] = field(default="plain", help="which")
    low: Low | None = field(default=None, validator=ChosenBy("kind", "low", NEEDS.format("low")), help="of low")
    high: High | None = field(default=None, validator=ChosenBy("kind", "high", NEEDS.format("high")))
    pace: Pace = field(default=Pace(), help="of all")
    rate: float = 0.5
    note: str = field(default="", neutral=True, help="outside the key")
    output = Text


@op(version=1, run="ranked_ops:train")
@frozen(kw_only=True)
class Reads:
    """Reads a text."""
    text: Text
    rank: int = 1
    output = Text


def train(config, stage):
    (stage.out_dir / "text.txt").write_text(str(config))
    stage.log({"train/loss": 1.0}, step=0)
'''
HEAD = 'pipeline = { name = "p", ops = ["ranked_ops.py"] }\n[node.train]\nop = "train"\n'


def written(folder: Path, text: str, ops: str = OPS) -> Path:
    """Write a pipeline file beside its op file, whose content is `ops`; its node "train" continues at line 4."""
    sys.modules.pop("ranked_ops", None)
    (folder / "ranked_ops.py").write_text(ops)
    file = folder / "p.toml"
    file.write_text(HEAD + text)
    return file


def read(folder: Path, text: str, *overrides: str, sweeps: tuple[str, ...] = ()) -> Graph:
    return read_graph(written(folder, text), overrides, sweeps)


def train(folder: Path) -> OpSpec:
    """Load the op from the op file in a folder."""
    return load_op("train", [folder / "ranked_ops.py"])
