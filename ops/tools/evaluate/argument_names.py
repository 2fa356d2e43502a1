"""Mistakes and advice of `dflow evaluate` by its arguments, not by fields of the nodes that it makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import evolve

from dsl.check import COMMIT, MODEL_ID
from dsl.errors import PipelineError, shortened
from dsl.finding import Field, Finding
from ops.tools.evaluate.pipeline import source_of

DRAFT, TARGET = "DRAFT", "--target"
ARGUMENTS = {
    "node.draft.source": DRAFT,
    "node.draft.revision": DRAFT,
    "node.target.checkpoint": TARGET,
    "node.target.revision": TARGET,
    "node.ingest.source": "--prompts",
    "node.eval.max_prompts": "--max-prompts",
}
NODE = "node."
TO_GIVE = {"node.eval.max_prompts": "--prompts with more"}  # all of a file's prompts are asked already
WHERE = "it is on the model's page under Files and versions"


def source_mistakes(draft: str, target: str) -> list[Finding]:
    """Mistakes for a draft or target argument that is neither a directory nor owner/name@COMMIT."""
    texts = {DRAFT: draft, TARGET: target}
    return [Finding(what, Field(argument)) for argument, text in texts.items() for what in _wrong_source(text)]


def _wrong_source(text: str) -> Iterator[str]:
    name, commit = source_of(text)
    if Path(name).exists():
        if commit is not None:
            yield f"{name} is a directory, which has no commit: leave out @{shortened(commit)}"
    elif MODEL_ID.fullmatch(name) is None or Path(name).parent.is_dir():
        yield f"there is no directory {Path(name).absolute()}; or give a model id with its commit: owner/name@COMMIT"
    elif commit is None:
        yield f"the model id needs its commit, 40 hex digits: {name}@COMMIT; {WHERE}"
    elif COMMIT.fullmatch(commit) is None:
        yield (
            f'"{shortened(commit)}" is no commit of 40 hex digits, and what it names may change: give {name}@COMMIT; '
            f"{WHERE}"
        )


def by_arguments(error: PipelineError, known: Iterable[Finding] = ()) -> PipelineError:
    """The mistakes with the command's arguments in place of node fields.

    known: mistakes that replace those of the pipeline about the same arguments.
    """
    known = list(known)
    explained = {mistake.path for mistake in known}
    named = [_named(mistake) for mistake in error.mistakes]
    return PipelineError([*known, *(mistake for mistake in named if mistake.path not in explained)])


def advised(node: str, title: str, verdict: Finding) -> Finding:
    """A node's verdict with advice that names the argument to change. node: "" for an op without a node."""
    if not node and title == "check_export":
        what = "not measured: the gate was left out"
        return evolve(
            verdict, what=what, advice="have it checked by the gate: evaluate without the -s that left it out"
        )
    if not verdict.path:
        return verdict
    path = f"{NODE}{node}.{verdict.path}"
    argument = TO_GIVE.get(path) or ARGUMENTS.get(path) or f"-s {node}.{verdict.path}"
    return evolve(verdict, advice=f"{verdict.advice} ({argument})")


def _named(mistake: Finding) -> Finding:
    if argument := ARGUMENTS.get(mistake.path):
        return evolve(mistake.at(argument), advice="")
    if mistake.path.startswith(NODE):
        return mistake.at(f"-s {mistake.path.removeprefix(NODE)}")
    return mistake
