"""`dflow init` and folders of images, and data whose names and texts are odd."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from init_cases import chat, checkpoint, nodes, write_flat_photos, write_photos
from PIL import Image

from dsl.read_toml import read_graph
from executor.cli import main


@pytest.mark.parametrize(
    ("folders", "expected"),
    [([""], False), (["cat"], False), (["train", "val", "test"], True), (["train/cat", "val/cat", "test/cat"], True)],
)
def test_of_images_that_give_no_sample_to_a_split_the_way_to_give_one_is_told_and_is_one(
    project: Path, capsys: pytest.CaptureFixture[str], folders: list[str], expected: bool
) -> None:
    for folder in folders:
        (project / "photos" / folder).mkdir(parents=True)
        Image.new("RGB", (64, 48)).save(project / "photos" / folder / "1.png")
    assert 0 == main(["init", "photos"])
    said = " ".join(capsys.readouterr().out.split())
    way = (
        "reads: move some images to test/<class>/ and all others to train/<class>/ (without classes: test/ and train/)"
    )
    assert (not expected) == (way in said)
    assert expected == ("splits: 1 train, 1 val, 1 test" in said)


@pytest.mark.parametrize("name", ["photos/cat/dead.png", "rows/part-2.jsonl"])
def test_a_link_that_leads_nowhere_is_refused_before_a_file_is_written_that_plan_would_refuse(
    project: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_photos(project)
    (project / "rows").mkdir()
    chat(project / "rows" / "part-1.jsonl", 30)
    link = project / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("/nowhere/file")
    assert 1 == main(["init", name.split("/")[0]])
    said = " ".join(capsys.readouterr().err.split())
    assert f"{name}: cannot be read (No such file or directory)" in said
    assert "a link to /nowhere/file: remove the link, or restore what it leads to" in said
    assert not (project / "pipeline.toml").exists()
    link.unlink()
    assert 0 == main(["init", name.split("/")[0]])


def test_images_beside_folders_of_classes_are_counted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = write_photos(project)
    for place in range(3):
        Image.new("RGB", (64, 48 + place)).save(photos / f"{place}.png")
    assert 0 == main(["init", "photos"])
    said = " ".join(capsys.readouterr().out.split())
    assert "data: 10 samples (image-folder), 10 with images" in said
    assert "dropped: 3 (image beside folders), such as 0.png: move it into one of them, or all images into one" in said


def test_where_more_images_lie_beside_folders_than_in_them_it_is_told_first_which_are_not_used(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_flat_photos(project)
    (photos / "cat").mkdir()
    for place in range(3):
        assert 0 == main(["init", "photos", "--force"])
        said = " ".join(capsys.readouterr().out.split())
        assert (place in (1, 2)) == ("note: most of the images are NOT used: 3 are beside folders" in said), said
        Image.new("RGB", (64, 48 + place)).save(photos / "cat" / f"{place}.png")
    assert 0 == main(["init", "photos", "--force"])
    assert "NOT used" not in capsys.readouterr().out


@pytest.mark.parametrize("below", ["", "a.txt", "deeper/a.txt", ".hidden.png"])
def test_folders_without_images_are_no_classes(project: Path, capsys: pytest.CaptureFixture[str], below: str) -> None:
    other = write_flat_photos(project) / "train" / below
    if below:
        other.parent.mkdir(parents=True)
        other.write_text("none of the images")
    else:
        other.mkdir()
    assert 0 == main(["init", "photos"])
    said = " ".join(capsys.readouterr().out.split())
    assert "data: 3 samples (image-folder), 3 with images" in said
    assert below.endswith(".txt") == (f"dropped: 1 (not an image), such as train/{below}" in said)


@pytest.mark.parametrize("name", ["{}.jpg", "{}.png", "img{}.jpg", "IMG_{:04d}.jpg"])
def test_of_ten_images_most_are_trained_on(project: Path, name: str) -> None:
    (project / "photos").mkdir()
    for place in range(10):
        Image.new("RGB", (64, 48)).save(project / "photos" / name.format(place))
    assert 0 == main(["init", "photos"])
    told = re.search(r"# (\d+) train, (\d+) val, (\d+) test, drawn by hash", (project / "pipeline.toml").read_text())
    assert told is not None
    train, val, test = map(int, told.groups())
    assert train >= 5 and min(val, test) >= 1 and 10 == train + val + test


def test_texts_of_the_data_break_no_comment(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat(project / "chat.jsonl", 30)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "see"}]
    broken = {"id": "ev\x01il\x1b[31m\x7f", "messages": turns, "images": ["../\x07\n[node.x]\ud800.png"]}
    with (project / "chat.jsonl").open("a") as file:
        file.write(json.dumps(broken) + "\n")
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    assert "x" not in nodes(project / "pipeline.toml")
    for text in (capsys.readouterr().out, (project / "pipeline.toml").read_text()):
        assert "ev\\x01il\\x1b[31m\\x7f" in text
        assert [] == [letter for letter in text if letter != "\n" and not letter.isprintable()]


@pytest.mark.parametrize("name", ["${x}", "$${pipeline.seed}", 'a "b" \\n', "ends\n\x7f\x01"])
def test_data_of_any_name_is_found_by_the_file_that_is_written(project: Path, name: str) -> None:
    (project / name).mkdir()
    chat(project / name / "chat.jsonl", 30)
    target = checkpoint(project / "target", sees=False)
    assert 0 == main(["init", name, "--target", target, "--image-root", name])
    graph = read_graph(Path("pipeline.toml"), [], [])
    assert (str(project / name), str(project / name)) == (
        graph.nodes["ingest"].config.source,
        graph.nodes["ingest"].config.image_root,
    )
    nodes(project / "pipeline.toml")


def test_data_whose_name_is_not_utf_8_is_refused_with_what_to_do(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(project / os.fsdecode(b"chat\xff.jsonl"), 30)
    assert 1 == main(["init", os.fsdecode(b"chat\xff.jsonl")])
    assert "chat\\udcff.jsonl: a pipeline file is UTF-8, and this name is not: rename it" in capsys.readouterr().err
    assert not (project / "pipeline.toml").exists()


def test_photos_that_ingest_would_drop_are_counted_not_measured(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pillow warns of more than 89 million pixels, and refuses more than twice as many."""
    write_photos(project / "photos")
    folder = next(path for path in (project / "photos").rglob("*") if path.is_dir())
    for name, side in (("large.png", 12_000), ("larger.png", 16_000)):
        Image.new("1", (side, side)).save(folder / name)
    (folder / "broken.tif").write_bytes(b"II*\0" + b"\xff" * 64)
    assert 0 == main(["init", "photos", "--target", checkpoint(project / "target", sees=True)])
    assert "2 (image too large)" in capsys.readouterr().out


