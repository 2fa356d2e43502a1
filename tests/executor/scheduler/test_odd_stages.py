"""What one stage leaves behind, or a mistake of dflow's own at one node, harms that node alone."""

import pytest
from side_ops import side
from toy_ops import UNTRACKED, Toy

from executor.launchers.failure import failure_of, of_node
from executor.records.run_record import NodeState, RunState
from executor.results.run_table import figures_text, print_figures, result_rows

ODD = """
[pipeline]
name = "odd"
ops = ["toy.py"]

[machine]
cpus = 2

[node.a]
op = "make"
text = "{what}"
launch = {{ cpus = 1, retries = {retries}, retry_wait = 0.0, timeout = {timeout} }}

[node.b]
op = "make"
text = "b"
launch = {{ cpus = 1 }}
"""
DOES = {
    "name": 'Path(os.fsdecode(os.fsencode(stage.out_dir) + b"/\\xff.bin")).write_text("x")',
    "result": 'stage.out_dir.joinpath("x").touch(); Path(stage._spec.results, "0.json").write_text("{"); os._exit(1)',
    "half": 'Path(stage._spec.results, "0.json").write_text(\'{"status": "failed"}\'); os._exit(1)',
    "surrogate": 'raise DataError("bad \\ud800 surrogate")',
    "escape": 'print("\\x1b[2Jcleared"); raise DataError("bad \\x1b[2J")',
    "events": 'Path(stage._spec.events).open("a").write(\'{}\\n{"kind": "metric", "node": "a", "time": 1}\\n\')',
    "wait": """
        while not Path("removed").exists():
            time.sleep(0.01)
        raise DataError("now")
""".strip(),
    "forks": """
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join(60)
        (stage.out_dir / "ended.txt").write_text(str(child.exitcode))
        child.kill()
""".strip(),
    "slow": """
        second = Path("second")
        if not second.exists():
            second.touch()
            time.sleep(600)
""".strip(),
}

# The clock of attempts goes on by two hours once the slow op has begun.
JUMPS = """
import time, types
from pathlib import Path
import executor.scheduler.attempt

def clock():
    return time.monotonic() + 7200 * Path("second").exists()

executor.scheduler.attempt.time = types.SimpleNamespace(time=time.time, monotonic=clock)
"""


def odd(tmp_path, what, retries=0, timeout=0.0):
    toy = Toy(tmp_path, ODD.format(what=what, retries=retries, timeout=timeout))
    source = toy.folder / "toy.py"
    does = f'    if config.text == "{what}":\n        {DOES.get(what, "pass")}\n'
    source.write_text(source.read_text().replace('    count_call("make")\n', f'    count_call("make")\n{does}', 1))
    return toy


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("name", "a failed: StageError: '\\udcff.bin': the op gave a file in out_dir a name that is not UTF-8"),
        ("result", "a failed: the process ended with exit code 1 and without a result"),
        ("half", "a failed: the process ended with exit code 1 and without a result"),
        ("surrogate", "a failed: DataError: bad \\ud800 surrogate"),
        ("escape", "a failed: DataError: bad \\x1b[2J\n    \\x1b[2Jcleared"),
    ],
)
def test_what_one_stage_leaves_fails_its_node_alone(tmp_path, what, said):
    toy = odd(tmp_path, what)
    result = toy.dflow("run", str(toy.file), "--keep-going")
    assert (result.returncode, result.stderr.startswith(said)) == (1, True), result.stderr
    assert {name: node["state"] for name, node in toy.state()["nodes"].items()} == {"a": "failed", "b": "done"}
    assert toy.dflow("status").returncode == 0


def test_events_that_are_none_are_left_out_by_all_readers(tmp_path):
    toy = odd(tmp_path, "events")
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, result.stderr) == (0, "")
    assert toy.state()["nodes"]["a"]["metrics"] == {"make/length": 6.0}


def test_a_mistake_of_dflow_at_one_node_fails_it_and_the_others_go_on(tmp_path):
    toy = odd(tmp_path, "nothing")
    broken = """
import executor.scheduler.attempt

def begun(self, before=executor.scheduler.attempt.Attempt._result):
    return {}["no such thing"] if self.task.node.id == "a" else before(self)

executor.scheduler.attempt.Attempt._result = begun
"""
    process = toy.start("run", str(toy.file), "--keep-going", program=broken + UNTRACKED)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "a failed: a bug in dflow: KeyError: 'no such thing'" in errors
    assert errors.count("Traceback (most recent call last)") == 1
    assert {name: node["state"] for name, node in toy.state()["nodes"].items()} == {"a": "failed", "b": "done"}


def test_an_attempt_that_took_too_long_is_tried_again_where_the_op_declares_timeouts(tmp_path):
    toy = odd(tmp_path, "slow", retries=1, timeout=3600.0)
    source = toy.folder / "toy.py"
    seconds = 'help="how long it takes")\n    output = Text\n'
    declared = source.read_text().replace(seconds, f'{seconds}    transient = ("TimeoutError",)\n', 1)
    source.write_text(declared)
    process = toy.start("run", str(toy.file), program=JUMPS + UNTRACKED)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "took longer than launch.timeout = 3600 s; retry 1 of 1 in 0 s" in out


