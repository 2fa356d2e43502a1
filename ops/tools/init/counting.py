"""The tokens of samples as tokenize_chat makes them, with contexts = "served"; it loads torch, so `dflow init` runs it:

    python -m ops.tools.init.counting ASKED COUNTED

Both are files of JSON: ASKED has the settings and the rows, COUNTED gets an object for each row, in order, for as many
as SECONDS allow: {"prompts", "samples", "answers", "calls"} as in `Length`, or {"reason", "detail"} of a row that
tokenize_chat drops. No image is decoded: of a text with images, the tokens are those without them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dsl.errors import DflowError, on_one_line
from ops.ingest.sample import LAST
from ops.lib.data.sample_account import Unusable
from ops.lib.data.tool_forms import GIVEN
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.encode import ChatEncoder, Encoded, num_images
from ops.tokenize_chat.template import Messages

SECONDS = 10.0  # after the libraries are loaded


def counted(settings: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Count the tokens of each row.

    Raises DataError for a tokenizer that cannot be loaded, and for a template that takes too long.
    """
    processor = load_processor(settings["checkpoint"], image_backend=settings["image_backend"])
    encoder = ChatEncoder(processor, settings["enable_thinking"], tools_as=settings["tools_as"] or GIVEN)
    encoder.template.wait_until_started()
    start = time.monotonic()
    for row in rows:
        if time.monotonic() - start > SECONDS:
            return
        try:
            yield _prompt(row, encoder) if row["is_prompt"] else _samples(row, encoder)
        except Unusable as error:
            yield {"reason": error.reason, "detail": error.detail}


def _prompt(row: dict[str, Any], encoder: ChatEncoder) -> dict[str, Any]:
    """The counts of a conversation that is still to be answered. Raises Unusable."""
    messages = row["messages"]
    encoded = encoder.served_prompt(messages, row["tools"], True, row["id"], row["documents"])
    part = _part(len(encoded.input_ids), messages)
    return {"prompts": [part], "samples": [part], "answers": [], "calls": []}


def _samples(row: dict[str, Any], encoder: ChatEncoder) -> dict[str, Any]:
    """The counts of a conversation that ends with an answer. Raises Unusable."""
    messages, own = row["messages"], encoder.of_last if row.get("learnt") == LAST else encoder
    (served,) = own.serve_batch([messages], [()], [row["id"]], [row["tools"]], documents=[row["documents"]])
    if isinstance(served, Unusable):
        raise served
    counts: dict[str, Any] = {"prompts": [], "samples": [], "answers": [], "calls": []}
    for context in served.contexts:
        said = messages[: context.turns[-1] + 1]
        encoded = own.encode_context(said, context)
        answers = _answers(encoded)
        counts["prompts"].append(_part(encoded.prompt_tokens, said))
        counts["samples"].append(_part(len(encoded.input_ids), said))
        counts["answers"] += answers
        calls = ("tool_calls" in messages[turn] for turn in context.turns)
        counts["calls"] += [tokens for tokens, is_call in zip(answers, calls, strict=True) if is_call]
    return counts


def _part(tokens: int, messages: Messages) -> tuple[int, int]:
    """Tokens without those of the images, which have a placeholder each, and the number of images."""
    images = sum(map(num_images, messages))
    return tokens - images, images


def _answers(encoded: Encoded) -> list[int]:
    """The learnt tokens of each answer."""
    ends = [*(first for first, _ in encoded.answers), len(encoded.loss_mask)]
    return [int(encoded.loss_mask[first:end].sum()) for first, end in pairwise(ends)]


def main() -> None:
    """Count what a file asks for."""
    asked, into = map(Path, sys.argv[1:])
    settings, rows = json.loads(asked.read_text(encoding="utf-8"))
    try:
        found = list(counted(settings, rows))
    except DflowError as error:
        sys.exit(on_one_line(str(error)))
    into.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
