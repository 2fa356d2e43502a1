"""A benchmark file is an input like others: looked at before a run begins, and part of the key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsl.read_toml import read_graph
from executor.cli import main
from executor.keys.node_key import Sources, graph_parts

TINY = Path(__file__).parent.parent / "pipelines" / "tiny.toml"
GOOD = {"id": "a", "category": "talk", "messages": [{"role": "user", "content": "Hello"}], "images": ["one.png"]}
BAD = [
    (GOOD | {"id": "b", "images": ["gone.png"]}, "image missing: gone.png"),
    ('{"id": "c"', "broken JSON at column"),
    (GOOD | {"id": "d", "messages": [{"role": "system", "content": "Be brief."}]}, "no user turn"),
]


@pytest.fixture
def benchmark(tmp_path) -> Path:
    (tmp_path / "one.png").write_bytes(b"looked at when it is decoded")
    return written(tmp_path / "bench.jsonl", [GOOD])


def written(file: Path, rows: list) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


@pytest.fixture
def tiny(tmp_path) -> Path:
    """The tiny chain without the gate, which has nothing to compare a benchmark with."""
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.read_text().partition("[node.check]")[0])
    return file


def arguments(command: str, tiny: Path, benchmark: Path) -> list[str]:
    return [command, str(tiny), "-s", f"eval.benchmark={benchmark}", "--store", str(tiny.parent / "store")]


def test_a_plan_tells_every_mistake_of_a_benchmark_and_a_run_does_not_begin_with_them(tiny, benchmark, capsys):
    written(benchmark, [GOOD, *[row for row, _ in BAD]])
    assert 2 == main(arguments("plan", tiny, benchmark))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("node.eval.benchmark: ")]
    assert "3 of 4 lines of the benchmark cannot be used" in told[0]
    expected = [f"node.eval.benchmark: {benchmark}:{line}: {what}" for line, (_, what) in enumerate(BAD, start=2)]
    assert expected == [line[: len(start)] for line, start in zip(told[1:], expected, strict=True)]
    assert 2 == main(arguments("run", tiny, benchmark))
    assert told == capsys.readouterr().err.splitlines()
    assert [] == list((benchmark.parent / "store").glob("records/*"))


def test_more_mistakes_than_a_terminal_wants_are_counted(tiny, benchmark, capsys):
    written(benchmark, ["{"] * 130)
    main(arguments("plan", tiny, benchmark))
    out = capsys.readouterr().out
    assert 100 == out.count("broken JSON")
    assert "node.eval.benchmark: ... and 30 more" in out


def test_a_good_benchmark_stands_in_no_runs_way_and_is_read_without_torch(tiny, benchmark):
    command = "import sys; from executor.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    given = arguments("plan", tiny, benchmark)
    shown = subprocess.run([sys.executable, "-c", command, *given], capture_output=True, text=True, check=True).stdout
    assert "False" == shown.splitlines()[-1]
    assert "node.eval.benchmark" not in shown


def test_a_folder_and_a_missing_file_are_no_benchmark(tiny, benchmark, capsys):
    main(arguments("plan", tiny, benchmark.parent))
    assert "no such file; benchmark must name a file of JSON lines" in capsys.readouterr().out
    main(arguments("plan", tiny, benchmark.parent / "absent.jsonl"))
    out = capsys.readouterr().out
    assert (1, 0) == (out.count("there is no file or folder"), out.count("no such file"))


@pytest.mark.parametrize(
    ("name", "row", "settings", "mistake"),
    [
        ("bfcl.json", {"id": "a", "question": [[]], "function": []}, [], '"question" must be a list of turns, each a'),
        ("own.jsonl", GOOD, ["eval.benchmark_prompt=z-lab"], 'benchmark_prompt = "z-lab" is for questions of GSM8K'),
        ("cut.jsonl.gz", GOOD, [], "cannot be unpacked as gzip"),
        ("gsm8k.jsonl", {"question": 5}, [], '"question" must be a text, got a number'),
    ],
)
def test_a_plan_refuses_a_benchmark_that_cannot_be_asked_so(tiny, benchmark, capsys, name, row, settings, mistake):
    file = written(benchmark.parent / name, [row])
    assert 2 == main([*arguments("plan", tiny, file), *(word for each in settings for word in ("-s", each))])
    told = capsys.readouterr().out
    assert f"node.eval.benchmark: {file}:" in told
    assert mistake in told


def test_fields_of_a_benchmark_are_refused_without_one(tiny, capsys):
    store = ["--store", str(tiny.parent / "store")]
    assert 2 == main(["plan", str(tiny), "-s", "eval.first_turn=true", *store])
    assert "eval.first_turn=true: is about a benchmark" in capsys.readouterr().err


def test_the_lines_of_a_benchmark_and_the_images_that_it_names_are_part_of_the_key(tiny, benchmark):
    def external() -> dict[str, str]:
        graph = read_graph(tiny, [f"eval.benchmark={benchmark}"])
        others = [node_id for node_id in graph.nodes if node_id != "eval"]
        return dict(graph_parts(graph, Sources.now(None), without=others)["eval"].external)

    before = external()
    written(benchmark, [GOOD | {"messages": [{"role": "user", "content": "Hello!"}]}])
    edited = external()
    (benchmark.parent / "one.png").write_bytes(b"another")
    other_image = external()
    assert {"benchmark"} == {name for name in before if before[name] != edited[name]}
    assert {"external_files"} == {name for name in before if edited[name] != other_image[name]}
