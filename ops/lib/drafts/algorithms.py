"""The seam between the backbone and the algorithms: what an algorithm's config declares, and where its code is found.

Each algorithm is a folder of the same files; everything else knows none of them:

    config.py     its fields in a draft's config, their checks, their form in the serving contract, sizes; `shapes`,
                  `MISSING`, `WRONG`: its tensors, and what engines do with wrong fields; the table of a training of it
                  (`...Options`), if there is one; torch-free
    model.py      `around_sublayers` and `heads`: what it adds to the backbone, with start values of its own;
                  `propose`: the tokens of a block from the backbone's hidden states
    loss.py       `block_losses`: the loss of every token, and whether the draft would propose it
    reference.py  slow formulas of both, by the names of tensors: `scores`, `token_logits`, `block_losses`; `enter` and
                  `leave` where something goes around the sublayers

A pipeline's own algorithms are such folders, too (dsl/op_table.py): the class of `my_draft/config.py` is MyDraft,
that of the training's table, if there is one, MyDraftOptions.

A draft's config holds the algorithm's config; its class's package is the folder. `part_of` imports from there by name,
so that a node's key covers only the algorithms that its op names in `chosen_code`.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import attrs

from dsl.errors import ConfigError, did_you_mean
from dsl.imports import named_function
from dsl.op_table import own_algorithms
from ops.lib.drafts.layout import Layout

if TYPE_CHECKING:
    from ops.lib.drafts.backbone.config import DraftConfig

DFLASH = "dflash"
NO_SERVER = "no server serves this algorithm"
CONFIGS = {  # the config classes of the algorithms that come with dflow
    DFLASH: "ops.lib.drafts.dflash.config:Dflash",
    "dflash2": "ops.lib.drafts.dflash2.config:Dflash2",
    "dspark": "ops.lib.drafts.dspark.config:Dspark",
    "lilicorr": "ops.lib.drafts.lilicorr.config:Lilicorr",
}
FILES = {"model": "propose", "loss": "block_losses", "reference": "scores"}  # file -> a name in it


class Algorithm(Protocol):
    """The config of an algorithm, a frozen attrs class; two with equal fields are equal."""

    name: ClassVar[str]
    architecture: ClassVar[str]  # of the serving contract
    engine: ClassVar[str]  # SGLang's name for what serves it; empty: no server does
    source: ClassVar[str]  # the address of its paper or of its authors' code; empty: there is none

    def layout(self, block_size: int) -> Layout:
        """The layout of a block of `block_size` verified tokens: which slot predicts which token."""

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        """The names of the metrics that the algorithm's loss gives for each token, in order.

        with_teacher: whether the loss reads the target's distribution.
        """

    def mistakes(self, draft: DraftConfig) -> list[str]:
        """The mistakes of the algorithm's fields in this draft, each as "field: what is wrong"."""

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        """The algorithm's serving config.json, made from that of plain DFlash."""

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[Algorithm, dict[str, Any]]:
        """The algorithm of a config.json, and the config.json of plain DFlash without it; the inverse of `to_serving`.

        Raises KeyError or TypeError.
        """

    def slot_flops(self, draft: DraftConfig) -> float:
        """Floating-point operations of one slot, forward and backward, apart from the backbone and the head."""


@runtime_checkable
class InSpeculators(Protocol):
    """A mixin for the config of an algorithm that the library speculators supports too, so that its format can be
    written.
    """

    speculators_type: ClassVar[str]
    speculators_architecture: ClassVar[str]

    def to_speculators(self) -> dict[str, Any]:
        """The algorithm's own config fields, in the format of the library speculators."""


@runtime_checkable
class ReadsContext(Protocol):
    """A mixin for the config of an algorithm whose head reads the end of a block's context and the target's embedding
    (block_context.py).
    """

    reads_context: ClassVar[bool]


@runtime_checkable
class StartsFromOthers(Protocol):
    """A mixin for the config of an algorithm whose training may start from drafts of others, too, not only from its own
    and plain DFlash's.
    """

    def start_mistake(self, parent: Algorithm) -> str:
        """What to do about a draft of this other config, from which a training cannot start; "" if it can.

        Where it can, tensors of the same name are kept, the other ones of the draft are dropped.
        """


@runtime_checkable
class PlainLogits(Protocol):
    """A mixin for the config of an algorithm whose logits engines make without scale and soft cap of the target's."""

    plain_logits: ClassVar[bool]


