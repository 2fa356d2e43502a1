"""Mistakes of `dflow evaluate` by what its user typed: its arguments, not the nodes that it makes of them."""

from __future__ import annotations

import re
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
# Advice of ops for a pipeline file -> the same for the command.
ADVICE = {
    "raise max_prompts, or lower batch_size": "give more --prompts, or a smaller -s eval.batch_size=N",
    "raise max_prompts": "give more --prompts",
    "add a node of evaluate with temperature = 0": "evaluate without -s eval.temperature",
    "the pipeline has no node of check_export": "the gate was left out",
}
GATE_ADVICE = re.compile(r'add a node with op = "check_export": .*')
WHERE = "it is on the model's page under Files and versions"


def source_mistakes(draft: str, target: str) -> list[Finding]:
    """What is neither a directory nor owner/name@COMMIT."""
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


def as_typed(error: PipelineError, known: Iterable[Finding] = ()) -> PipelineError:
    """The same mistakes with the command's arguments in place of fields of nodes; known: those that replace what the
    pipeline says of their arguments.
    """
    known = list(known)
    explained = {mistake.path for mistake in known}
    typed = [_typed(mistake) for mistake in error.mistakes]
    return PipelineError([*known, *(mistake for mistake in typed if mistake.path not in explained)])


def advice_as_typed(line: str) -> str:
    """A verdict or an advice with the command's arguments in place of changes of a pipeline file."""
    for of_file, typed in ADVICE.items():
        line = line.replace(of_file, typed)
    return GATE_ADVICE.sub("have it checked by the gate: evaluate without the -s that left it out", line)


def _typed(mistake: Finding) -> Finding:
    if argument := ARGUMENTS.get(mistake.path):
        return evolve(mistake.at(argument), advice="")
    if mistake.path.startswith(NODE):
        return mistake.at(f"-s {mistake.path.removeprefix(NODE)}")
    return mistake
