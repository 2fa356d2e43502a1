"""The files behind samples: packs of images, and what of the user's files enters the key."""

import json
import os
import shutil
from pathlib import Path

import datasets
import pytest
from fake_stage import FakeStage
from own_samples import GOOD, run_ingest, write_source

from dsl.errors import DataError
from executor.keys.external_inputs import ExternalDigests
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.ingest.source import parts_of
from ops.lib.data.image_packs import MAX_IMAGE_BYTES, PackWriter, read_packed


def test_a_link_inside_the_folder_is_followed(tmp_path):
    (tmp_path / "real.png").write_bytes(b"x")
    (tmp_path / "link.png").symlink_to(tmp_path / "real.png")
    _, written, _ = run_ingest(tmp_path, [{**GOOD, "image": "link.png"}])
    assert written[0]["images"][0]["size"] == 1


def test_a_folder_of_linked_files_is_read_with_allow_outside_and_its_mistake_says_so(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "data").mkdir()
    for name, row in (("train", {**GOOD, "image": "a.png"}), ("val", GOOD)):
        (tmp_path / "cache" / name).write_text(json.dumps(row))
        (tmp_path / "data" / f"{name}.jsonl").symlink_to(f"../cache/{name}")
    (tmp_path / "cache" / "1f").write_bytes(b"an image")
    (tmp_path / "data" / "a.png").symlink_to("../cache/1f")
    with pytest.raises(
        DataError, match=r"train\.jsonl: is a link that leads out of .* set allow_outside = true"
    ) as found:
        ingest(Ingest(source=str(tmp_path / "data"), seed=0), FakeStage(tmp_path / "without"))
    assert "(dflow init: --allow-outside)" in str(found.value)
    stage = FakeStage(tmp_path / "with")
    config = Ingest(source=str(tmp_path / "data"), seed=0, allow_outside=True)
    ingest(config, stage)
    rows = [json.loads(line) for line in (stage.out_dir / "samples.jsonl").read_text().splitlines()]
    assert [("train:1", "train", 1), ("val:1", "val", 0)] == [
        (row["id"], row["split"], len(row["images"])) for row in rows
    ]
    before = ExternalDigests(None).of(tmp_path / "data"), ExternalDigests(None).of(config.external_files())
    (tmp_path / "cache" / "train").write_text(json.dumps({**GOOD, "image": "a.png", "label": "cat"}))
    (tmp_path / "cache" / "1f").write_bytes(b"another image")
    after = ExternalDigests(None).of(tmp_path / "data"), ExternalDigests(None).of(config.external_files())
    assert [True, True] == [old != new for old, new in zip(before, after, strict=True)]


def test_an_arrow_data_set_of_links_is_read_with_allow_outside(tmp_path):
    datasets.Dataset.from_list([{"prompt": "What?", "completion": "That."}]).save_to_disk(tmp_path / "cache")
    (tmp_path / "data").mkdir()
    for file in (tmp_path / "cache").iterdir():
        (tmp_path / "data" / file.name).symlink_to(file)
    with pytest.raises(DataError, match="is no file or folder beside it"):
        list(parts_of(tmp_path / "data", "arrow"))
    (part,) = parts_of(tmp_path / "data", "arrow", allow_outside=True)
    assert ["What?"] == [record.row["prompt"] for record in part.records()]


def test_equal_images_are_stored_once_and_a_full_pack_is_followed_by_the_next(tmp_path):
    packs = PackWriter(tmp_path, pack_bytes=10)
    images = [b"aaaa", b"bbbbbb", b"aaaa", b"cc", b"d" * 30]
    references = [packs.add(image) for image in images]
    assert [(row["pack"], row["offset"], row["size"]) for row in references] == [
        ("images-00000.bin", 0, 4),
        ("images-00000.bin", 4, 6),
        ("images-00000.bin", 0, 4),
        ("images-00001.bin", 0, 2),
        ("images-00002.bin", 0, 30),
    ]
    assert [read_packed(tmp_path, reference) for reference in references] == images
    assert (tmp_path / "images-00000.bin").read_bytes() == b"aaaabbbbbb"


