"""Every error that dflow raises on purpose.

DflowError                  the message says what was wrong, where, and what to do
├── ConfigError             a value of an op's config is wrong
├── PipelineError           a pipeline file or graph has one or more mistakes, all of them listed
├── StructureError          plain values do not fit the type that they are read as; all mistakes with their paths
├── DataError               input data cannot be used: names the file, line or sample
│   └── NotKnown            what an estimate needs is not there yet; nothing is wrong
├── TransientError          something outside failed that may work in a while, a busy server say: the node is retried
├── StoreError              the store cannot be used: newer layout, no locks, artifact gone or altered
│   ├── UnknownName         a run, node or tag that the user named is not there, or the name fits several
│   ├── LeaseLost           another process holds or took over the lease of a work folder
│   └── DiskFull            nothing more can be written before space is freed; says where
├── NotTrusted              a store that the user neither made nor trusted would act for the user
├── StageError              a node failed; holds the node, its log and the log's last lines
└── StopRequested           a stage saved its progress and ended because it was asked to
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsl.finding import Finding

MOST_OF_MESSAGE = 1200  # characters; a cycle through twelve nodes has some hundred
MOST_SHOWN = 160  # characters of a path of keys, or of an argument


class DflowError(Exception):
    """The base of all errors that dflow raises on purpose; shown to users without a traceback."""


class ConfigError(DflowError):
    """Values of an op's config are of the wrong type or out of range.

    mistakes: what is wrong, each by itself. head: what they are mistakes of; shown above them.
    """

    def __init__(self, *mistakes: str, head: str = "") -> None:
        self.mistakes = mistakes
        super().__init__("\n  ".join([f"{head}:", *mistakes]) if head else "\n".join(mistakes))


class DataError(DflowError):
    """Input data that cannot be used; the message names the file, the line or the sample."""


class NotKnown(DataError):
    """Data that an estimate needs does not exist yet, such as the config.json of a model that a run will download."""


class TransientError(DflowError):
    """A failure outside dflow that may pass, such as a busy server or a broken connection; worth a retry."""


class StoreError(DflowError):
    """An artifact store that cannot be used, lacks the requested data, or finds it altered."""


class UnknownName(StoreError):
    """A mistake in a command: no run, node or tag has the name that the user gave, or several runs fit it."""


class LeaseLost(StoreError):
    """An error: another process holds the lease on a work folder."""


class DiskFull(StoreError):
    """An error: no space is left to write a file. Earlier committed artifacts are safe."""


class NotTrusted(DflowError):
    """A refusal to run code, write or send for what the user neither made nor trusts.

    what: the reason without the advice.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}; read it, then repeat the command with --trust")


class StopRequested(DflowError):
    """Raised by an op after it saved its progress because `stage.stop_requested()` was true."""


class StageError(DflowError):
    """A node failed while it ran."""


class ClusterError(StageError):
    """A cluster cannot be reached, or not be used from here."""


class ServerError(DflowError):
    """An error: a server that dflow started or asked did not start, or did not answer."""


class PipelineError(DflowError):
    """All mistakes found in a pipeline, in the order of the file."""

    def __init__(self, mistakes: Sequence[Finding]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


class StructureError(DflowError):
    """All mistakes in plain values that do not fit a type; their paths are keys and list indices in the value."""

    def __init__(self, mistakes: Sequence[Finding]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))

    def below(self, name: str) -> list[Finding]:
        """The mistakes with paths that begin with `name`, the key of the table or list that holds the value."""
        return [each.at(f"{name}.{each.path}" if each.path else name) for each in self.mistakes]


def shortened(text: str, most: int = 100) -> str:
    """The text, its middle replaced by dots where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def listed(names: Iterable[str], most: int) -> str:
    """The names joined by commas; if longer than `most` characters, only the first ones and the number of
    the others.
    """
    whole = [shortened(name, most) for name in names]
    kept, length = 0, -len(", ")
    for name in whole:
        length += len(name) + len(", ")
        if kept and length > most:
            break
        kept += 1
    more = len(whole) - kept
    return ", ".join(whole[:kept]) + (f" and {more:,} more" if more else "")


def on_one_line(text: str) -> str:
    """The text on one line: line ends and terminal control characters are replaced by escapes."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def did_you_mean(word: str, candidates: Sequence[str]) -> str:
    """`did you mean "x"?` for the nearest candidate, or an empty string where none is near."""
    if len(word) > MOST_SHOWN:
        return ""
    from difflib import get_close_matches

    near = get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else ""


def known_nodes(word: str, node_ids: Iterable[str], tables: Sequence[str] = ()) -> str:
    """A hint for an unknown node's name: the nearest known name, else a list of the known ones.

    tables: names of tables that are valid in a node's place.
    """
    known = list(node_ids)
    nodes = [f"nodes: {listed(known, MOST_SHOWN)}"] if known else []
    named = [f"tables: {', '.join(tables)}"] if tables else []
    return did_you_mean(word, [*known, *tables]) or "; ".join([*nodes, *named])
