"""`dflow plan --why` names what changed, and `dflow accept` keeps what a harmless change would redo."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_ops import ONE_NODE, PROJECT, UNTRACKED, Toy

GLUE = "return between.join(texts)"
HARMLESS = "joined = between.join(texts)\n    return joined"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Toy(tmp_path_factory.mktemp("finished"))
    result = made.dflow("run", str(made.file))
    assert result.returncode == 0, result.stderr
    return made.folder


@pytest.fixture
def toy(finished: Path, tmp_path: Path) -> Toy:
    """A folder of one's own in which the pipeline has run."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return Toy(tmp_path)


def edit(toy: Toy, old: str, new: str, name: str = "toy_join.py") -> None:
    path = toy.folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def told(toy: Toy, node: str, *more: str) -> str:
    result = toy.dflow("plan", str(toy.file), "--why", node, *more)
    assert result.returncode == 0, result.stderr
    return result.stdout


def told_json(toy: Toy, node: str, *more: str) -> dict[str, Any]:
    explained: dict[str, Any] = json.loads(told(toy, node, "--json", *more))
    return explained


def test_a_cached_node_names_the_run_that_made_it(toy: Toy) -> None:
    run = toy.state()["run"]
    text = told(toy, "c")
    assert text.startswith("c: cached as ")
    assert f"made by run {run}, on 20" in text
    made = told_json(toy, "c")["made"]
    assert (run, "computed", "new") == (made["run"], made["acceptance"], made["cause"])


def test_the_old_and_the_new_value_of_every_field_are_named(toy: Toy) -> None:
    overrides = ("-s", "c.weight=2.0", "-s", "c.between=+")
    text = told(toy, "c", *overrides)
    assert "c runs:\n" in text
    assert '  config changed: c.between from "-" to "+"\n' in text
    assert "  config changed: c.weight from 1.0 to 2.0\n" in text
    changes = told_json(toy, "c", *overrides)["changes"]
    assert [("between", "-", "+"), ("weight", 1.0, 2.0)] == [(row["name"], row["old"], row["new"]) for row in changes]


def test_the_file_that_changed_is_named_by_plan_and_explain(toy: Toy) -> None:
    edit(toy, GLUE, HARMLESS)
    assert "  code changed: toy_join.py\n" in told(toy, "c")
    [change] = told_json(toy, "c")["changes"]
    assert ("code", "toy_join.py") == (change["kind"], change["name"])
    reasons = {
        row["id"]: row["reason"] for row in json.loads(toy.dflow("plan", str(toy.file), "--json").stdout)["nodes"]
    }
    assert {"a": "", "b": "", "c": "code changed: toy_join.py", "d": "input may change: c"} == reasons


def test_causes_above_are_followed_to_the_first_one(toy: Toy) -> None:
    overrides = ("-s", "a.text=other")
    text = told(toy, "d", *overrides)
    assert "d may stay cached:\n  input may change: c" in text
    assert '\n\na runs:\n  config changed: a.text from "hello" to "other"' in text
    explained = told_json(toy, "d", *overrides)
    assert ["c", "a", "b"] == [each["node"] for each in explained["above"]]
    assert ["maybe", "miss", "maybe"] == [each["cache"] for each in explained["above"]]


def test_an_input_that_changed_is_named_with_its_producer_and_why_it_ran(toy: Toy) -> None:
    edit(toy, "[node.a]", '[node.z]\nop = "make"\ntext = "new"\n\n[node.a]', "pipeline.toml")
    edit(toy, '"@a", "@b"', '"@a", "@z"', "pipeline.toml")
    text = told(toy, "c")
    assert "  input changes: z, which runs (new)\n" in text
    assert "  input changed: b is no longer read\n" in text


def test_external_content_that_changed_is_named(toy: Toy) -> None:
    (toy.folder / "data.txt").write_text("one")
    edit(toy, 'text = "hello"', 'source = "data.txt"', "pipeline.toml")
    assert toy.dflow("run", str(toy.file)).returncode == 0
    (toy.folder / "data.txt").write_text("two")
    text = told(toy, "a")
    assert f"content changed: a.source ({toy.folder / 'data.txt'}) from " in text


