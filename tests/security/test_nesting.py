"""JSON with so many brackets that reading it would exceed Python's recursion limit, in each file of a store."""

from __future__ import annotations

import pytest
from imitated_runs import run, toy_pipeline

from executor.cli import main
from executor.store.lease import Holder

DEEP = "[" * 200_000
DEEP_OBJECT = '{"a":' * 200_000
READABLE = '{"nodes":' * 900 + "1" + "}" * 900


@pytest.fixture
def store(tmp_path):
    toy = toy_pipeline(tmp_path)
    toy.record = run(toy)
    return toy


def commands(toy):
    record = toy.record.run
    store = ("--store", str(toy.store))
    for command in (
        ["runs"],
        ["status"],
        ["status", record],
        ["report", record],
        ["gc"],
        ["doctor", "--verify"],
        ["runs", "--tag", "kept", record],
    ):
        yield [*command, *store]


@pytest.mark.parametrize("text", [DEEP, DEEP_OBJECT, READABLE])
@pytest.mark.parametrize(
    "name",
    [
        *("format", "objects/*/manifest.json", "index/*", "work/*/work.json"),
        *(f"records/*/{file}" for file in ("state.jsonl", "graph.json", "tags.json", "events.jsonl", "mlflow.json")),
    ],
)
def test_commands_report_a_file_that_is_nested_too_deeply(store, name, text, capsys):
    found = list(store.store.glob(name)) or [store.store / name.replace("*", store.record.run)]
    for path in found:
        if path.parent.is_dir():
            path.chmod(0o644) if path.exists() else None
            path.write_text(f"{text}\n")
    for command in commands(store):
        assert main(command) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_lease_that_is_nested_too_deeply_names_nobody():
    assert Holder.of(DEEP_OBJECT.encode()) == Holder()


def test_a_remote_whose_format_is_nested_too_deeply_is_refused(store, tmp_path, capsys):
    remote = tmp_path / "remote"
    remote.mkdir()
    (remote / "format").write_text(DEEP)
    assert main(["push", str(remote), "--store", str(store.store)]) == 1
    assert "nested too deeply" in capsys.readouterr().err
