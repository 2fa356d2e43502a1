"""What the config class of an op may have beside its fields: attributes, methods and hooks; and where they are."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dsl.convert import structure
from dsl.errors import ConfigError, StructureError
from dsl.finding import Finding

if TYPE_CHECKING:
    from dsl.estimate import Estimate, PlanContext
    from dsl.op import OpSpec


Question = Literal["target", "good", "safe", "limit"]  # of the report's first screen, see ops/lib/report_sections.py
Folders = Mapping[str, Path | tuple[Path, ...] | None]  # of the artifacts that a node reads, by edge
NEAR = 0.85  # from which likeness on a name is taken for a misspelled one
# The files beside a built-in op's op.py in which its hooks lie, as functions of the same names.
HOOK_FILES = {
    "report": "show",
    "compare": "show",
    "logged_model": "show",
    "missing_here": "plan",
    "estimate": "plan",
    "smoke": "plan",
    "threads": "plan",
    "conflicts": "conflicts",
}


class OpClass(Protocol):
    """The members that dflow looks for. Each may be left out; `@op` refuses wrong types, parameters and near names.

    Class attributes and hooks do not affect the key, so a run function must not use them; it may call the `conflicts`
    of a built-in op's conflicts.py, which is then part of its code. A hook is a method here, or a function in a file
    beside the op.py of a built-in op (HOOK_FILES), which then takes the config in place of self. It loads no torch.
    Methods that are no hooks are part of the node's code; edits of them run the node again.
    """

    transient: tuple[str, ...] = ()
    """Errors that may pass, by the qualified names of their classes or of bases ("httpx.TransportError"): as after
    TransientError, the node is tried again."""
    shows_results: bool = False
    """A run shows the op's metrics at its end also where another node reads its artifact."""
    judged_by: str = ""
    """The metric of this op that tells how good a pipeline's result is; it sorts the table of a sweep. "-" before it
    where less is better."""
    main_figures: str = ""
    """A regular expression of the names of its main metrics, ends of intervals aside; they stand in MLflow's
    description of a run. Empty: all."""
    answers: tuple[Question, ...] = ()
    """The questions on a report's first screen that the op answers by a verdict in its report: a node that did not is
    listed as not measured."""

    def external_files(self) -> Mapping[str, Path | None]:
        """The files named inside the config's external files, as name -> absolute path; None for a missing file.

        Names and contents enter the key.
        """

    def chosen_libraries(self) -> tuple[str, ...]:
        """Distributions whose versions enter the key beside key_libraries, chosen by a field."""

    def chosen_code(self) -> tuple[str, ...]:
        """Code as "module:symbol" that the run function imports by a constant or computed name; it enters the key."""

    @staticmethod
    def launch_mistakes(values: Mapping[str, Any], launch: Mapping[str, Any]) -> Mapping[str, str]:
        """Mistakes between config and launch, as field -> text. values, launch: the given values that are valid."""

    @staticmethod
    def mistakes_with_nodes_above(
        values: Mapping[str, Any], above: Callable[..., Mapping[str, Any]]
    ) -> Mapping[str, str]:
        """Mistakes between this node's values and those of nodes that it reads, as field -> text.

        `above("draft", "draft")` follows these edges, and returns the values of the node there, with defaults; empty
        without one.
        """

    def missing_here(self) -> Mapping[str, str]:
        """Things that are missing on this machine or in a file that only this node reads, as field -> what to do.

        One sentence per line. Called before a run's first stage.
        """

    def conflicts(self, forecast: Mapping[str, Any]) -> Mapping[str, str]:
        """Conflicts between the config and the node's inputs, as field -> text in the form of `missing_here`.

        forecast: edge -> what the `estimate` of the node read there forecasts; None without a forecast, a tuple for a
        `tuple` edge. Unknown values refuse nothing. The stage of a built-in op calls the same function on its real
        inputs.
        """

    def estimate(self, context: PlanContext) -> Estimate | None:
        """Estimate the node's needs, for `dflow plan` and `--smoke`; None where the op cannot tell."""

    def smoke(self, samples: int) -> Mapping[str, Any]:
        """The values to change for a trial run on so many samples (`dflow run --smoke`), by field."""

    def threads(self, folders: Folders) -> int | None:
        """The most CPU threads that a rank can use (dsl/estimate.py)."""

    @staticmethod
    def report(folder: Path) -> Iterable[Any]:
        """The sections of an artifact in `dflow report`: each a Section of ops/lib/report_sections.py."""

    @staticmethod
    def compare(artifacts: Sequence[Any]) -> Iterable[Any]:
        """The sections that compare artifacts of this op, of a sweep's combinations or of several runs, in
        `dflow report`. artifacts: at least two, each a Compared of ops/lib/report_sections.py.
        """

    @staticmethod
    def logged_model(folder: Path) -> Any:
        """The form in which MLflow shows the artifact, if it is a model: a LoggedModel of ops/lib/logged_model.py."""


