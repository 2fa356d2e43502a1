"""Writes conversations with tools out of bfcl-eval, for pipelines/smollm2_tools.toml.

    python pipelines/smollm2_tools_files.py PACKAGES OUT

PACKAGES is the folder that smollm2_requirements.txt was installed into. OUT gets lessons.jsonl, from which SmolLM2
learns to call functions, and requests.jsonl, what it is asked then: other rows, and prompts without tools of
OUT/prompts.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.smollm2_files import digest

LESSONS = {"simple_python": 280, "multiple": 120, "parallel": 60, "irrelevance": 100}  # rows of each file, at most
REQUESTS = {"simple_python": 120, "multiple": 80, "parallel": 40, "live_simple": 120, "irrelevance": 40}
PLAIN = 120  # prompts without tools
NO_FUNCTION = "None of the functions can do that."
LONGEST = 2200  # characters of a row's question and functions


def rows(data: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of one file that are not too long, in an order that does not depend on the file's."""
    lines = (data / f"BFCL_v4_{name}.json").read_text().splitlines()
    yield from sorted((json.loads(line) for line in lines if len(line) < LONGEST), key=lambda row: digest(row["id"]))


def conversation(row: dict[str, Any], name: str, answer: dict[str, Any] | None) -> dict[str, Any]:
    """A row as a conversation: its first turn, its functions, and the answer if there is one."""
    tools = [{"type": "function", "function": function} for function in row["function"]]
    messages = [*row["question"][0], *([answer] if answer else [])]
    return {"id": row["id"], "category": name, "messages": messages, "tools": tools}


def calls(truth: list[dict[str, Any]]) -> dict[str, Any]:
    """The turn that makes the calls of `ground_truth`, where each argument is a list of the values that are right."""
    made = []
    for call in truth:
        ((function, given),) = call.items()
        arguments = {name: first(values) for name, values in given.items() if values[0] != ""}
        made.append({"type": "function", "function": {"name": function, "arguments": arguments}})
    return {"role": "assistant", "content": "", "tool_calls": made}


def first(values: Any) -> Any:
    """The first of the values that are right, also within an object."""
    value = values[0] if isinstance(values, list) and values else values
    return {name: first(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="Write conversations with tools that a Python package holds.")
    parser.add_argument("packages", type=Path, help="the folder that smollm2_requirements.txt was installed into")
    parser.add_argument("out", type=Path, help="holds prompts.jsonl, gets lessons.jsonl and requests.jsonl")
    given = parser.parse_args()
    data = given.packages / "bfcl_eval" / "data"
    lessons, requests = [], []
    for name, count in LESSONS.items():
        answers = data / "possible_answer" / f"BFCL_v4_{name}.json"
        truths = {}
        if answers.exists():
            truths = {line["id"]: line["ground_truth"] for line in map(json.loads, answers.read_text().splitlines())}
        for row in [*rows(data, name)][:count]:
            plain = {"role": "assistant", "content": NO_FUNCTION}
            lessons.append(conversation(row, name, calls(truths[row["id"]]) if truths else plain))
    for name, count in REQUESTS.items():
        requests += [conversation(row, name, None) for row in [*rows(data, name)][LESSONS.get(name, 0) :][:count]]
    prompts = [json.loads(line) for line in (given.out / "prompts.jsonl").read_text().splitlines()]
    requests += sorted((row for row in prompts if row["category"] != "requests"), key=lambda row: digest(row["id"]))[
        :PLAIN
    ]
    for name, written in (("lessons", lessons), ("requests", requests)):
        text = "".join(json.dumps(row) + "\n" for row in written)
        (given.out / f"{name}.jsonl").write_text(text)
        print(f"{name}.jsonl: {len(written)} conversations")


if __name__ == "__main__":
    main()
