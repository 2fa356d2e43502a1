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

from dsl.errors import ConfigError, DataError, PipelineError
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


def two_with_images(folder: Path) -> None:
    """a.jsonl with images in one/, b.jsonl with images in two/, c.jsonl with images beside it."""
    for name, root in (("a", "one"), ("b", "two"), ("c", ".")):
        (folder / root).mkdir(exist_ok=True)
        (folder / root / f"{name}.png").write_bytes(png())
        (folder / f"{name}.jsonl").write_text(json.dumps({"messages": TURNS, "image": f"{name}.png"}))


def test_each_source_has_its_own_image_root(tmp_path):
    two_with_images(tmp_path)
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "x.png").write_bytes(png())
    names = ("a.jsonl", "b.jsonl", "c.jsonl", "photos")
    _, rows = read(tmp_path, *names, image_root=("one", "two", "", "one"))
    assert [1, 1, 1, 1] == [len(row["images"]) for row in rows]
    sources = tuple(str(tmp_path / name) for name in names[:3])
    config = Ingest(source=sources, image_root=("one", str(tmp_path / "two"), "."))
    found = {name: file for name, file in config.external_files().items() if name.endswith(".png")}
    assert {
        "1/a.jsonl/a.png": tmp_path / "one" / "a.png",
        "2/b.jsonl/b.png": tmp_path / "two" / "b.png",
        "3/c.jsonl/c.png": tmp_path / "c.png",
    } == found


def test_roots_that_are_not_one_for_each_source_are_refused():
    with pytest.raises(ConfigError, match="image_root lists 2 folders for 1 sources: list one for each source"):
        Ingest(source="a.jsonl", image_root=("one", "two"))


def test_an_image_root_that_is_not_there_is_an_error_that_says_where_it_was_looked_for(tmp_path):
    two_with_images(tmp_path)
    config = Ingest(source=str(tmp_path / "a.jsonl"), image_root="oen", seed=0)
    said = (
        f'image_root = "oen": there is no folder {tmp_path}/oen, where a.png was looked for; image_root is relative to'
    )
    for reads in (lambda: ingest(config, FakeStage(tmp_path / "out")), config.external_files):
        with pytest.raises(DataError) as found:
            reads()
        assert said in str(found.value)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"messages": TURNS}))
    _, rows = read(tmp_path, "texts.jsonl", image_root="oen")
    assert 1 == len(rows), "texts need no images"