ATTRIBUTES = typing.get_type_hints(OpClass)
METHODS = {
    name: inspect.signature(getattr(OpClass, name))
    for name in vars(OpClass)
    if not name.startswith("_") and name not in ATTRIBUTES
}
OUTSIDE_KEY = frozenset({*ATTRIBUTES, *HOOK_FILES})


def class_attributes(cls: type, fields: Iterable[str]) -> dict[str, Any]:
    """The values of OpClass's attributes in a config class. Raises ConfigError for wrong or misspelt members."""
    values = {name: getattr(OpClass, name) for name in ATTRIBUTES}
    mistakes = []
    for name in sorted(_members_of(cls, fields)):
        try:
            if name in ATTRIBUTES:
                values[name] = structure(ATTRIBUTES[name], getattr(cls, name))
            elif name in METHODS:
                _check_parameters(name, getattr(cls, name))
            else:
                _check_name(name)
        except StructureError as error:
            mistakes += [f"{cls.__name__}.{name}: {mistake}" for mistake in error.mistakes]
    if mistakes:
        raise ConfigError(*mistakes)
    return values


def _members_of(cls: type, fields: Iterable[str]) -> set[str]:
    """The public attributes of a config class that are neither its fields nor `output`."""
    names = {name for base in cls.__mro__[:-1] for name in vars(base) if not name.startswith("_")}
    return names - {*fields, "output"}


def _check_parameters(name: str, given: object) -> None:
    """Check that dflow could call a hook with its parameters. Raises StructureError where it could not."""
    expected = METHODS[name]
    kind = "" if "self" in expected.parameters else "@staticmethod "
    message = f"expected {kind}def {name}{expected}"
    if callable(given):
        actual = inspect.signature(given)
        message = f"{message}, got {actual}"
        with suppress(TypeError):
            actual.bind(*expected.parameters)
            return
    raise StructureError([Finding(message.replace("'", ""))])


def _check_name(name: str) -> None:
    """Check that a name is no misspelt member of OpClass. Raises StructureError."""
    from difflib import get_close_matches

    near = get_close_matches(name, [*ATTRIBUTES, *METHODS, "output"], n=1, cutoff=NEAR)
    if near:
        hint = f'did you mean "{near[0]}"? Rename it, or begin it with _, if it is your own'
        raise StructureError([Finding("no such member of an op", advice=hint)])


def method(op: OpSpec, name: str) -> Callable[..., Any] | None:
    """The method `name` of an op's config class; None without one, or if a field or edge has that name.

    It takes the config as self unless it is static. The caller declares the function's type.
    """
    if name in op.fields or name in op.edges:
        return None
    found: Callable[..., Any] | None = getattr(op.config_class, name, None)
    return found


def hook(op: OpSpec, name: str) -> Callable[..., Any] | None:
    """The hook `name` of an op: a method of its config class, or a function in a file beside a built-in op's op.py.

    None without one. The file is imported only here. The caller declares the function's type.
    """
    own = method(op, name)
    if own is not None:
        return own
    package, _, module = op.config_class.__module__.rpartition(".")
    file = f"{package}.{HOOK_FILES[name]}"
    if not package or module != "op" or importlib.util.find_spec(file) is None:
        return None
    function: Callable[..., Any] | None = getattr(importlib.import_module(file), name, None)
    return function
