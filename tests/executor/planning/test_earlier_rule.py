"""A store of an earlier dflow, which recorded code by symbol: it opens, is told, kept on request, and resumed."""

import shutil
from pathlib import Path

import pytest
from toy_ops import UNTRACKED, Toy

EARLIER = """
from executor.keys.code_memo import CodeDigests, CodeMemo

closure_of = CodeMemo.of
by_symbol = CodeDigests({"toy:make": "1" * 64, "toy:count_call": "2" * 64})
CodeMemo.of = lambda memo, *asked: closure_of(memo, *asked) and by_symbol
"""
RULE = "code rule changed: recorded by an earlier dflow"


def earlier_run(toy: Toy, *more: str) -> int:
    process = toy.start("run", str(toy.file), *more, program=EARLIER + UNTRACKED)
    process.communicate(timeout=300)
    toy.calls()
    return process.returncode


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Toy(tmp_path_factory.mktemp("earlier"))
    assert 0 == earlier_run(made)
    return made.folder


@pytest.fixture
def toy(finished: Path, tmp_path: Path) -> Toy:
    """A folder of one's own in which an earlier dflow has run the pipeline."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return Toy(tmp_path)


def test_the_plan_says_why_all_runs_and_what_keeps_it(toy: Toy) -> None:
    text = toy.dflow("plan", str(toy.file)).stdout
    assert 4 == text.count(RULE)
    assert f"`dflow accept {toy.file}` keeps what is finished" in text
    assert f"a runs:\n  {RULE}\n" in toy.dflow("plan", str(toy.file), "--why", "a").stdout


def test_nothing_of_it_is_taken_without_the_users_word(toy: Toy) -> None:
    first = toy.state()["run"]
    result = toy.dflow("run", str(toy.file))
    assert "a, b, c, d: an earlier dflow recorded their code by another rule" in result.stdout
    assert ["make", "upper", "join", "steps"] == toy.calls()
    assert 0 == toy.dflow("report", first, "-o", str(toy.folder / "report.html")).returncode
    assert RULE in toy.dflow("diff", first).stdout


def test_all_that_is_finished_is_kept_at_once_and_runs_again_once_its_code_is_edited(toy: Toy) -> None:
    result = toy.dflow("accept", str(toy.file), "--yes", "--reason", "the same code")
    assert (0, 4) == (result.returncode, result.stdout.count(RULE)), result.stderr
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    assert [] == toy.calls()
    code = toy.folder / "toy_join.py"
    code.write_text(code.read_text().replace("between.join(texts)", "between.join(texts) + '!'"))
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    assert ["join", "steps"] == toy.calls()


def test_what_differs_by_more_than_the_rule_is_not_kept_nor_what_reads_it(toy: Toy) -> None:
    edited = ("-s", "c.weight=2.0")
    result = toy.dflow("accept", str(toy.file), "--yes", *edited)
    offered = [line[0] for line in result.stdout.splitlines() if "was made" in line]
    assert (0, ["a", "b"]) == (result.returncode, offered)
    assert 0 == toy.dflow("run", str(toy.file), *edited).returncode
    assert ["join", "steps"] == toy.calls()


def test_where_nothing_is_finished_there_is_nothing_to_keep(toy: Toy) -> None:
    result = toy.dflow("accept", str(toy.file), "--yes", "-s", "a.text=new")
    assert (1, True) == (result.returncode, "no node has a finished artifact" in result.stderr)


@pytest.mark.parametrize(("options", "steps"), [(["--adopt"], "012234"), ([], "01234")])
def test_a_run_is_resumed_in_the_middle_of_a_node(tmp_path: Path, options: list[str], steps: str) -> None:
    toy = Toy(tmp_path)
    assert 1 == earlier_run(toy, "-s", "d.fail_at=3")
    assert [0, 1, 2] == toy.steps()
    result = toy.dflow("resume", *options, "-s", "d.fail_at=-1")
    assert (0, ["steps"]) == (result.returncode, toy.calls()), result.stderr
    assert bool(options) == ("d: continues the work of run" in result.stdout)
    assert list(steps) == (tmp_path / "done.txt").read_text().split()