@pytest.mark.parametrize("size", [{"shortest_edge": "a", "longest_edge": 5}, {"shortest_edge": 9, "longest_edge": 5}])
def test_limits_of_pixels_that_are_none_are_named(
    size: object, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_photos(project / "photos")
    target = checkpoint(project / "target", sees=True)
    (project / "target" / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "size": size})
    )
    assert 1 == main(["init", "photos", "--target", target])
    assert "preprocessor_config.json: " in (said := capsys.readouterr().err) and "number of pixels" in said


def test_each_data_file_has_its_image_root(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (project / name).mkdir()
        Image.new("RGB", (64, 48)).save(project / name / f"{name}.png")
        rows = [{"id": f"{name}{n}", "image": f"{name}.png", "prompt": "What?", "completion": "It."} for n in range(20)]
        (project / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    roots = ["--image-root", "one", "--image-root", "two"]
    assert 1 == main(["init", "one.jsonl", "two.jsonl", "three.jsonl", *roots])
    assert "--image-root is given 2 times for 3 of DATA: give one, or one for each" in capsys.readouterr().err
    target = checkpoint(project / "target", sees=True)
    assert 0 == main(["init", "one.jsonl", "two.jsonl", *roots, "--target", target])
    assert "data: 40 samples (json), 40 with images" in capsys.readouterr().out
    config = read_graph(Path("pipeline.toml"), [], []).nodes["ingest"].config
    assert (str(project / "one"), str(project / "two")) == config.image_root
    assert 1 == main(["init", "one.jsonl", "--image-root", "thre", "--force"])
    assert f'image_root = "{project}/thre": there is no folder {project}/thre, where one.png' in capsys.readouterr().err


def test_images_without_a_caption_are_counted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = write_flat_photos(project)
    (photos / "metadata.csv").write_text("file_name,text\n0.png,a small picture\n1.png,another\n")
    assert 0 == main(["init", "photos"])
    said = " ".join(capsys.readouterr().out.split())
    expected = "images: photos: 1 of 3 images are not used, since no row of the captions names them, such as 2.png"
    assert expected in said


def test_one_image_in_the_result_of_a_tool_is_left_in_its_place(project: Path) -> None:
    Image.new("RGB", (64, 48)).save(project / "shot.png")
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    result = [{"type": "image_url", "image_url": {"url": "shot.png"}}]
    tools = [{"type": "function", "function": {"name": "shot"}}]
    rows = [
        {
            "tools": tools,
            "messages": [
                {"role": "user", "content": f"Look at {number}."},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": result},
                {"role": "assistant", "content": "It is black."},
            ],
        }
        for number in range(30)
    ]
    (project / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert 0 == main(["init", "chats.jsonl"])
    written = (project / "pipeline.toml").read_text()
    assert 'image_policy = "in-place"' in written
    assert "30 samples with several images, or with one in a tool's result" in written