@runtime_checkable
class KeepsInPass(Protocol):
    """A mixin for the config of an algorithm whose heads keep much for their backward pass, which a plan counts."""

    def pass_bytes(self, draft: DraftConfig, blocks: int, item_size: int) -> int:
        """The bytes that the heads keep at most, over this many blocks in one pass."""


def algorithm_names() -> tuple[str, ...]:
    """The names of the algorithms that come with dflow, then of the pipeline's own."""
    return (*CONFIGS, *own_algorithms())


def algorithm_class(name: str) -> type[Algorithm]:
    """The config class of an algorithm by its name.

    Raises ConfigError for an unknown name, and for a user's algorithm whose config.py cannot be used.
    """
    names = algorithm_names()
    if name not in names:
        hint = did_you_mean(name, names) or f"one of {', '.join(names)}"
        raise ConfigError(
            f'there is no algorithm "{name}" ({hint}); [pipeline] drafts names folders of your own, '
            "--drafts of dflow evaluate one of them"
        )
    found: type[Algorithm] = named_function(CONFIGS[name]) if name in CONFIGS else _own(name)
    return found


def own_options(name: str) -> type | None:
    """The options class of a user's algorithm, for its table in trainings; None without one. Raises ConfigError."""
    found = _own(name, "Options")
    lacks = [] if found is None else [each for each in ("base", "needs_teacher", "sizes") if not _has(found, each)]
    if found is not None and lacks:
        where = own_algorithms()[name] / "config.py"
        raise ConfigError(f"{where}: {found.__name__} has no {', '.join(lacks)} (docs/drafts.md)")
    return found


def _has(cls: type, name: str) -> bool:
    """Whether an attrs class has a field, a method or a constant."""
    return hasattr(cls, name) or name in {each.name for each in attrs.fields(cls)}


def _place(name: str, suffix: str = "") -> str:
    """The place of an algorithm's class, as "module:name"."""
    if name in CONFIGS:
        return CONFIGS[name]
    return f"{name}.config:{''.join(map(str.capitalize, name.split('_')))}{suffix}"


def _own(name: str, suffix: str = "") -> Any:
    """A class in the config.py of a user's algorithm; None if one with a suffix is missing. Raises ConfigError."""
    wanted, where = _place(name, suffix).rpartition(":")[2], own_algorithms()[name] / "config.py"
    try:
        named_function(f"{name}.config:__name__")
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{place_in(error) or f'{where}: '}{type(error).__name__}: {error}") from error
    module = sys.modules[f"{name}.config"]
    if module.__file__ != str(where):
        raise ConfigError(f"{where} is not used, since this process has imported {module.__file__} before")
    found = getattr(module, wanted, None)
    if found is None and suffix:
        return None
    if found is None:
        raise ConfigError(f"{where} has no class {wanted}: it is named like the folder, {name}")
    if not isinstance(found, type) or not attrs.has(found):
        raise ConfigError(f"{where}: {wanted} is no attrs class")
    return found


def place_in(error: BaseException) -> str:
    """The place in a user's algorithm folder where an error was raised, as "file:line: "; "" for none."""
    files = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        files.append((error.filename or "", error.lineno or 1))
    own = [(file, line) for file, line in files if Path(file).parent in own_algorithms().values()]
    return f"{own[-1][0]}:{own[-1][1]}: " if own else ""


def plain() -> Algorithm:
    """The config of plain DFlash."""
    return algorithm_class(DFLASH)()


def name_and_fields(algorithm: Algorithm) -> dict[str, Any]:
    """A description of an algorithm for readers: its name and its config's fields."""
    cls = type(algorithm)
    assert attrs.has(cls)
    return {"algorithm": algorithm.name, **{each.name: getattr(algorithm, each.name) for each in attrs.fields(cls)}}


def part_of(algorithm: Algorithm | type[Algorithm], place: str) -> Any:
    """The object "file:name" in the folder of an algorithm."""
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    return named_function(f"{cls.__module__.rpartition('.')[0]}.{place}")


def file_of(algorithm: Algorithm, name: str) -> str:
    """The path of an algorithm's file, by its name without .py."""
    return str(Path(inspect.getfile(type(algorithm))).with_name(f"{name}.py"))


def code_of(names: Iterable[str], *files: str) -> tuple[str, ...]:
    """The code of some algorithms, as "module:name": their config.py, and those of `FILES` that an op imports.

    files: names of the latter.
    """
    code: list[str] = []
    for name in names:
        folder = _place(name).rpartition(".config:")[0]
        code += [_place(name), *(f"{folder}.{file}:{FILES[file]}" for file in files)]
    return tuple(code)
