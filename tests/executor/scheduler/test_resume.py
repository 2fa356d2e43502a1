"""What a resumed run takes as it is, and what it decides anew."""

import json
import shutil

import attrs
from toy_ops import ONE_NODE, PIPELINE, Toy

from executor.records.run_record import NodeState, Record

BROKEN = "def upper(config, stage:"


def with_upper_in_a_module(toy):
    """The op `upper` runs in a file of its own, so that it can be broken while the declarations load."""
    source = (toy.folder / "toy.py").read_text()
    (toy.folder / "toy.py").write_text(source.replace('run="toy:upper"', 'run="upper_run:upper"'))
    (toy.folder / "upper_run.py").write_text(
        "def upper(config, stage):\n"
        '    (stage.out_dir / "text.txt").write_text((stage.inputs["text"].path / "text.txt").read_text().upper())\n'
    )


def test_finished_nodes_need_neither_their_data_nor_their_code(tmp_path):
    toy = Toy(tmp_path)
    with_upper_in_a_module(toy)
    (tmp_path / "data").write_text("hello")
    result = toy.dflow("run", str(toy.file), "-s", "a.source=data", "-s", "d.fail_at=3")
    assert result.returncode == 1
    rows = plan_rows(toy)
    (tmp_path / "data").unlink()
    (tmp_path / "upper_run.py").write_text(BROKEN)
    toy.calls()
    result = toy.dflow("resume")  # fails as before: but where it failed before
    assert (result.returncode, toy.calls()) == (1, ["steps"]), result.stderr
    assert {node: row for node, row in plan_rows(toy).items() if node != "d"} == {name: rows[name] for name in "abc"}
    result = toy.dflow("resume", "--from", "c")
    assert (result.returncode, toy.calls()) == (1, ["join", "steps"]), result.stderr
    assert toy.text("c") == "hello-HELLO"
    (tmp_path / "data").write_text("other")
    result = toy.dflow("resume", "-s", "d.fail_at=-1")
    assert (result.returncode, toy.calls()) == (0, ["steps"]), result.stderr


def plan_rows(toy):
    return json.loads((toy.store / "records" / toy.state()["run"] / "plan.json").read_text())


def test_with_other_values_what_was_pinned_and_forced_stays_so(tmp_path):
    toy = Toy(tmp_path)
    toy.dflow("run", str(toy.file))
    source = (tmp_path / "toy.py").read_text()
    (tmp_path / "toy.py").write_text(source.replace(".upper())", ".lower())"))
    result = toy.dflow("resume", "--from", "c", "-s", "d.fail_at=3")
    assert result.returncode == 1
    toy.calls()
    result = toy.dflow("resume", "-s", "d.fail_at=-1")
    assert (result.returncode, toy.calls()) == (0, ["steps"])  # c is done; d is still forced, and goes on at step 2
    assert (tmp_path / "done.txt").read_text().split() == ["0", "1", "2", "2", "3", "4"]
    assert toy.text("c") == "hello-HELLO"
    assert toy.state()["nodes"]["b"]["reason"].startswith("kept from run ")
    result = toy.dflow("resume", "-s", "c.between=+")
    assert (result.returncode, toy.calls(), toy.text("c")) == (0, ["join", "steps"], "hello+HELLO")


def test_a_node_that_only_waited_is_new_when_the_run_goes_on(tmp_path):
    toy = Toy(tmp_path, f'{PIPELINE}\n[node.e]\nop = "upper"\ntext = "@b"\n')
    with_upper_in_a_module(toy)
    whole = (tmp_path / "upper_run.py").read_text()
    (tmp_path / "upper_run.py").write_text(f"{whole}    raise ValueError\n")
    assert toy.dflow("run", str(toy.file)).returncode == 1
    assert [("failed", 1), *[("pending", 0)] * 3] == [
        (toy.state()["nodes"][node]["state"], toy.state()["nodes"][node]["attempt"]) for node in "bcde"
    ]
    (tmp_path / "upper_run.py").write_text(whole)
    assert toy.dflow("resume").returncode == 0
    reasons = {name: node["reason"] for name, node in toy.state()["nodes"].items()}
    assert {"c": "new", "d": "new", "e": "new"} == {name: reasons[name] for name in "cde"}
    assert reasons["b"].startswith("code changed")


