"""Every input format gives the same samples: one digest after `inject_images`, the same ids after `tokenize_chat`."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import datasets
import format_cases as cases
import pyarrow
import pytest
from fake_stage import FakeStage, folder_digest
from format_reading import TURNS, inject, read
from pyarrow import parquet

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.ingest.op import Ingest
from ops.ingest.source import split_named
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

ROOT = Path(__file__).resolve().parents[3]

FORMATS = {
    "own": lambda folder: cases.write_json(folder, cases.own),
    "openai-data-url": lambda folder: cases.write_json(folder, cases.openai(cases.data_url)),
    "openai-path": lambda folder: cases.write_json(folder, cases.openai(cases.path_url)),
    "qwen-path": lambda folder: cases.write_json(folder, cases.openai(cases.qwen_path)),
    "qwen-base64": lambda folder: cases.write_json(folder, cases.openai(cases.qwen_base64), array=True),
    "llava": lambda folder: cases.write_json(folder, cases.llava),
    "llava-array": lambda folder: cases.write_json(folder, cases.llava, array=True),
    "parquet-struct": lambda folder: cases.write_parquet(folder, cases.as_struct),
    "parquet-bytes": lambda folder: cases.write_parquet(folder, cases.encoded),
    "parquet-path": lambda folder: cases.write_parquet(folder, cases.as_path),
    "arrow-struct": lambda folder: cases.write_arrow(folder, cases.as_struct),
    "arrow-path": lambda folder: cases.write_arrow(folder, cases.as_path),
}


@pytest.fixture(scope="module")
def injected(tmp_path_factory) -> dict[str, ImageSamples]:
    """The ten samples behind ingest and inject, by format."""
    found = {}
    for name, write in FORMATS.items():
        folder = tmp_path_factory.mktemp(name)
        cases.write_images(folder)
        source = write(folder)
        root = ".." if name == "arrow-path" else None
        stage, _, summary = read(source, folder / "ingest", image_root=root)
        assert (summary["in"], summary["kept"]) == (10, 10)
        found[name] = inject(stage.artifact(Samples), folder / "inject", image_policy="in-place")
    return found


def test_ten_samples_in_every_format_have_one_digest_after_inject(injected):
    digests = {name: samples.digest for name, samples in injected.items()}
    assert digests == dict.fromkeys(FORMATS, digests["own"])
    rows = [json.loads(line) for line in (injected["own"].path / "samples.jsonl").read_text("utf-8").splitlines()]
    assert [len(row["images"]) for row in rows] == [1, 1, 1, 1, 1, 1, 2, 2, 0, 0]
    assert rows[6]["messages"][1]["content"] == [
        {"type": "text", "text": "First "},
        {"type": "image"},
        {"type": "text", "text": " and then "},
        {"type": "image"},
        {"type": "text", "text": ": do they differ?"},
    ]


def test_ten_samples_in_every_format_have_the_same_ids_after_tokenize(injected, tmp_path):
    digests = {}
    for name in ("own", "llava-array", "openai-data-url", "parquet-struct", "arrow-struct"):
        stage = FakeStage(tmp_path / name, {"samples": injected[name]})
        tokenize_chat(TokenizeChat(samples=Ref("inject"), vocab_size=400, min_loss_tokens=1), stage)
        digests[name] = folder_digest(stage.artifact(TokenShards).path)
    assert digests == dict.fromkeys(digests, digests["own"])


def test_the_key_sees_the_images_that_rows_name_in_json_and_parquet(tmp_path):
    cases.write_images(tmp_path)
    names = {f"images/{name}" for case in cases.cases() for name in case.images}
    named = {name: tmp_path / name for name in names}
    for write in ("own", "llava-array", "openai-path", "parquet-path"):
        assert named == Ingest(source=str(FORMATS[write](tmp_path))).external_files()
    absolute = {str(file): file for file in named.values()}
    assert absolute == Ingest(source=str(FORMATS["qwen-path"](tmp_path))).external_files()
    for write in ("openai-data-url", "parquet-struct", "parquet-bytes"):
        found = Ingest(source=str(FORMATS[write](tmp_path))).external_files()
        assert [] == [file for file in found.values() if file is not None]
    saved = str(FORMATS["arrow-path"](tmp_path))
    assert {} == Ingest(source=saved).external_files()  # its own folder is the source
    assert named == Ingest(source=saved, image_root="..").external_files()


def test_a_plan_over_json_loads_neither_pyarrow_nor_pillow(tmp_path):
    cases.write_images(tmp_path)
    source = cases.write_json(tmp_path, cases.own)
    script = (
        f"import sys; from ops.ingest.op import Ingest; files = list(Ingest(source={str(source)!r}).external_files())\n"
        "print(len(files), sorted({'pyarrow', 'datasets', 'torch', 'PIL', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "9 []\n"


def test_images_by_class_become_questions_and_labels(tmp_path):
    for label, name in (("cat", "b.png"), ("cat", "a.PNG"), ("dog/small", "c.png")):
        (tmp_path / "data" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / label / name).write_bytes(cases.png())
    (tmp_path / "data" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "data" / "dog" / ".hidden").write_text("passed over")
    _, rows, summary = read(tmp_path / "data", tmp_path, question="A {label}?", answer="It is a {label}.")
    assert [row["id"] for row in rows] == ["cat/a.PNG", "cat/b.png", "dog/small/c.png"]
    assert rows[2]["conversations"] == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "A dog?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It is a dog."}]},
    ]
    assert (summary["in"], summary["dropped"]) == (4, {"not an image": 1})
    with pytest.raises(ConfigError, match=r'answer must contain "\{label\}"'):
        Ingest(source="x", answer="a cat")


@pytest.mark.parametrize("split", ["", "test/"])
def test_images_directly_in_a_folder_have_no_class_and_its_name_is_in_none_of_their_texts(tmp_path, split):
    (tmp_path / "cats" / split).mkdir(parents=True)
    for name in ("b.png", "a.jpg", "c.png"):
        (tmp_path / "cats" / split / name).write_bytes(cases.png())
    _, rows, summary = read(tmp_path / "cats", tmp_path)
    assert [f"{split}{name}" for name in ("a.jpg", "b.png", "c.png")] == [row["id"] for row in rows]
    assert {"all"} == {row["conversations"][1]["content"][0]["text"] for row in rows}
    assert (3, {}) == (summary["in"], summary["dropped"])


@pytest.mark.parametrize("above", ["", "train/"])
def test_images_beside_folders_are_dropped_with_what_to_do_and_other_files_there_are_no_data(tmp_path, above):
    for name in (f"{above}cat/1.png", f"{above}loose.png", "top.JPG"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(cases.png())
    for name in ("classes.txt", ".hidden.png"):
        (tmp_path / "data" / above / name).write_text("passed over")
    stage, rows, summary = read(tmp_path / "data", tmp_path)
    assert [f"{above}cat/1.png"] == [row["id"] for row in rows]
    assert (3, {"image beside folders": 2}) == (summary["in"], summary["dropped"])
    way = "move it into one of them, or all images into one folder without subfolders"
    with (stage.out_dir / "dropped.csv").open() as file:
        dropped = list(csv.reader(file))[1:]
    expected = [[name, "image beside folders", way] for name in (f"{above}loose.png", "top.JPG")]
    assert sorted(expected) == sorted(dropped)


def test_folders_of_splits_above_the_classes_give_the_splits_and_what_they_lack_is_drawn_from_train(tmp_path):
    for place in range(60):
        folder = tmp_path / "data" / ("test" if place < 10 else "train") / "cat"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place}.png").write_bytes(cases.png())
    _, rows, summary = read(tmp_path / "data", tmp_path, val_fraction=0.3, test_fraction=0.3)
    assert {row["id"] for row in rows if row["split"] == "test"} == {f"test/cat/{place}.png" for place in range(10)}
    assert 5 < summary["splits"]["val"] < 30
    assert {row["conversations"][1]["content"][0]["text"] for row in rows} == {"cat"}


CALTECH = ("BACKGROUND_Google/image_0001.jpg", "accordion/image_0001.jpg", "airplanes/image_0001.jpg")


@pytest.mark.parametrize("below", ["101_ObjectCategories", "caltech-101/101_ObjectCategories", ""])
def test_the_classes_of_caltech101_are_found_below_its_folders_and_its_background_is_none(tmp_path, below):
    source = tmp_path / "data"
    for name in CALTECH:
        (source / below / name).parent.mkdir(parents=True)
        (source / below / name).write_bytes(name.encode())
    beside = source / below / ".." / "Annotations" / "accordion"
    beside.mkdir(parents=True)
    (beside / "annotation_0001.mat").write_bytes(b"x")
    (source / "101_ObjectCategories.tar.gz").write_bytes(b"x")
    stage, rows, summary = read(source, tmp_path)
    assert ["accordion", "airplanes"] == [row["label"] for row in rows]
    assert {"background, no class": 1} == summary["dropped"]
    assert "BACKGROUND_Google/image_0001.jpg" in (stage.out_dir / "dropped.csv").read_text()


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("cat/1.png", "cat/2.png"), ["cat"]),
        (("cat/old/1.png", "cat/2.png"), ["cat"]),
        (("cat/old/1.png",), ["cat"]),
        (("photos/cat/1.png", "photos/dog/1.png"), ["cat", "dog"]),
        (("photos/cat/1.png", "photos/dog/1.png", "3.png"), ["photos"]),
        (("photos/train/cat/1.png", "photos/test/cat/1.png"), ["cat"]),
    ],
    ids=str,
)
def test_folders_that_hold_only_the_next_one_are_no_classes_unless_they_are_the_only_ones(tmp_path, names, labels):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(name.encode())
    _, rows, _ = read(tmp_path / "data", tmp_path)
    assert labels == sorted({row["label"] for row in rows})
    if "photos/train" in names[0]:
        assert ["test", "train"] == [row["split"] for row in rows]


def test_a_folder_of_parts_is_read_in_order_with_the_splits_of_their_names(tmp_path):
    (tmp_path / "data" / "data").mkdir(parents=True)
    for name, count in (("train-00000-of-00002", 2), ("train-00001-of-00002", 1), ("validation-00000-of-00001", 1)):
        table = pyarrow.Table.from_pylist([{"messages": TURNS}] * count)
        parquet.write_table(table, tmp_path / "data" / "data" / f"{name}.parquet")
    _, rows, summary = read(tmp_path / "data", tmp_path, test_fraction=0.0)
    assert [row["id"] for row in rows] == [
        "data/train-00000-of-00002:1",
        "data/train-00000-of-00002:2",
        "data/train-00001-of-00002:1",
        "data/validation-00000-of-00001:1",
    ]
    assert summary["splits"] == {"train": 3, "val": 1, "test": 0}


def test_the_divisions_of_a_saved_data_set_are_splits(tmp_path):
    parts = {"train": 3, "validation": 2, "test": 1}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_list([{"messages": TURNS}] * count) for name, count in parts.items()}
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    _, rows, summary = read(tmp_path / "saved", tmp_path)
    assert summary["splits"] == {"train": 3, "val": 2, "test": 1}
    assert [row["id"] for row in rows][:2] == ["train:1", "train:2"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("Train_sft", "train"),
        ("data/validation-00000-of-00001", "val"),
        ("dev", "val"),
        ("testing", None),
        ("train/valid", "val"),
        ("latest", None),
        ("", None),
    ],
)
def test_a_name_stands_for_a_split_where_its_first_word_is_one(name, split):
    assert split == split_named(name)


def test_without_the_library_an_arrow_data_set_names_the_extra(tmp_path, monkeypatch):
    datasets.Dataset.from_list([{"messages": TURNS}]).save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install -c constraints.txt -e '\.\[datasets\]'"):
        read(tmp_path / "saved", tmp_path)


def test_columns_of_an_older_sequence_become_turns(tmp_path):
    row = {"conversations": {"from": ["human", "gpt"], "value": ["Which?", "This one."]}}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    _, rows, _ = read(tmp_path / "data.jsonl", tmp_path)
    assert [turn["content"][0]["text"] for turn in rows[0]["conversations"]] == ["Which?", "This one."]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.txt": b"hello"},
            "contains neither JSON, Parquet nor CSV files, no Arrow data set and no images; say which",
        ),
        ({"a.jsonl": b"{}", "b.parquet": b""}, "contains JSON files and Parquet files; say which"),
        ({"b.parquet": b"broken"}, "cannot be read as Parquet"),
        ({"state.json": b"{}"}, "cannot be read as an Arrow data set"),
    ],
)
def test_a_folder_that_tells_nothing_says_what_to_do(tmp_path, files, message):
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        (tmp_path / "data" / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "data", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x00\x01", "neither JSON, Parquet nor CSV; say which"),
        ("a.arrow", b"\xff\xff\xff\xff", "name the folder that `save_to_disk` wrote"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "cannot be unpacked as gzip"),
        ("a.zip", b"PK\x03\x04", "compressed; unpack it first"),
    ],
)
def test_a_file_that_tells_nothing_says_what_to_do(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, tmp_path)
    with pytest.raises(DataError, match='format = "image-folder" reads a folder, but this is a file'):
        read(tmp_path / name, tmp_path, format="image-folder")


def test_a_row_of_a_table_is_named_by_its_number(tmp_path):
    rows = [{"messages": TURNS, "split": None}, {"messages": TURNS, "split": "dev"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    with pytest.raises(DataError) as error:
        read(tmp_path / "data.parquet", tmp_path)
    assert str(error.value) == (f"{tmp_path}/data.parquet: row 2: \"split\" must be one of train, val, test, got 'dev'")


def test_equal_ids_are_numbered_on_demand_and_keep_one_split(tmp_path):
    rows = [{"id": f"coco-{place % 50}", "messages": TURNS} for place in range(150)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, written, _ = read(tmp_path / "data.jsonl", tmp_path, duplicate_ids="number", test_fraction=0.5)
    assert [row["id"] for row in written][49:52] == ["coco-49", "coco-0#2", "coco-1#2"]
    assert written[-1]["id"] == "coco-49#3"
    splits = {(row["id"].split("#")[0], row["split"]) for row in written}
    assert len(splits) == 50


def test_images_elsewhere_are_used_where_the_file_says_so(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(cases.png())
    (tmp_path / "data").mkdir()
    rows = [
        {"messages": TURNS, "image": "a.png"},
        {"messages": TURNS, "image": str(tmp_path / "photos" / "a.png")},
        {"messages": TURNS},
    ]
    file = tmp_path / "data" / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(file, tmp_path / "o1")[2]["dropped"] == {"image missing": 1, "image outside the folder": 1}
    assert read(file, tmp_path / "o2", image_root="../photos")[2]["dropped"] == {}
    assert read(file, tmp_path / "o3", allow_outside=True)[2]["dropped"] == {"image missing": 1}
    photo = tmp_path / "photos" / "a.png"
    assert {"a.png": None, str(photo): photo} == Ingest(source=str(file), allow_outside=True).external_files()
