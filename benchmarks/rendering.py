"""CPU seconds of rendering one conversation of many calls in its served contexts, beside Jinja's own sandbox.

    python benchmarks/rendering.py --templates llama.cpp/models/templates/google-gemma-4-31B-it.jinja
    python benchmarks/rendering.py --templates FILE ... --calls 200 --rounds 3 --json figures.json

A round renders all texts of the conversation on both sides, which must be equal. Seconds are CPU seconds of `render`
(ops/tokenize_chat/rendering.py), which `render_seconds` limits; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from benchmarks.harness import Rounds, in_rounds, parser, save_figures, table, verdict
from ops.lib.data.sample_account import Unusable
from ops.tokenize_chat.contexts import Served, serve
from ops.tokenize_chat.habits import TOOL, probe
from ops.tokenize_chat.rendering import Sandbox, render
from ops.tokenize_chat.template import Renderings, _item, _texts, texts_of

GOAL = 3.0  # seconds
ARGUMENTS = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
ENDS = ("<|im_end|>", "<|call|>", "<|return|>", "<turn|>", "<|tool_response>", "</s>", "<|eot_id|>")
SANDBOXES = {"ours": Sandbox, "jinja": ImmutableSandboxedEnvironment}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=3)
    options.add_argument("--templates", type=Path, nargs="+", required=True, metavar="FILE")
    options.add_argument("--calls", type=int, default=200)
    given = options.parse_args(argv)
    messages = conversation(given.calls)
    lines, found = [["template", "texts", "ours, s", "Jinja's, s", "Jinja's / ours", f"<= {GOAL:g} s"]], {}
    for file in given.templates:
        template = file.read_text("utf-8")
        sides = {name: partial(_side, name, template, messages) for name in SANDBOXES}
        try:
            rounds = Rounds(in_rounds(sides, given.rounds, title=f"{file.stem}: "))
        except Unusable as error:
            lines.append([file.stem, f"refused: {error.reason}", "", "", "", ""])
            continue
        assert len({each["texts"] for side in rounds.figures.values() for each in side}) == 1, file.stem
        ours, jinjas = (rounds.median(name, "seconds") for name in SANDBOXES)
        ratio, count = rounds.ratio("jinja", "ours", "seconds"), rounds.figures["ours"][0]["count"]
        lines.append(
            [file.stem, str(count), f"{ours:.2f}", f"{jinjas:.2f}", f"{ratio:.1f}x", verdict(ours <= GOAL)],
        )
        found[file.stem] = {side: [each["seconds"] for each in figures] for side, figures in rounds.figures.items()}
    print(table(lines))
    save_figures(given.json, found)
    return 0


def conversation(calls: int) -> list[dict[str, Any]]:
    """A question, so many calls with their results, and an answer."""

    def say(role: str, text: str = "", **more: Any) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if text else [], **more}

    messages = [say("user", "Look everywhere, and say what there is to see.")]
    for number in range(calls):
        call_id = f"call{number:05}"
        function = {"name": TOOL["function"]["name"], "arguments": {"at": f"place {number}"}}
        messages.append(say("assistant", tool_calls=[{"id": call_id, "type": "function", "function": function}]))
        seen = f"At place {number} there are {number} trees, and a house with a red roof. " * 4
        messages.append(say("tool", seen, tool_call_id=call_id, name=function["name"]))
    return [*messages, say("assistant", "I saw it all.")]


def _side(name: str, template: str, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The seconds of one sandbox, the number of texts, and a hash of all."""
    chat_template_utils.ImmutableSandboxedEnvironment = SANDBOXES[name]
    shared = (f"{template}{{# {name} #}}", ARGUMENTS)  # a text of its own, since transformers keeps what it compiled
    habits, *_ = _finished(probe("</think>" in template), shared)
    _, seconds, texts = _finished(serve(habits, ENDS, messages, [TOOL]), shared)
    return {"seconds": seconds, "texts": hash(tuple(texts)), "count": len(texts)}


def _finished(renderings: Renderings[Served], shared: tuple[str, dict[str, Any]]) -> tuple[Any, float, list[str]]:
    """The result of a generator, with the seconds of its renderings and their texts."""
    seconds, texts, sent = 0.0, [], None
    while True:
        try:
            wanted = next(renderings) if sent is None else renderings.send(sent)
        except StopIteration as end:
            return end.value, seconds, texts
        item = json.loads(json.dumps(_item(wanted, _shown)))
        started = time.process_time()
        result = render(shared, item)
        seconds += time.process_time() - started
        sent = _texts(result)
        if isinstance(sent, Unusable):
            raise sent
        texts += [each.text for each in sent]


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": "".join(texts_of(message))}


if __name__ == "__main__":
    sys.exit(main())
