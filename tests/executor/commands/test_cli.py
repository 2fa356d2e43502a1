"""The command: what it shows, what it refuses, and what it does not import."""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from io import StringIO

import pytest
from rich.console import Console
from toy_ops import PIPELINE, PROJECT, Toy

from dsl.finding import Finding, Node
from executor import cli
from executor.records.events import Event, Metric, Progress
from executor.records.run_record import NodeState, RunState
from executor.results.run_table import print_results, result_rows
from executor.scheduler.plain_display import Display
from executor.scheduler.rich_display import LiveDisplay, shown_nodes
from executor.store.artifact_store import FORMAT
from executor.system.progress import BytesDone
from executor.system.trust import trust_store

# The modules that a command loaded are counted after it ended.
COUNTED = "import sys, executor.cli\ntry: sys.exit(executor.cli.main())\nfinally: print('LOADED', *sys.modules)"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    made = Toy(tmp_path_factory.mktemp("cli"))
    assert made.dflow("run", str(made.file)).returncode == 0
    return made


def loaded(toy, *arguments):
    result = subprocess.run(
        [sys.executable, "-c", COUNTED, *arguments],
        cwd=toy.folder,
        env={
            "PYTHONPATH": str(PROJECT),
            "DFLOW_STORE": str(toy.store),
            "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.partition("LOADED")[2].split())


@pytest.mark.parametrize("command", ["help", "plan", "run", "status", "ops"])
def test_a_command_that_computes_nothing_loads_neither_torch_nor_mlflow(toy, command):
    arguments = {"help": ["--help"], "plan": ["plan", str(toy.file)], "run": ["run", str(toy.file)]}
    modules = loaded(toy, *arguments.get(command, [command]))
    assert "executor.cli" in modules
    assert modules & {"torch", "mlflow", "transformers", "executor.tracking.mlflow_client"} == set()


@pytest.mark.parametrize("part", [[], ["--sweep", "c.weight=[1.0,2.0]", "--to", "b"]])
def test_a_metric_to_sort_by_without_copies_is_refused(toy, part):
    said = toy.dflow("run", str(toy.file), "--sort", "steps/loss", *part)
    assert (2, "") == (said.returncode, said.stdout)
    assert said.stderr.startswith(
        "dflow: --sort steps/loss: there is no table to sort, since no selected node is swept"
    )


def rows(toy, *arguments):
    result = toy.dflow(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return {row["id"]: row for row in json.loads(result.stdout)["nodes"]}


def test_a_plan_row_has_these_fields(toy):
    found = rows(toy, "plan", str(toy.file), "-s", "c.between=+")
    digest = toy.state()["nodes"]["a"]["digest"]
    key = toy.state()["nodes"]["a"]["key"]
    assert found["a"] == {
        "id": "a", "op": "make", "key": key, "digest": digest, "state": "done", "cache": "hit", "reason": "",
        "seconds": found["a"]["seconds"], "mlflow_run_id": None,
    }  # fmt: skip
    assert all(0 < row["seconds"] < 60 for row in found.values())
    assert {name: (row["state"], row["cache"], row["reason"]) for name, row in found.items() if name in "cd"} == {
        "c": ("pending", "miss", 'config changed: c.between from "-" to "+"'),
        "d": ("pending", "maybe", "input may change: c"),
    }


def test_a_status_row_has_these_fields(toy):
    found = rows(toy, "status", toy.state()["run"])
    node = toy.state()["nodes"]["d"]
    assert found["d"] == {
        "id": "d", "op": "steps", "key": node["key"], "digest": node["digest"], "state": "done", "cache": node["cache"],
        "reason": node["reason"], "advice": "", "seconds": node["seconds"], "mlflow_run_id": None,
        "metrics": {"steps/loss": 0.2},
        "acceptance": node["acceptance"], "path": str(toy.store.resolve() / "objects" / node["digest"]),
    }  # fmt: skip


def test_what_nobody_reads_ends_quietly(toy):
    program = "import sys, executor.cli; sys.exit(executor.cli.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "plan", str(toy.file)],
        env={
            "PYTHONPATH": str(PROJECT),
            "DFLOW_STORE": str(toy.store),
            "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()


def test_a_plan_writes_nothing(tmp_path):
    toy = Toy(tmp_path)
    result = toy.dflow("plan", str(toy.file))
    assert (result.returncode, toy.store.exists()) == (0, False)
    assert [line.split()[:4] for line in result.stdout.splitlines()[1:]] == [
        ["a", "make", "runs", "new"], ["b", "upper", "runs", "new"],
        ["c", "join", "runs", "new"], ["d", "steps", "runs", "new"],
    ]  # fmt: skip


def test_explain_says_why_a_node_would_run(toy):
    result = toy.dflow("plan", str(toy.file), "--why", "c", "-s", "c.weight=2.0")
    assert result.stdout == "c runs:\n  config changed: c.weight from 1.0 to 2.0\n"
    assert toy.dflow("plan", str(toy.file), "--why", "a").stdout.startswith("a: cached as ")
    result = toy.dflow("plan", str(toy.file), "--why", "e")
    assert (result.returncode, result.stderr) == (2, 'dflow: there is no node "e" (nodes: a, b, c, d)\n')


def test_mistakes_in_a_pipeline_are_shown_without_a_traceback(tmp_path):
    toy = Toy(tmp_path, PIPELINE.replace('"upper"', '"uper"').replace('text = "hello"', "text = 1"))
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 2
    assert "Traceback" not in result.stderr


def test_other_errors_are_shown_without_a_traceback(tmp_path):
    toy = Toy(tmp_path)
    toy.store.mkdir()
    trust_store(toy.store)
    (toy.store / "format").write_text("9")
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, result.stderr) == (
        1,
        f"dflow: {toy.store}: the store has layout 9, this version of dflow uses layout {FORMAT}; "
        "choose another --store, or use the version of dflow that made it\n",
    )


@pytest.mark.parametrize("name", cli.MOVED)
def test_an_old_name_says_the_new_command(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "pipeline.toml"])
    said = capsys.readouterr()
    assert (2, "", f"dflow: `dflow {name}` is now `dflow {cli.MOVED[name]}`\n") == (ended.value.code, *said)
    command, *arguments = cli.MOVED[name].split()
    parser = ArgumentParser()
    import_module(f"executor.commands.{command}").add_arguments(parser)
    parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--full"], "--full and --quick go with --verify"),
        (["--node", "c"], "--node and --samples go with --backends"),
        (["--measure-minutes", "3"], "--measure-minutes goes with --target"),
        (["--backends"], "--backends compares the capture nodes of a pipeline: give its FILE"),
        (["--json", "--verify"], "--verify has no --json"),
        (["FILE", "--backends", "--verify"], "--verify and --backends are two checks: give one of them"),
        (["--full", "--quick", "--verify"], "--full reads every file, --quick none: give one of them"),
        (["--verify", "--ray", "h:1"], "--ray goes with the check of this machine, not with --verify or --backends"),
        (["-s", "a.b=1"], "-s changes a value of a pipeline: give its FILE"),
    ],
)
def test_doctor_refuses_options_that_exclude_each_other_and_those_of_another_check(arguments, told, capsys):
    assert cli.main(["doctor", *arguments]) == 2
    assert f"dflow: {told}\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage", "told"),
    [
        (["rnu"], "dflow [-h]", 'there is no command "rnu" (did you mean "run"?)'),
        (["fly", "--now"], "dflow [-h]", 'there is no command "fly" (run `dflow` to list them)'),
        (["--fly"], "dflow [-h]", "unrecognized arguments: --fly"),
        (["rm", "x", "--fly"], "dflow rm [-h]", "unrecognized arguments: --fly"),
        (["run"], "dflow run [-h]", "the following arguments are required: FILE"),
        (["logs", "a", "-n", "-3"], "dflow logs [-h]", 'argument -n: expected a whole number, 0 or more, got "-3"'),
    ],
)
def test_a_mistake_in_usage_is_told_below_the_usage_of_the_command(capsys, arguments, usage, told):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: {usage}")
    assert (ended.value.code, shown.splitlines()[-1]) == (2, f"dflow: {told}")


