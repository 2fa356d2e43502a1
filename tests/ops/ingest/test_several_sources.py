"""Several sources in one ingest: their order, ids, splits, mistakes and key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_stage import FakeStage
from format_cases import png, write_csv
from format_reading import TURNS
from written_files import HEAD, write

from dsl.errors import DataError, PipelineError
from dsl.read_toml import read_graph
from executor.keys.node_key import Sources, node_parts
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.lib.data.files import read_jsonl


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with rows, a table, and images by class."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "x.png").write_bytes(png())
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': TURNS, 'image': 'photos/cat/x.png'})}\n")
    write_csv(tmp_path, [{"prompt": "Which?", "completion": "This one."}] * 2, "more.csv")
    return tmp_path


def read(folder: Path, *names: str, **options) -> tuple[FakeStage, list[dict]]:
    stage = FakeStage(folder / "out")
    ingest(Ingest(source=tuple(str(folder / name) for name in names), seed=0, **options), stage)
    return stage, list(read_jsonl(stage.out_dir / "samples.jsonl"))


def test_sources_of_all_formats_follow_each_other_and_their_places_make_ids_unique(data):
    stage, rows = read(data, "more.csv", "photos", "chat.jsonl", "more.csv")
    assert ["1/more.csv:2", "1/more.csv:3", "2/photos/cat/x.png", "3/chat.jsonl:1", "4/more.csv:2", "4/more.csv:3"] == [
        row["id"] for row in rows
    ]
    assert [0, 0, 1, 1, 0, 0] == [len(row["images"]) for row in rows]
    assert (6, 6) == stage.progressed[-1]


def test_one_source_in_a_list_gives_what_it_gives_without_one(data):
    for name in ("chat.jsonl", "photos", "more.csv"):
        _, listed = read(data, name)
        stage = FakeStage(data / "single")
        ingest(Ingest(source=str(data / name), seed=0), stage)
        assert list(read_jsonl(stage.out_dir / "samples.jsonl")) == listed


def test_names_of_sources_are_splits_as_those_of_files_in_a_folder_are(data):
    for name in ("train", "test"):
        shutil.copy(data / "more.csv", data / f"{name}.csv")
    shutil.copytree(data / "photos", data / "val-photos")
    _, rows = read(data, "train.csv", "val-photos", "test.csv", val_fraction=0.5)
    assert ["train", "train", "val", "test", "test"] == [row["split"] for row in rows]
    (data / "train.csv").write_text("prompt,completion\n" + "Which?,This one.\n" * 60)
    _, rows = read(data, "train.csv", "test.csv", val_fraction=0.5, test_fraction=0.4)
    assert {"train", "val"} == {row["split"] for row in rows[:60]}  # there is a test, so none is drawn


def test_ids_and_mistakes_of_all_sources_are_seen_together(data):
    for name in ("a", "b"):
        (data / f"{name}.jsonl").write_text(json.dumps({"id": "x", "messages": TURNS}))
    with pytest.raises(DataError) as error:
        read(data, "a.jsonl", "b.jsonl")
    assert f'{data}/b.jsonl:1: id "x" is already that of {data}/a.jsonl:1; ids must differ' in str(error.value)
    assert ["x", "x#2"] == [row["id"] for row in read(data, "a.jsonl", "b.jsonl", duplicate_ids="number")[1]]
    for name in ("a", "b"):
        (data / f"{name}.jsonl").write_text("{\n")
    with pytest.raises(DataError) as error:
        read(data, "a.jsonl", "more.csv", "b.jsonl")
    assert [f"{data}/{name}.jsonl:1: broken JSON" for name in ("a", "b")] == [
        line.split(" at ")[0] for line in str(error.value).split("\n")
    ]


def key_of(folder: Path, source: str) -> str:
    file = write(folder, f'{HEAD}[node.a]\nop = "ingest"\nsource = {source}\n')
    return node_parts(read_graph(file), "a", Sources.now(None)).key({})


def test_contents_names_and_order_are_in_the_key_and_the_folder_is_not(data):
    names = ["chat.jsonl", "more.csv"]
    first = key_of(data, json.dumps(names))
    shutil.copytree(data, data / "moved", ignore=shutil.ignore_patterns("*.toml"))
    assert first == key_of(data, json.dumps([f"moved/{name}" for name in names]))
    keys = {first, key_of(data, json.dumps(names[::-1])), key_of(data, '"chat.jsonl"')}
    shutil.copy(data / "more.csv", data / "test.csv")
    keys.add(key_of(data, json.dumps(["chat.jsonl", "test.csv"])))
    (data / "photos" / "cat" / "x.png").write_bytes(png((9, 9)))  # which a row of chat.jsonl names
    keys.add(key_of(data, json.dumps(names)))
    (data / "more.csv").write_text("prompt\nWhy?\n")
    keys.add(key_of(data, json.dumps(names)))
    assert 6 == len(keys)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("[]", "source must name at least one file or folder"),
        ('["chat.jsonl", "builtin:digits"]', 'the sample "builtin:digits" cannot be one of several sources'),
        ('["chat.jsonl", "gone.jsonl"]', "there is no file or folder"),
    ],
)
def test_a_list_that_cannot_be_read_is_a_mistake_of_the_file(data, source, message):
    with pytest.raises(PipelineError, match=message):
        key_of(data, source)
