"""A part of the surveyed samples as the target's own chat template shows them, counted exactly.

A survey counts texts, and guesses what the template adds: system texts, instructions for tools, days, and prompts that
do not extend earlier ones. The code of tokenize_chat counts these samples in a process of its own (counting.py).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from dsl.imports import child_environment, module_command
from ops.ingest.sample import LAST
from ops.inject_images.messages import messages
from ops.lib.target.token_ids import Vocabulary
from ops.tools.init.survey import Drawn, Length, Survey, of_request
from ops.tools.init.target import Target

COUNTING = "ops.tools.init.counting"


def measure(found: Survey, target: Target, enable_thinking: bool | None, tools_as: str | None) -> None:
    """Replace the lengths of a survey by those of its drawn samples as the target's chat template shows them.

    enable_thinking, tools_as: as the pipeline sets them, None for the default. Where the template cannot be used, the
    survey keeps its lengths, with the reason.
    """
    vocabulary = Vocabulary.of(Path(target.checkpoint)) if target.tokenizer is not None else None
    if vocabulary is None:
        return
    if vocabulary.eos_token_ids is None:
        found.unrendered = "the tokenizer's EOS token is not known"
        return
    own = {drawn.sample.id for drawn in found.drawn}
    further = [drawn for drawn in found.most if drawn.sample.id not in own]
    asked = [each for pair in zip_longest(further, found.drawn) for each in pair if each is not None]
    settings = {
        "checkpoint": target.checkpoint,
        "enable_thinking": enable_thinking,
        "tools_as": tools_as,
        "image_backend": target.image_backend,
    }
    rows = [_row(found, drawn) for drawn in asked]
    try:
        counted = _counted(settings, rows)
    except DataError as error:
        found.unrendered = str(error)
        return
    lengths: list[Length] = []
    longest: list[Length] = []
    for drawn, counts in zip(asked, counted, strict=False):  # fewer, if they took too long
        if "reason" in counts:
            found.unfit[counts["reason"]] += 1
            found.examples.setdefault(counts["reason"], f"{drawn.sample.id}: {counts['detail']}")
        else:
            (lengths if drawn.sample.id in own else longest).append(of_request(found, _length(drawn, counts)))
    if lengths:
        found.lengths, found.longest, found.rendered = lengths, longest, True
    else:
        found.unrendered = "; ".join(f"{count} {reason}" for reason, count in found.unfit.most_common())


def _row(found: Survey, drawn: Drawn) -> dict[str, Any]:
    """A drawn sample as inject_images gives it to later nodes, without images."""
    sample = drawn.sample
    policy = "in-place" if found.placed_images else "first-user-turn"
    row = {"conversations": [turn.row() for turn in sample.turns], "images": [None] * drawn.num_images}
    learns_last = sample.learns_last or (sample.opening is not None and found.learns_last)
    return {
        "id": sample.id,
        "messages": messages(row, policy),
        "tools": sample.tools,
        "documents": sample.documents,
        "is_prompt": drawn.is_prompt,
        **({"learnt": LAST} if learns_last else {}),
    }


def _counted(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What counting.py gives for the rows. Raises DataError where the tokenizer or the template cannot be used."""
    with tempfile.TemporaryDirectory() as folder:
        asked, counted = Path(folder) / "asked.json", Path(folder) / "counted.json"
        asked.write_text(json.dumps([settings, rows]), encoding="utf-8")
        command = module_command(COUNTING, str(asked), str(counted))
        made = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
        if made.returncode:
            raise DataError(made.stderr.strip().rpartition("\n")[2])
        found: list[dict[str, Any]] = json.loads(counted.read_text(encoding="utf-8"))
        return found


def _length(drawn: Drawn, counts: Mapping[str, Any]) -> Length:
    return Length(
        prompts=tuple(map(tuple, counts["prompts"])),
        samples=tuple(map(tuple, counts["samples"])),
        answers=tuple(counts["answers"]),
        calls=tuple(counts["calls"]),
        images=drawn.sizes,
        splits=drawn.splits,
        is_prompt=drawn.is_prompt,
        is_request=drawn.sample.opening is not None,
        learns_last=drawn.sample.learns_last,
    )