def test_without_a_command_the_help_lists_all_of_them(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    shown = capsys.readouterr().out
    assert (ended.value.code, shown.startswith("usage: dflow [-h] COMMAND ...")) == (2, True)
    assert [name for name in cli.COMMANDS if f"\n    {name}" not in shown] == []


@pytest.mark.parametrize(("command", "port"), [("ui", 5000), ("serve", 30000)])
def test_the_help_of_a_server_tells_where_it_listens(capsys, command, port):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--host ADDRESS where to listen; default: 127.0.0.1" in shown
    assert f"--port N default: {port}" in shown


def test_a_run_of_a_file_elsewhere_says_once_where_its_store_is(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    Toy(there, '[pipeline]\nname = "toy"\nops = ["toy.py"]\n[mlflow]\ntracking = false\n[node.a]\nop = "make"\n')
    kept = {name: os.environ[name] for name in os.environ if name != "DFLOW_STORE"}

    def dflow(folder, *arguments):
        command = [sys.executable, "-m", "executor.cli", *arguments]
        environment = {**kept, "PYTHONPATH": str(PROJECT), "PYTHONSAFEPATH": "1"}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    first = dflow(here, "run", "../there/pipeline.toml")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0] == (
        f"the store is {there / 'runs'}: give other commands --store {there / 'runs'}, or use them in its folder"
    )
    assert first.stdout.count("the store is") == 1
    assert dflow(there, "run", "pipeline.toml").stdout.splitlines()[0] == "nothing to do: the only node is cached"
    empty = dflow(here, "status")
    assert empty.stderr.startswith(f"dflow: {here / 'runs'}: the store holds no run yet")


def test_from_an_unknown_node_is_a_mistake(toy):
    result = toy.dflow("resume", "--from", "x")
    assert result.returncode == 2
    assert "has no node \"x\" (nodes: a, b, c, d)" in result.stderr  # fmt: skip


def test_from_does_not_go_with_adopt(toy):
    result = toy.dflow("resume", "--from", "c", "--adopt")
    assert result.returncode == 2
    assert result.stderr.startswith("dflow: --adopt continues unfinished work, --from does not (")


def test_ops_lists_all_and_describes_one(capsys):
    assert cli.main(["ops", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["ops"]
    assert [row["name"] for row in listed][:3] == ["ingest", "inject_images", "tokenize_chat"]
    assert cli.main(["ops", "shard_sequence"]) == 0
    shown = capsys.readouterr().out
    assert "  features: TargetFeatures (optional)\n" in shown
    assert "  tokens_per_step: int (default 16384)\n      padded tokens in one global step" in shown
    assert "launch\n  one process\n" in shown
    assert cli.main(["ops", "train_dflash"]) == 0
    ranks = "one process or several ranks, sp_degree of which share each sequence"
    assert f"launch\n  {ranks}\n" in capsys.readouterr().out


def test_a_foreign_package_called_ops_is_named(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").write_text("OPS = {}")
    program = (
        f"import sys; sys.path.append({str(PROJECT)!r}); import executor.cli; sys.exit(executor.cli.main(['ops']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": ""}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f'Python imports the package "ops" from {tmp_path}/ops/__init__.py, not from dflow in' in result.stderr


def test_the_ui_needs_a_database(toy):
    result = toy.dflow("ui")
    assert (result.returncode, result.stderr) == (
        1,
        f"dflow: {toy.store} has no mlflow.db: no run was tracked there yet\n",
    )


def test_a_table_of_results_has_a_row_for_each_metric_with_its_interval_and_for_each_series():
    metrics = {"eval/tau": 2.5, "eval/tau_low": 2.25, "eval/tau_high": 2.75, "eval/ties": 0.0, "eval/x_high": 1.0}
    metrics |= {f"eval/accepted_slot_{slot:02d}": 1 / slot for slot in range(1, 16)} | {"eval/layer_3": 7.0}
    assert result_rows(metrics) == [
        ("eval/tau", "2.5", "[2.25, 2.75]"),
        ("eval/accepted_slot_01..15", "1 .. 0.06667", ""),
        ("eval/layer_3", "7", ""),
        ("eval/ties", "0", ""),
        ("eval/x_high", "1", ""),
    ]


def test_results_are_printed_with_name_value_and_interval_on_a_line(capsys):
    node = NodeState(state="done", metrics={"eval/tau": 2.5, "eval/tau_low": 2.25, "eval/tau_high": 2.75})
    state = RunState(run="r1", pipeline="toy", experiment="toy", tracking_uri=None, nodes={"eval": node})
    print_results(state, ["eval"])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["eval/tau", "2.5", "[2.25,", "2.75]"]


def event(node, body):
    return Event(1.5, node, 1, body)


def test_the_live_table_shows_states_progress_and_failures(tmp_path):
    out = StringIO()
    nodes = {"a": NodeState(state="done", cache="hit", digest="0123456789abcdef"), "b": NodeState(state="running")}
    state = RunState(run="r1", pipeline="toy", experiment="toy", tracking_uri=None, nodes=nodes)
    with LiveDisplay(state, Console(file=out, force_terminal=True, width=120)) as display:
        display.show([event("b", Progress(3, 4))])
        display.show([event("b", Metric(1, {"train/loss": 0.25}))])
        display.failure(Finding("DataError: x", Node("b"), "mend x"), ["last line"], tmp_path / "b.log")
    shown = out.getvalue()
    for expected in ("toy, run r1", "0123456789ab", "train/loss 0.25", "b failed: DataError: x", "    last line"):
        assert expected in shown


def test_only_the_metrics_of_the_newest_event_are_shown_for_each_of_the_running_nodes(capsys, monkeypatch):
    monkeypatch.setattr("executor.scheduler.plain_display.PLAIN_PROGRESS_S", 0.0)
    nodes = {name: NodeState(state="running") for name in "ab"}
    display = Display(RunState(run="r1", pipeline="toy", experiment="toy", nodes=nodes))
    display.show([event(name, Progress(1, 4)) for name in "ab"])
    display.show([event("a", Metric(1, {"loss": 0.5, "lr": 0.1}))])
    display.show([event("a", Metric(1, {"accuracy": 0.75}))])
    told = ["a: 1 of 4", "b: 1 of 4", "a: 1 of 4: loss 0.5, lr 0.1", "a: 1 of 4: accuracy 0.75"]
    assert capsys.readouterr().out.splitlines() == told


def test_a_node_that_has_reported_no_progress_is_said_to_load_its_libraries(capsys, monkeypatch):
    monkeypatch.setattr("executor.scheduler.plain_display.PLAIN_PROGRESS_S", 0.0)
    nodes = {"a": NodeState(state="running"), "b": NodeState(), "c": NodeState(state="running")}
    display = Display(RunState(run="r1", pipeline="toy", experiment="toy", nodes=nodes))
    display.show([event("c", Progress(1, 4))])
    display.show([])
    display.show([event("a", Progress(2, 4))])
    loading = "a: no progress yet; libraries such as torch and transformers, and models, are loaded first"
    assert capsys.readouterr().out.splitlines() == [loading, "c: 1 of 4", "a: 2 of 4"]


def test_progress_in_which_nothing_changes_is_told_once_and_then_every_five_minutes(capsys, monkeypatch):
    monkeypatch.setattr("executor.scheduler.plain_display.PLAIN_PROGRESS_S", 0.0)
    clock = [1000.0]
    monkeypatch.setattr("executor.system.output.time.monotonic", lambda: clock[0])
    display = Display(RunState(run="r1", pipeline="toy", experiment="toy", nodes={"a": NodeState(state="running")}))
    for done, clock[0] in ((1, 1000.0), (1, 1010.0), (1, 1250.0), (2, 1255.0), (2, 1550.0), (2, 1556.0), (2, 1850.0)):
        display.show([event("a", Progress(done, 4))])
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["a: 1 of 4", "a: 2 of 4"]
    assert [re.sub(r"\d\d:\d\d:\d\d", "T", line) for line in said[2:]] == ["a: 2 of 4 (unchanged since T)"]


def test_what_a_node_waits_for_is_told_once_and_then_every_five_minutes(capsys, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("executor.scheduler.plain_display.time.monotonic", lambda: clock[0])
    display = Display(RunState(run="r1", pipeline="toy", experiment="toy", nodes={"a": NodeState()}))
    for clock[0], reason, text in (
        (1000.0, "room", " for room: 1 is free"),
        (1010.0, "room", " for room: 2 are free"),
        (1020.0, "lease", ", run r2 works on it"),
        (1301.0, "room", " for room: 3 are free"),
    ):
        display.waits("a", reason, text)
    assert capsys.readouterr().out.splitlines() == [
        "a: waiting for room: 1 is free",
        "a: waiting, run r2 works on it",
        "a: waiting for room: 3 are free",
    ]


def test_copying_in_which_nothing_changes_is_told_once(capsys, monkeypatch):
    monkeypatch.setattr("executor.system.progress.PLAIN_S", 0.0)
    with BytesDone("push", 3_000_000_000_000) as done:
        for size in (1_000_000_000_000, 1, 1, 1_000_000_000_000):
            done.advance(size)
    assert capsys.readouterr().err.splitlines() == ["push: 1.0 TB of 3.0 TB", "push: 2.0 TB of 3.0 TB"]


def test_many_cached_nodes_are_told_by_one_line(capsys):
    nodes = {f"n{k}": NodeState(state="done", cache="hit", digest="d") for k in range(30)} | {"x": NodeState()}
    with Display(RunState(run="r1", pipeline="toy", experiment="toy", nodes=nodes)) as display:
        display.changed("n3")
    assert capsys.readouterr().out == "30 of 31 nodes are cached\n"


def test_a_high_table_shows_what_runs_what_failed_and_what_ended_last():
    nodes = {f"n{k}": NodeState(state="done", cache="miss", ended=float(k)) for k in range(50)}
    nodes |= {"f": NodeState(state="failed", ended=1.0), "r": NodeState(state="running"), "p": NodeState()}
    state = RunState(run="r1", pipeline="toy", experiment="toy", nodes=nodes)
    assert shown_nodes(state, 5) == ["n47", "n48", "n49", "f", "r"]
    assert shown_nodes(state, 60) == list(nodes)


def test_a_failure_is_shown_once_where_the_log_ends_with_the_same_lines(capsys, tmp_path):
    state = RunState(run="r1", pipeline="toy", experiment="toy", tracking_uri=None, nodes={})
    display = Display(state)
    few, broken = (
        Finding("DataError: too few:\n1 image", Node("b"), "add one"),
        Finding("KeyError: 'x'", Node("b"), "read it"),
    )
    display.failure(few, ["too few:", "1 image"], tmp_path / "b.log")
    display.failure(broken, ["  File run.py, line 3", "KeyError: 'x'"], tmp_path / "b.log")
    assert capsys.readouterr().err.splitlines() == [
        "b failed: DataError: too few:",
        "    1 image",
        "  what to do: add one",
        f"  log: {tmp_path}/b.log",
        "b failed: KeyError: 'x'",
        "      File run.py, line 3",
        "    KeyError: 'x'",
        "  what to do: read it",
        f"  log: {tmp_path}/b.log",
    ]


@pytest.mark.parametrize("command", ["run p.toml", "resume", "plan p.toml", "status", "doctor"])
def test_a_text_that_names_no_cluster_is_refused_before_anything_else(command, capsys, monkeypatch):
    monkeypatch.delenv("DFLOW_RAY_ADDRESS", raising=False)
    allowed = '"local" (a cluster of dflow\'s own on this machine) or "HOST:PORT" of a cluster\'s head'
    assert cli.main([*command.split(), "--ray", "auto"]) == 2
    assert capsys.readouterr().err == f'--ray: "auto" would join whatever cluster is found; give {allowed}\n'
    monkeypatch.setenv("DFLOW_RAY_ADDRESS", "head")
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err == f'DFLOW_RAY_ADDRESS: expected {allowed}, got "head"\n'