def test_a_field_that_names_a_file_instead_of_something_built_in_is_told_as_such_everywhere(toy: Toy) -> None:
    (toy.folder / "data.txt").write_text("one")
    edit(toy, 'text = "hello"', 'text = "hello"\nsource = "data.txt"', "pipeline.toml")
    change = 'config changed: a.source from "builtin" to file data.txt'
    assert f"  {change}\n" in told(toy, "a")
    assert change in toy.dflow("plan", str(toy.file)).stdout
    assert change in toy.dflow("run", str(toy.file)).stdout
    assert change in toy.dflow("diff").stdout


def test_a_file_that_is_imported_now_is_told_as_such(toy: Toy) -> None:
    body = "def glue(texts, between):\n    return between.join(texts)\n"
    edit(toy, body, "")
    edit(toy, "from toy import", "from glueing import glue\nfrom toy import")
    (toy.folder / "glueing.py").write_text(body)
    text = told(toy, "c")
    assert "  code changed: glueing.py (imported now)\n" in text
    assert "  code changed: toy_join.py\n" in text


def accept(toy: Toy, node: str, *more: str) -> tuple[int, str]:
    result = toy.dflow("accept", str(toy.file), node, "--yes", *more)
    return result.returncode, result.stdout + result.stderr


def test_an_accepted_artifact_is_taken_for_the_new_code_until_that_is_edited_again(toy: Toy) -> None:
    toy.calls()
    run = toy.state()["run"]
    edit(toy, GLUE, HARMLESS)
    code, text = accept(toy, "c", "--reason", "only a name")
    assert 0 == code, text
    assert "  code changed: toy_join.py\n" in text
    assert toy.dflow("run", str(toy.file)).returncode == 0
    assert [] == toy.calls()
    assert "accepted by " in told(toy, "c")
    assert ": only a name; computed for key " in told(toy, "c")
    assert "c: accepted by " in toy.dflow("status").stdout
    events = [json.loads(line) for line in (toy.store / "records" / run / "events.jsonl").read_text().splitlines()]
    [accepted] = [event for event in events if event["kind"] == "accepted"]
    assert ("c", "only a name", told_json(toy, "c")["key"]) == (accepted["node"], accepted["reason"], accepted["key"])
    edit(toy, "return joined", "return joined + ''")
    assert "c runs:" in told(toy, "c")
    assert 0 == accept(toy, "c")[0]  # from an accepted artifact
    assert toy.dflow("run", str(toy.file)).returncode == 0
    assert [] == toy.calls()


def test_each_node_is_accepted_in_turn(toy: Toy) -> None:
    toy.calls()
    edit(toy, "def count_call(name):\n", "def count_call(name):\n    pass\n", "toy.py")
    assert (1, True) == ((found := accept(toy, "b"))[0], "reads from a, which will run" in found[1])
    assert [0, 0, 0, 0] == [accept(toy, node)[0] for node in "abcd"]
    assert toy.dflow("run", str(toy.file)).returncode == 0
    assert [] == toy.calls()


def test_what_differs_by_more_than_code_or_is_cached_or_damaged_is_refused(toy: Toy) -> None:
    assert (1, True) == ((found := accept(toy, "c"))[0], "there is nothing to accept" in found[1])
    edit(toy, GLUE, HARMLESS)
    code, text = accept(toy, "c", "-s", "c.weight=3.0")
    assert 1 == code
    assert "differs by more than its code, so it cannot be accepted: config changed: c.weight from 1.0 to 3.0" in text
    digest = toy.state()["nodes"]["c"]["digest"]
    path = toy.store / "objects" / digest / "text.txt"
    path.chmod(0o644)
    path.write_text("x" * path.stat().st_size)
    code, text = accept(toy, "c")
    assert 1 == code
    assert "is damaged" in text
    assert "c runs:" in told(toy, "c")


