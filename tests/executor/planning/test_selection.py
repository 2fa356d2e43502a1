"""`--to`, `--only` and `--sweep` on the command line."""

import json
from pathlib import Path

import pytest
from toy_ops import Toy

from executor.cli import main
from executor.store.artifact_store import FORMAT


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def planned(toy: Toy, *arguments: str) -> dict[str, str]:
    result = toy.dflow("plan", str(toy.file), "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return {row["id"]: row["cache"] for row in json.loads(result.stdout)["nodes"]}


def test_to_runs_a_node_and_all_above_it(toy: Toy) -> None:
    assert planned(toy, "--to", "b") == {"a": "miss", "b": "miss"}
    assert toy.dflow("run", str(toy.file), "--to", "b").returncode == 0
    assert toy.calls() == ["make", "upper"]
    assert toy.caches() == {"a": ("done", "miss"), "b": ("done", "miss")}
    assert toy.dflow("run", str(toy.file), "--to", "c").returncode == 0
    assert toy.calls() == ["join"]


def test_several_ends_are_the_union_of_what_is_above_them(toy: Toy) -> None:
    assert planned(toy, "--to", "b", "--to", "d") == planned(toy, "--to", "d") | planned(toy, "--to", "b")
    assert planned(toy, "--to", "a", "--to", "b") == {"a": "miss", "b": "miss"}
    assert toy.dflow("run", str(toy.file)).returncode == 0
    toy.calls()
    assert toy.dflow("resume", "--from", "b", "--from", "d").returncode == 0
    assert toy.calls() == ["upper", "join", "steps"]
    assert toy.dflow("resume", "--from", "x", "--from", "y").stderr.count('has no node "') == 2


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("run", "p.toml", "--name", "a", "--name", "b"), "--name"),
        (("plan", "p.toml", "--store", "a", "--store=b"), "--store"),
        (("diagnose", "--prompts", "8", "--prompts", "8"), "--prompts"),
    ],
)
def test_an_option_of_one_value_is_refused_where_it_is_given_twice(arguments, option, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert 2 == ended.value.code
    values = [text.rpartition("=")[2] for text in arguments if text[:2] != "--" or "=" in text][-2:]
    expected = f"dflow: argument {option}: given twice, as {values[0]} and as {values[1]}; give it once\n"
    assert capsys.readouterr().err.endswith(expected)


def test_only_runs_these_nodes_and_says_what_is_not_there(toy: Toy) -> None:
    for command in ("run", "plan"):
        result = toy.dflow(command, str(toy.file), "--only", "c")
        assert (result.returncode, result.stderr) == (
            2,
            "dflow: --only: not in the store: a (new); b (new) (name them too, or run everything above with --to c)\n",
        )
    assert toy.calls() == []
    assert toy.dflow("run", str(toy.file), "--only", "a", "--only", "b").returncode == 0
    assert toy.calls() == ["make", "upper"]
    assert planned(toy, "--only", "c") == {"c": "miss"}
    assert toy.dflow("run", str(toy.file), "--only", "c").returncode == 0
    assert toy.calls() == ["join"]
    assert planned(toy, "--only", "b", "--only", "c") == {"b": "hit", "c": "hit"}


def test_an_unknown_node_and_both_flags_at_once_are_refused(toy: Toy) -> None:
    told = [
        toy.dflow("plan", str(toy.file), *arguments).stderr
        for arguments in (("--to", "x"), ("--only", "x", "--only", "y"), ("--to", "a", "--only", "b"))
    ]
    assert told == [
        'dflow: --to: there is no node "x" (nodes: a, b, c, d)\n',
        'dflow: --only: there is no node "x" (nodes: a, b, c, d)\n'
        'dflow: --only: there is no node "y" (nodes: a, b, c, d)\n',
        "dflow: --to runs what is above a node, --only does not (give one of them)\n",
    ]


def test_a_sweep_shares_what_is_above_and_what_is_there_already(toy: Toy) -> None:
    assert toy.dflow("run", str(toy.file), "--to", "c").returncode == 0
    assert toy.calls() == ["make", "upper", "join"]
    sweep = ("--sweep", 'c.between=["-", "+"]')
    assert planned(toy, *sweep, "--to", "b") == {"a": "hit", "b": "hit"}
    result = toy.dflow("run", str(toy.file), *sweep)
    assert result.returncode == 0, result.stderr
    assert sorted(toy.calls()) == ["join", "steps", "steps"]
    caches = {name: cache for name, (_state, cache) in toy.caches().items()}
    assert [caches[name] for name in ("a", "b", "c-between_1")] == ["hit"] * 3
    copies = [name for name in caches if name.startswith(("c", "d"))]
    assert len(copies) == 4


def test_a_recorded_run_takes_overrides_of_the_other_tables(toy: Toy) -> None:
    assert toy.dflow("run", str(toy.file), "--to", "b").returncode == 0
    toy.calls()
    result = toy.dflow("resume", "-s", "mlflow.notes=x", "-s", "a.text=other")
    assert result.returncode == 0, result.stderr
    assert toy.calls() == ["make", "upper"]
    result = toy.dflow("resume", "--from", "b", "-s", "machine.cpus=1")
    assert result.returncode == 0, result.stderr
    assert toy.calls() == ["upper"]


def test_a_node_with_copies_selects_all_of_them(toy: Toy) -> None:
    sweep = ("--sweep", 'c.between=["-", "+"]')
    above, copies = ["a", "b"], ["c-between_1", "c-between_2"]
    assert sorted(planned(toy, *sweep, "--to", "c")) == [*above, *copies]
    assert sorted(planned(toy, *sweep, "--to", "d")) == [*above, *copies, "d-between_1", "d-between_2"]
    assert sorted(planned(toy, *sweep, "--to", "d-between_2")) == [*above, "c-between_2", "d-between_2"]
    assert toy.dflow("run", str(toy.file), "--to", "b").returncode == 0
    result = toy.dflow("run", str(toy.file), *sweep, "--only", "c")
    assert result.returncode == 0, result.stderr
    assert toy.calls() == ["make", "upper", "join", "join"]
    assert sorted(planned(toy, *sweep, "--only", "c")) == copies
    result = toy.dflow("resume", "--from", "c")
    assert result.returncode == 0, result.stderr
    assert toy.calls() == ["join", "join"]
    shared = toy.folder / "shared"
    run = toy.state()["run"]
    assert toy.dflow("push", str(shared), "--node", "c", run).stdout.startswith("c-")
    assert toy.dflow("push", str(shared), "--node", "c").stdout.splitlines()[-1].endswith("which now holds all of them")
    assert len(list((shared / "objects").iterdir())) == 2


def test_a_command_on_a_single_node_names_its_copies(toy: Toy) -> None:
    toy.file.write_text(toy.file.read_text() + "\n[for_each.how]\none.c.between = '1'\ntwo.c.between = '2'\n")
    result = toy.dflow("plan", str(toy.file), "--why", "c")
    assert (result.returncode, result.stderr) == (2, 'dflow: there is no node "c" (its copies: c-one, c-two)\n')
    shared = toy.folder / "shared"
    shared.mkdir()
    (shared / "format").write_text(f"{FORMAT}\n")
    result = toy.dflow("pull", str(shared), str(toy.file), "--node", "c")
    assert result.stdout.splitlines()[:2] == [
        f"{node}: neither in the store nor at the remote" for node in ("c-one", "c-two")
    ], result.stderr