def test_a_pack_that_was_cut_is_noticed(tmp_path):
    reference = PackWriter(tmp_path).add(b"abcdef")
    (tmp_path / "images-00000.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="ends before image"):
        read_packed(tmp_path, reference)


def test_external_files_are_the_images_inside_the_folder_and_broken_lines_are_passed_over(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    for name in ("data/a.png", "data/sub/b.png", "secret.png"):
        (tmp_path / name).write_bytes(b"x")
    source = write_source(
        folder,
        [
            {**GOOD, "image": ["sub/b.png", "a.png"]},
            "{ broken",
            "[]",
            {"image": "a.png"},
            {**GOOD, "image": "../secret.png"},
            {**GOOD, "image": "absent.png"},
            {**GOOD, "image": 3},
            GOOD,
        ],
    )
    assert Ingest(source=source).external_files() == {
        "sub/b.png": folder / "sub/b.png",
        "a.png": folder / "a.png",
        "../secret.png": None,
        "absent.png": None,
    }
    assert Ingest(source=str(tmp_path / "absent.jsonl")).external_files() == {}


def external_digest(folder: Path, **config) -> str:
    return ExternalDigests(None).of(Ingest(source=str(folder / "data.jsonl"), **config).external_files())


@pytest.mark.parametrize("config", [{}, {"image_root": "sub"}, {"allow_outside": True}], ids=str)
def test_the_key_sees_which_name_an_image_has_and_not_where_the_folder_lies(tmp_path, config):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    write_source(folder, [{**GOOD, "image": name} for name in ("a.png", "b.png")])
    images = folder / config.get("image_root", "")
    (images / "a.png").write_bytes(b"x")
    first = external_digest(folder, **config)
    shutil.copytree(folder, tmp_path / "moved")
    assert first == external_digest(tmp_path / "moved", **config)
    (images / "a.png").rename(images / "b.png")
    renamed = external_digest(folder, **config)
    (images / "a.png").write_bytes(b"x")
    both = external_digest(folder, **config)
    (images / "b.png").write_bytes(b"y")
    assert len({first, renamed, both, external_digest(folder, **config)}) == 4


def test_links_that_are_exchanged_are_seen_by_the_key(tmp_path):
    write_source(tmp_path, [{**GOOD, "image": name} for name in ("a.png", "b.png")])
    digests = set()
    for turn, order in enumerate(("xy", "yx")):
        for name, content in zip(("a.png", "b.png"), order, strict=True):
            (tmp_path / content).write_text(content)
            (tmp_path / f"{turn}{name}").symlink_to(tmp_path / content)
            (tmp_path / f"{turn}{name}").rename(tmp_path / name)
        digests.add(external_digest(tmp_path))
    assert len(digests) == 2


def test_the_builtin_sample_is_keyed_by_the_files_that_hold_its_data():
    files = Ingest(source="builtin:digits").external_files()
    assert {name: file.name for name, file in files.items()} == {"digits": "digits.csv.gz", "prose": "topics.py"}
    assert all(file.is_file() for file in files.values())


def test_an_image_file_above_the_limit_drops_its_sample_and_is_not_read(tmp_path):
    for name, size in (("fits.png", MAX_IMAGE_BYTES), ("large.png", MAX_IMAGE_BYTES + 1)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size if name == "large.png" else 5)
    rows = [{**GOOD, "image": "fits.png"}, {**GOOD, "image": "large.png"}]
    stage, written, summary = run_ingest(tmp_path, rows)
    assert [5] == [row["images"][0]["size"] for row in written]
    assert summary["dropped"] == {"image file too large": 1}
    assert 5 == sum(pack.stat().st_size for pack in stage.out_dir.glob("images-*.bin"))
    table = (stage.out_dir / "dropped.csv").read_text().splitlines()
    assert (
        table[1]
        == '2,image file too large,"large.png: 268435457 bytes, more than 268435456; write it as a smaller JPEG or PNG"'
    )