def test_a_node_that_never_ran_has_nothing_to_accept(toy: Toy) -> None:
    edit(toy, "[node.d]", '[node.e]\nop = "upper"\ntext = "@b"\n\n[node.d]', "pipeline.toml")
    code, text = accept(toy, "e")
    assert (1, True) == (code, 'node "e" was never finished' in text), text


def test_without_a_terminal_nothing_is_accepted_unasked(toy: Toy) -> None:
    edit(toy, GLUE, HARMLESS)
    result = toy.dflow("accept", str(toy.file), "c")
    assert 2 == result.returncode
    assert "pass --yes" in result.stderr
    assert "c runs:" in told(toy, "c")


def asked_on_a_terminal(toy: Toy) -> tuple[subprocess.Popen[str], int]:
    """`dflow accept` of c, and the terminal on which it can be answered."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", UNTRACKED, "accept", str(toy.file), "c", "--store", str(toy.store)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONSAFEPATH": "1"},
    )
    os.close(theirs)
    return process, ours


def test_code_that_is_edited_while_the_user_is_asked_is_not_accepted(toy: Toy) -> None:
    edit(toy, GLUE, HARMLESS)
    process, ours = asked_on_a_terminal(toy)
    assert process.stdout is not None
    shown = ""
    while not shown.endswith("[y/N] "):
        letter = process.stdout.read(1)
        assert letter, process.communicate(timeout=300)[1]
        shown += letter
    edit(toy, "return joined", "return joined + '!'")
    os.write(ours, b"y\n")
    _out, errors = process.communicate(timeout=300)
    os.close(ours)
    assert 1 == process.returncode
    assert 'the code or the data of node "c" changed just now; check it, and accept again' in errors
    assert "c runs:" in told(toy, "c")
    edit(toy, "return joined + '!'", "return joined")
    assert "c runs:" in told(toy, "c")  # and what was shown neither


@pytest.mark.parametrize(("answer", "expected"), [("y\n", 0), ("\n", 1), ("n\n", 1)])
def test_on_a_terminal_the_user_is_asked_after_the_difference_was_shown(toy: Toy, answer: str, expected: int) -> None:
    edit(toy, GLUE, HARMLESS)
    process, ours = asked_on_a_terminal(toy)
    os.write(ours, answer.encode())
    out, errors = process.communicate(timeout=300)
    os.close(ours)
    assert expected == process.returncode, errors
    assert out.index("code changed: toy_join.py") < out.index("Is the artifact still valid with this code? [y/N]")
    assert ("c: cached" if expected == 0 else "c runs:") in told(toy, "c")


def test_an_mlflow_server_that_is_away_is_only_a_warning(tmp_path: Path) -> None:
    toy = Toy(tmp_path, f'{ONE_NODE}\n[mlflow]\ntracking_uri = "http://127.0.0.1:9"\n')
    assert toy.dflow("run", str(toy.file)).returncode == 0
    edit(toy, 'count_call("make")', 'count_call("make"); pass', "toy.py")
    toy.tracked = True
    code, text = accept(toy, "a", "--reason", "nothing")
    assert 0 == code, text
    assert "MLflow cannot be reached" in text
    assert "accepted by" in told(toy, "a")


FOLDER = """

@op(version=1, run="toy:count")
@frozen(kw_only=True)
class Count:
    \"\"\"Counts files.\"\"\"
    source: str = field(external=True, help="a folder")
    output = Text


def count(config, stage):
    (stage.out_dir / "text.txt").write_text(str(len(list(Path(config.source).iterdir()))))
"""


def test_the_file_that_changed_in_a_folder_is_named(tmp_path: Path) -> None:
    toy = Toy(tmp_path, ONE_NODE.replace('op = "make"\ntext = "hello"', 'op = "count"\nsource = "model"'))
    with (tmp_path / "toy.py").open("a") as ops:
        ops.write(FOLDER)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text(name)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    (tmp_path / "model" / "config.json").write_text("{}")
    assert f"content changed: a.source ({tmp_path / 'model'}: config.json) from " in told(toy, "a")
