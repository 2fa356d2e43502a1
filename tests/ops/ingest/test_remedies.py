"""What to do about a sample that is dropped, and about a log that was cut while it was written."""

from __future__ import annotations

import ast
import csv
import importlib
import json
from pathlib import Path

import pytest
from format_reading import TURNS, read
from own_samples import run_ingest

import ops.ingest
from dsl.errors import DataError
from ops.ingest.remedies import IN_DETAILS, REMEDIES, advised
from ops.ingest.traffic import ENDINGS

RAISING = {"Unusable": 0, "_of_turn": 1, "DroppedSample": 1}  # place of the reason among the arguments


def given_reasons() -> set[str]:
    """Each reason that a module of ops/ingest gives by name or as a text."""
    found = set(ENDINGS.values())
    for file in sorted(Path(str(ops.ingest.__file__)).parent.glob("*.py")):
        module = importlib.import_module(f"ops.ingest.{file.stem}")
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            place = RAISING.get(getattr(node.func, "id", ""))
            wanted = [] if place is None else node.args[place : place + 1]
            wanted += [each.value for each in node.keywords if each.arg == "lacks"]
            for each in wanted:
                values = [each.body, each.orelse] if isinstance(each, ast.IfExp) else [each]
                found |= {value.value for value in values if isinstance(value, ast.Constant) and value.value}
                names = [value.id for value in values if isinstance(value, ast.Name) and value.id.isupper()]
                found |= {getattr(module, name) for name in names}
    return found


def test_every_reason_has_a_remedy_and_none_begins_with_a_number():
    reasons = given_reasons()
    assert {"a tool result without a call", "no response", "not an image", "invalid text"} <= reasons
    assert set() == reasons - set(REMEDIES)
    assert [] == [reason for reason in REMEDIES if reason[0].isdigit()]


def test_a_dropped_sample_says_what_to_do_on_the_screen_and_in_the_table(tmp_path, capsys):
    alone = {"messages": [TURNS[0], {"role": "tool", "content": "sunny"}, TURNS[1]]}
    missing = {"messages": TURNS, "image": "a.png"}
    stage, _, summary = run_ingest(tmp_path, [{"messages": TURNS}, alone, missing])
    assert {"a tool result without a call": 1, "image missing": 1} == summary["dropped"]
    shown = "turn 2; export the conversation again, or remove it"
    assert f'sample "2": a tool result without a call ({shown})' in capsys.readouterr().out
    with (stage.out_dir / "dropped.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert ["2", "a tool result without a call", shown] == rows[1]
    assert rows[2][2].endswith("; check that the files are where the rows name them, and image_root")


@pytest.mark.parametrize("reason", IN_DETAILS)
def test_a_detail_that_says_what_to_do_is_not_followed_by_it_again(reason):
    assert "move it" == advised(reason, "move it")


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_last_line_that_was_cut_is_told_from_one_that_is_broken(tmp_path, ending):
    line = json.dumps({"messages": TURNS})
    (tmp_path / "log.jsonl").write_text(f"{line}\n{line[:30]}{ending}")
    with pytest.raises(DataError) as error:
        read(tmp_path / "log.jsonl", tmp_path)
    first, *_ = str(error.value).splitlines()
    assert f"{tmp_path}/log.jsonl:2: broken JSON at column " in first
    hint = "; it is the last line, without a line break, as of a log that is still written: remove it, or read a whole"
    assert (hint in first) == (not ending)
    (tmp_path / "log.jsonl").write_text(f"{line}\n{line}")
    assert 2 == len(read(tmp_path / "log.jsonl", tmp_path / "whole")[1])