def test_a_resumed_run_tells_what_was_done_before_as_such(tmp_path):
    toy = side(tmp_path, '[node.a]\nop = "make"\n[node.e]\nop = "flaky"\ntimes = 1\nerror = "data"\n')
    assert toy.dflow("run", str(toy.file), "--keep-going").returncode == 1
    digest = toy.state()["nodes"]["a"]["digest"][:12]
    result = toy.dflow("resume", "--keep-going")
    lines = [line for line in result.stdout.splitlines() if line.startswith("a: ")]
    assert lines == [f"a: done before {digest}"]


def test_a_failure_is_told_when_it_happens_and_in_the_table_and_nowhere_else(tmp_path):
    toy = side(tmp_path, '[node.e]\nop = "flaky"\ntimes = 1\nerror = "data"\n')
    result = toy.dflow("run", str(toy.file))
    assert result.stderr.splitlines() == [
        "e failed: DataError: the server is busy",
        "    try 0",
        "    DataError: the server is busy",
        "  what to do: fix the data or change the setting named in the message; finished work is kept",
        f"  log: {next(toy.store.glob('records/*/e.log'))}",
        f"run {toy.state()['run']} failed; after a fix of code or data: dflow resume {toy.state()['run']}; "
        f"after a change of the pipeline file: dflow run {toy.file} --store {toy.store}",
    ]
    assert result.stdout.count("the server is busy") == 1


def test_only_of_a_resumable_op_is_saved_work_spoken_of():
    bug, again = failure_of(ValueError("a bug")), "dflow resume r1"
    found = of_node(bug, "n", retries=0, resume=again, resumable=False)
    assert found.advice == "fix the code, see the traceback"
    found = of_node(bug, "n", retries=0, resume=again, resumable=True)
    assert found.advice.endswith("; then `dflow resume r1 --adopt` continues from its saved work")


def test_a_node_that_fails_while_another_one_has_just_been_committed_ends_the_run_as_it_should(tmp_path):
    toy = odd(tmp_path, "wait")
    program = """
import time, executor.store.lease
from pathlib import Path

def removed(self, before=executor.store.lease.Lease.remove):
    before(self)
    Path("removed").touch()
    time.sleep(3)  # so long the other one's failure finds this node between its work folder and its end

executor.store.lease.Lease.remove = removed
"""
    process = toy.start("run", str(toy.file), program=program + UNTRACKED)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in errors) == (1, False), errors
    assert {name: node["state"] for name, node in toy.state()["nodes"].items()} == {"a": "failed", "b": "done"}


METRICS = {"eval/tau": 2.5, "eval/tau_low": 2.25, "eval/tau_high": 2.75, "eval/n": 3.0}


def test_copies_of_a_node_share_a_table_of_results():
    few = {f"eval-{name}": result_rows(METRICS) for name in ("small", "large")}
    assert figures_text(few).splitlines() == [
        "results of eval-small, eval-large",
        "metric    small             large",
        "eval/tau  2.5 [2.25, 2.75]  2.5 [2.25, 2.75]",
        "eval/n    3                 3",
    ]
    many = {f"eval-{name}": result_rows(METRICS) for name in "abcdef"}
    assert figures_text(many).splitlines()[1:3] == ["eval  eval/tau          eval/n", "a     2.5 [2.25, 2.75]  3"]


def test_what_is_judged_is_told_first_in_a_table_of_its_own_and_a_warning_of_several_once(capsys):
    shown = {"loss": 1.0}
    nodes = {
        "eval-a": NodeState(state="done", metrics=METRICS, warnings=["no GPU", "slow"]),
        "eval-b": NodeState(state="done", metrics=METRICS, warnings=["no GPU"]),
        "bench-a": NodeState(state="done", metrics=shown),
        "eval-c": NodeState(state="done", metrics=shown),
    }
    state = RunState(run="r1", pipeline="toy", experiment="toy", nodes=nodes)
    print_figures(state, list(nodes))
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("results of")]
    assert heads == ["results of eval-a, eval-b", "results of bench-a", "results of eval-c"]
    assert lines[-2:] == ["eval-a, eval-b: warning: no GPU", "eval-a: warning: slow"]


def test_of_a_warning_that_was_printed_before_only_the_first_sentence_stands_with_the_results(capsys):
    long, short = "it writes the date (strftime_now): not the day. Set template_date. Give it on.", "no GPU"
    nodes = {"target": NodeState(state="done", warnings=[long, short])}
    state = RunState(run="r1", pipeline="toy", experiment="toy", nodes=nodes)
    print_figures(state, [], warned={long, short})
    first = "target: warning: it writes the date (strftime_now): not the day (the rest of it stands above)"
    assert [first, "target: warning: no GPU"] == capsys.readouterr().out.splitlines()
    print_figures(state, [])
    assert f"target: warning: {long}" == capsys.readouterr().out.splitlines()[0]


def test_a_process_that_an_op_forked_ends_when_it_is_asked_to(tmp_path):
    toy = odd(tmp_path, "forks")
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    (ended,) = toy.store.glob("objects/*/ended.txt")
    assert "-15" == ended.read_text()