def test_the_run_that_goes_on_is_named_first_and_then_others_of_the_store_that_are_unfinished(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    toy.dflow("run", str(toy.file))
    graph = Record.load(toy.store / "records" / toy.state()["run"]).graph()
    records = toy.store / "records"

    def recorded(pipeline, status):
        record = Record.prepare(records, attrs.evolve(graph, name=pipeline), status=status)
        record.save_all()
        return record.run

    recorded("finished", "failed")
    recorded("finished", "done")
    others = [recorded("other", "stopped"), recorded("another", "running")]  # nobody works on the latter
    last = recorded("toy", "stopped")
    result = toy.dflow("resume")
    assert result.returncode == 0
    assert result.stdout.splitlines()[:2] == [
        f"resuming run {last} (stopped)",
        f"also unfinished: {others[1]} (killed), {others[0]} (stopped)",
    ]
    result = toy.dflow("resume", others[0])
    assert result.stdout.splitlines()[0] == f"resuming run {others[0]} (stopped)"
    assert "also unfinished" not in result.stdout


def test_a_file_that_was_edited_after_the_run_began_is_named_since_its_old_values_go_on(tmp_path):
    toy = Toy(tmp_path)
    assert 1 == toy.dflow("run", str(toy.file), "-s", "d.fail_at=3").returncode
    assert "edited" not in toy.dflow("resume").stdout
    shutil.copy(toy.file, tmp_path / "another.toml")  # it names the pipeline too, and was not run
    assert "edited" not in toy.dflow("resume").stdout
    toy.file.write_text(f"{toy.file.read_text()}\n")
    (tmp_path / "toy.py").write_text(f"{(tmp_path / 'toy.py').read_text()}\n")  # its code is read anew
    said = [line for line in toy.dflow("resume").stdout.splitlines() if "edited" in line]
    assert [
        f"{toy.file} was edited after this run began, and resume goes on with what it was: dflow run {toy.file}"
    ] == said
    toy.dflow("resume", "-s", "d.fail_at=3")
    assert str(toy.file) == toy.state()["file"]  # of the new run too


def test_a_failed_resume_of_an_evaluation_names_its_command_and_no_pipeline_file(tmp_path):
    toy = Toy(tmp_path)
    assert 1 == toy.dflow("run", str(toy.file), "-s", "d.fail_at=3").returncode
    run = toy.state()["run"]
    record = Record.load(toy.store / "records" / run)
    record.state.started_by, record.state.file = "evaluate", ""
    record.save()
    toy.file.write_text(f"{toy.file.read_text()}\n")  # a file that names a pipeline of the same name
    for command in (("resume", run), ("resume", run, "-s", "d.fail_at=4")):
        result = toy.dflow(*command)
        assert "edited" not in result.stdout
        assert (
            f"failed; after a fix of code or data: dflow resume {toy.state()['run']}; "
            "with other arguments: dflow evaluate DRAFT --target TARGET"
        ) in result.stderr
    assert run != toy.state()["run"]


def test_without_a_name_the_run_that_stopped_last_is_resumed_whatever_was_started_after_it(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    toy.dflow("run", str(toy.file))
    records = toy.store / "records"
    graph = Record.load(records / toy.state()["run"]).graph()

    def recorded(pipeline, status, ended, nodes=1):
        record = Record.prepare(records, attrs.evolve(graph, name=pipeline), status=status, ended=ended)
        record.state.nodes |= {f"n{number}": NodeState() for number in range(1, nodes)}
        record.save_all()
        return record.run

    superseded = recorded("toy", "failed", 8.0)
    recorded("toy", "done", 8.5)
    last, other = recorded("long", "stopped", 9.0, nodes=2), recorded("short", "failed", 7.0)
    recorded("long", "done", 10.0)  # a part of it
    toy.dflow("run", str(toy.file))  # nothing runs
    first, second = toy.dflow("resume").stdout.splitlines()[:2]
    assert (first, second) == (f"resuming run {last} (stopped)", f"also unfinished: {other} (failed)")
    assert superseded not in second
