"""Whole runs of small ops without torch, through the command."""

import json
import os
import signal
from pathlib import Path

import pytest
from side_ops import side
from toy_ops import ONE_NODE, PIPELINE, Toy, wait_for

ALL = ["make", "upper", "join", "steps"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A store in which the pipeline was run once; tests here add to it, each with values of its own."""
    toy = Toy(tmp_path_factory.mktemp("toy"))
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, result.stderr) == (0, "")
    assert toy.calls() == ALL
    return toy


def test_a_second_run_executes_nothing_and_shows_the_results(done):
    result = done.dflow("run", str(done.file))
    assert (result.returncode, done.calls()) == (0, [])
    assert done.caches() == dict.fromkeys("abcd", ("done", "hit"))
    assert "steps/loss" in result.stdout


def test_a_changed_value_runs_its_node_and_what_reads_from_it(done):
    result = done.dflow("run", str(done.file), "-s", "c.between=+")
    assert (result.returncode, done.calls()) == (0, ["join", "steps"])
    assert done.text("c") == "hello+HELLO"
    assert 'c: started: config changed: c.between from "-" to "+"' in result.stdout


def test_a_node_that_gives_the_same_bytes_stops_the_rest(done):
    result = done.dflow("run", str(done.file), "-s", "c.weight=2.0")
    assert (result.returncode, done.calls()) == (0, ["join"])
    assert done.caches()["d"] == ("done", "hit")


def test_a_neutral_value_and_launch_change_nothing(done):
    done.dflow("run", str(done.file), "-s", "a.note=other", "-s", "d.seconds=0.5", "-s", "a.launch.threads=1")
    assert done.calls() == []


def test_the_content_of_an_external_file_decides(done):
    (done.folder / "text").write_text("hello")
    done.dflow("run", str(done.file), "-s", "a.source=text")
    assert done.calls() == ["make"]  # the same content as before comes out, so nothing else runs
    os.utime(done.folder / "text")
    done.dflow("run", str(done.file), "-s", "a.source=text")
    assert done.calls() == []


def test_the_manifest_says_what_the_artifact_was_made_of(done):
    done.dflow("run", str(done.file))
    nodes = done.state()["nodes"]
    manifest = json.loads((done.store / "objects" / nodes["c"]["digest"] / "manifest.json").read_text())
    assert sorted(manifest) == [
        "config", "digest", "ended", "files", "inputs", "key", "key_parts", "launch", "lease", "metrics",
        "node", "op", "run", "seconds", "started", "token",
    ]  # fmt: skip
    assert manifest["inputs"] == {"texts": [nodes["a"]["digest"], nodes["b"]["digest"]], "extra": None}
    assert manifest["config"] == {"between": "-", "weight": 1.0}
    assert manifest["launch"] == {
        "kind": "process",
        "nproc": 1,
        "hosts": 1,
        "sp_degree": 1,
        "threads": len(os.sched_getaffinity(0)),
        "device": "cpu",
    }
    assert manifest["metrics"] == {"join/length": 11.0, "join/weight": 1.0}
    assert sorted(manifest["key_parts"]) == ["code", "config", "external", "libraries", "op", "version"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("data", "d failed: DataError: line 3 of the data is broken"),
        ("bug", "d failed: ValueError: a bug"),
        ("kill", "d failed: killed (signal 9); perhaps this machine ran out of memory"),
        ("memory", "d failed: MemoryError: out of memory"),
        ("exit", "d failed: the process ended with exit code 3 and without a result"),
    ],
)
def test_a_failed_node_shows_its_error_and_its_log(done, kind, expected):
    result = done.dflow("run", str(done.file), "-s", f"d.error={kind}", "-s", "d.fail_at=1", "-s", "d.steps=9")
    assert result.returncode == 1
    assert expected in result.stderr
    assert "    about to fail\n" in result.stderr
    assert ("Traceback" in result.stderr) is (kind in ("bug", "memory"))
    run = done.state()["run"]
    adopt = f"; then `dflow resume {run} --adopt` continues from its saved work\n"
    assert (adopt in result.stderr) is (kind == "bug")
    assert (
        f"/d.log\nrun {run} failed; after a fix of code or data: dflow resume {run}; "
        f"after a change of the pipeline file: dflow run {done.file} -s d.error={kind} -s d.fail_at=1 -s d.steps=9 "
        f"--store {done.store}\n"
    ) in result.stderr
    assert done.caches()["d"][0] == "failed"
    done.calls()


PAGES = '''
from attrs import frozen
from dsl.op import op
from ops.artifacts import Samples, TokenShards
from toy import Text


@op(version=1, run="pages:turn")
@frozen(kw_only=True)
class ToSamples:
    """Writes samples under another name, in a folder of the right one."""
    text: Text
    output = Samples


@op(version=1, run="pages:turn")
@frozen(kw_only=True)
class ToTokens:
    """Writes one of two files."""
    text: Text
    output = TokenShards


def turn(config, stage):
    (stage.out_dir / "samples.jsonl").mkdir()
    (stage.out_dir / "samples.jsonl" / "rows.jsonl").write_text("")
    (stage.out_dir / "tokens.json").write_text("{}")
'''


def test_an_output_without_a_file_of_its_artifact_type_fails_its_node_and_is_not_committed(tmp_path):
    nodes = "".join(f'[node.{name}]\nop = "to_{name}"\ntext = "@a"\n' for name in ("samples", "tokens"))
    toy = Toy(tmp_path, ONE_NODE.replace('ops = ["toy.py"]', 'ops = ["toy.py", "pages.py"]') + nodes)
    (tmp_path / "pages.py").write_text(PAGES)
    result = toy.dflow("run", str(toy.file), "--keep-going")
    assert 1 == result.returncode
    for name, kind in (("samples", "Samples"), ("tokens", "TokenShards")):
        assert (
            f'{name} failed: StageError: node "{name}": to_{name} did not write samples.jsonl to stage.out_dir, but '
            f"every {kind} has that (ops.artifacts); write it, or declare another output type"
        ) in result.stderr
    states = toy.state()["nodes"]
    assert ("done", None, None) == (states["a"]["state"], states["samples"]["digest"], states["tokens"]["digest"])
    assert 1 == len(list((toy.store / "objects").iterdir()))
    fixed = PAGES.replace('(stage.out_dir / "samples.jsonl").mkdir()', "").replace(
        '"samples.jsonl" / "rows.jsonl"', '"samples.jsonl"'
    )
    (tmp_path / "pages.py").write_text(fixed)
    assert 0 == toy.dflow("run", str(toy.file)).returncode


def test_an_op_that_writes_nothing_fails(done):
    result = done.dflow("run", str(done.file), "-s", "d.error=nothing", "-s", "d.steps=3")
    assert result.returncode == 1
    assert "d failed: StageError: the op wrote nothing to stage.out_dir" in result.stderr
    done.calls()


def test_a_failed_run_is_resumed_in_the_middle_of_the_node(tmp_path):
    toy = Toy(tmp_path)
    assert toy.dflow("run", str(toy.file), "-s", "d.fail_at=3").returncode == 1
    events = read_events(toy)
    result = toy.dflow("resume", "-s", "d.fail_at=-1")
    assert result.returncode == 0
    assert toy.caches() == {**dict.fromkeys("abc", ("done", "hit")), "d": ("done", "resumed")}
    assert (tmp_path / "done.txt").read_text().split() == ["0", "1", "2", "2", "3", "4"]
    inherited = [event for event in read_events(toy) if event["node"] == "d" and event["attempt"] == 1]
    assert [event for event in inherited if event["kind"] == "metric"] == [
        event for event in events if event["node"] == "d" and event["kind"] == "metric"
    ]
    assert [event["step"] for event in read_events(toy) if event["kind"] == "cut"] == [2]


def read_events(toy):
    path = toy.store / "records" / toy.state()["run"] / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_of_stage_info_is_shown_and_what_a_stage_prints_is_not(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    source = (tmp_path / "toy.py").read_text()
    reported = 'print("of no interest"); stage.info("a needs 0.47 GB")\n    time.sleep(config.seconds)'
    (tmp_path / "toy.py").write_text(source.replace("time.sleep(config.seconds)", reported, 1))
    result = toy.dflow("run", str(toy.file))
    assert [line for line in result.stdout.splitlines() if line.startswith("a: ")][1] == "a: a needs 0.47 GB"
    assert "of no interest" not in result.stdout


def test_the_folders_of_artifacts_are_printed(tmp_path):
    toy = Toy(tmp_path)
    toy.dflow("run", str(toy.file), "-s", "d.fail_at=3")
    rows = dict(line.split(maxsplit=1) for line in toy.dflow("status", "--paths").stdout.splitlines()[1:])
    assert ["a", "b", "c", "d"] == list(rows) and "none: failed" == rows.pop("d")
    assert ["hello", "HELLO", "hello-HELLO"] == [(Path(row) / "text.txt").read_text() for row in rows.values()]
    listed = json.loads(toy.dflow("status", "--json").stdout)["nodes"]
    assert [*rows.values(), None] == [node["path"] for node in listed]


def test_a_complete_run_has_nothing_to_resume(done):
    done.dflow("run", str(done.file))
    result = done.dflow("resume", done.state()["run"])
    assert (result.returncode, done.calls()) == (0, [])
    assert f"run {done.state()['run']} is complete: nothing to do" in result.stdout


def test_from_runs_a_node_and_all_below_and_takes_the_rest_as_it_is(tmp_path):
    toy = Toy(tmp_path)
    toy.dflow("run", str(toy.file))
    toy.calls()
    source = (tmp_path / "toy.py").read_text()
    (tmp_path / "toy.py").write_text(
        source.replace(".upper())", '.upper() + "!")')
        .replace('count_call("make")', 'count_call("make", 1)')
        .replace("count_call(name)", "count_call(name, n=0)")
    )
    result = toy.dflow("resume", "--from", "c")
    assert (result.returncode, toy.calls()) == (0, ["join", "steps"])
    assert toy.text("c") == "hello-HELLO"
    assert toy.caches() == {"a": ("done", "hit"), "b": ("done", "hit"), "c": ("done", "miss"), "d": ("done", "miss")}
    result = toy.dflow("resume", "--from", "d", "-s", "c.between=+")
    assert (result.returncode, result.stderr.count("-s c.between=+: not at or below d")) == (2, 1)
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, toy.calls()) == (0, ["make", "upper", "join", "steps"])
    assert "a: started: code changed: toy.py\n" in result.stdout


def test_from_says_which_artifact_is_gone(tmp_path):
    toy = Toy(tmp_path)
    toy.dflow("run", str(toy.file))
    rows = {row["id"]: row for row in json.loads(toy.dflow("status", "--json").stdout)["nodes"]}
    (toy.store / "objects" / rows["b"]["digest"] / "text.txt").unlink()
    result = toy.dflow("resume", "--from", "c")
    assert result.returncode == 1
    assert 'the artifact of node "b"' in result.stderr
    toy.calls()
    assert toy.dflow("run", str(toy.file)).returncode == 0
    assert toy.calls() == ["upper"]


def test_another_digest_for_the_same_key_is_reported(tmp_path):
    toy = Toy(tmp_path, '[pipeline]\nname = "random"\nops = ["toy.py"]\n[node.n]\nop = "noise"\n')
    source = (tmp_path / "toy.py").read_text()
    noise = '@op(version=1, run="toy:noise")\n@frozen(kw_only=True)\nclass Noise:\n    output = Text\n\n\n'
    noise += 'def noise(config, stage):\n    (stage.out_dir / "text.txt").write_text(str(time.time()))\n'
    (tmp_path / "toy.py").write_text(source + "\n\n" + noise)
    toy.dflow("run", str(toy.file))
    result = toy.dflow("resume", "--from", "n")
    assert result.returncode == 0
    assert "warning: n: the same key gave" in result.stderr
    assert "the op is not deterministic" in result.stderr
    assert [event["kind"] for event in read_events(toy) if event["kind"] == "differs"] == ["differs"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_saves_its_progress(tmp_path, number, code):
    toy = Toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "d.steps=600", "-s", "d.seconds=0.1")
    wait_for(lambda: len(toy.steps()) >= 3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code
    assert f"run {toy.state()['run']} was stopped; resume with: dflow resume {toy.state()['run']}" in errors
    assert toy.caches()["d"][0] == "pending"
    saved = len(toy.steps())
    assert 3 <= saved < 600
    assert toy.dflow("resume", "-s", "d.seconds=0.0").returncode == 0
    steps = [int(step) for step in (tmp_path / "done.txt").read_text().split()]
    assert steps[:saved] == list(range(saved))
    assert sorted(set(steps)) == list(range(600))
    assert len(steps) <= 601


def test_two_runs_at_once_on_one_store_do_every_node_once(tmp_path):
    held = PIPELINE.replace('op = "make"\ntext = "hello"', 'op = "meet"\nname = "a"\nothers = ["go"]')
    toy = side(tmp_path, held.partition("\n\n")[2])
    first = toy.start("run", str(toy.file))
    wait_for((tmp_path / "a.here").exists)
    second = toy.start("run", str(toy.file))
    assert any(line.startswith("a: waiting, process") for line in second.stdout)
    (tmp_path / "go.here").touch()
    outputs = [process.communicate(timeout=300) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert sorted(toy.calls()) == sorted(["a", *ALL[1:]])
    assert "a: waiting, process" not in outputs[0][0]
    assert list((toy.store / "work").iterdir()) == []


def test_code_that_changes_while_the_run_goes_on_gets_the_key_of_what_really_ran(tmp_path):
    held = PIPELINE.replace('op = "make"\ntext = "hello"', 'op = "meet"\nname = "hello"\nothers = ["go"]')
    toy = side(tmp_path, held.partition("\n\n")[2])
    process = toy.start("run", str(toy.file))
    wait_for((tmp_path / "hello.here").exists)
    source = (tmp_path / "toy_join.py").read_text()
    (tmp_path / "new").write_text(source.replace("between.join(texts)", "between.join(reversed(texts))"))
    (tmp_path / "new").replace(tmp_path / "toy_join.py")  # at once, for who reads it meanwhile
    (tmp_path / "go.here").touch()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "c: its code or data changed since planning; the current version is used" in out
    assert toy.text("c") == "HELLO-hello"
    toy.calls()
    toy.dflow("run", str(toy.file))
    assert toy.calls() == []
    (tmp_path / "toy_join.py").write_text(source)
    result = toy.dflow("run", str(toy.file))
    assert "c: started: code changed: toy_join.py\n" in result.stdout
    assert toy.text("c") == "hello-HELLO"


def test_work_that_older_code_began_is_adopted_on_request(tmp_path):
    toy = Toy(tmp_path)
    toy.dflow("run", str(toy.file), "-s", "d.fail_at=4", "-s", "d.error=bug")
    source = (tmp_path / "toy.py").read_text()
    (tmp_path / "toy.py").write_text(
        source.replace('raise ValueError("a bug")', "pass").replace("if step ==", "if -1 ==")
    )
    result = toy.dflow("resume", "--adopt")
    assert result.returncode == 0
    assert "d: continues the work of run" in result.stdout
    assert (tmp_path / "done.txt").read_text().split() == ["0", "1", "2", "3", "4"]


def test_a_sample_id_with_ends_of_lines_forges_no_message_of_dflow(tmp_path):
    """Neither what a stage prints nor the text that it reports can pass for a warning, or for another node's line."""
    toy = Toy(tmp_path, ONE_NODE)
    ops = tmp_path / "toy.py"
    forged = "x\\ndflow: warning: forged\\nwarning: forged\\rb: done in 1 s\\u2028c: warning: forged"
    reported = f'print("{forged}", flush=True); stage.info("sample {forged}")'
    ops.write_text(ops.read_text().replace('    count_call("make")\n', f'    count_call("make")\n    {reported}\n'))
    result = toy.dflow("run", str(toy.file))
    assert (0, []) == (result.returncode, toy.state()["nodes"]["a"]["warnings"]), result.stderr
    shown = [line for line in result.stdout.split("\n") if "forged" in line]
    escaped = "x\\ndflow: warning: forged\\nwarning: forged\\rb: done in 1 s\\u2028c: warning: forged"
    assert [f"a: sample {escaped}"] == shown
    assert not any(line.startswith(("b: ", "c: ", "dflow: ", "warning: ")) for line in result.stdout.splitlines())


def test_a_warning_of_a_stage_is_said_once_and_stands_with_the_results_also_of_runs_that_take_its_artifact(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    ops = tmp_path / "toy.py"
    reported = 'stage.info("just a note"); stage.warn("mind the gap"); stage.warn("mind the gap")'
    ops.write_text(ops.read_text().replace('    count_call("make")\n', f'    count_call("make")\n    {reported}\n'))
    warning = "a: warning: mind the gap"
    first = toy.dflow("run", str(toy.file))
    assert (first.returncode, toy.state()["nodes"]["a"]["warnings"]) == (0, ["mind the gap"])
    lines = first.stdout.splitlines()
    assert (2, warning) == (lines.count(warning), next(line for line in lines[::-1] if line.startswith("a: ")))
    again = toy.dflow("run", str(toy.file))
    assert (toy.calls(), again.stdout.splitlines().count(warning)) == (["make"], 1)
    assert warning in toy.dflow("status").stdout.splitlines()
