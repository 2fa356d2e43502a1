"""The image goes into the first user turn, after every check that an image can fail."""

import io
import json
import os
from pathlib import Path

import pytest
from fake_stage import FakeStage, folder_digest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import Samples
from ops.inject_images.op import InjectImages
from ops.inject_images.run import checked, inject_images
from ops.lib.data.files import json_line
from ops.lib.data.image_packs import PackWriter
from ops.lib.vision.images import decode, fault_of, strict_pillow

ASK = {"role": "user", "text": "What is it?"}
ANSWER = {"role": "assistant", "text": "A cat."}

HERE, SAID = {"type": "image"}, {"type": "text", "text": "Which?"}


def encoded(size=(4, 3), color=(200, 10, 30), file_format="PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, format=file_format, **options)
    return file.getvalue()


def in_parts(turns: list[dict], num_images: int) -> list[dict]:
    """Turns as ingest writes them: a text is one part, and where no turn has parts the images stand in the first."""
    rows = [{**turn, "content": turn.get("content") or [{"type": "text", "text": turn["text"]}]} for turn in turns]
    if not any("content" in turn for turn in turns):
        rows[0]["content"] = [{"type": "image"}] * num_images + rows[0]["content"]
    return [{name: row[name] for name in ("role", "content")} for row in rows]


def reason_to_drop(data: bytes, max_pixels: int, min_side: int) -> str:
    with strict_pillow():
        return fault_of(data, max_pixels, min_side)[0]


def run_inject(folder: Path, samples: list[dict], **config) -> tuple[FakeStage, list[dict], dict]:
    """Inject samples given as {"images": [bytes], "turns": [...]}; the stage, the rows written and the summary."""
    source = folder / "samples"
    source.mkdir(parents=True)
    packs = PackWriter(source)
    rows = []
    for place, sample in enumerate(samples):
        references = [packs.add(image) for image in sample.get("images", [])]
        rows.append(
            {
                "id": f"s{place}",
                "split": "train",
                "category": "image" if references else "text",
                "conversations": in_parts(sample.get("turns", [ASK, ANSWER]), len(references)),
                "images": references,
            }
        )
    (source / "samples.jsonl").write_text("".join(json_line(row) for row in rows), encoding="utf-8")
    stage = FakeStage(folder, {"samples": Samples(path=source, digest="d")})
    inject_images(InjectImages(samples=Ref("ingest"), **config), stage)
    written = [json.loads(line) for line in (stage.out_dir / "samples.jsonl").read_text("utf-8").split("\n")[:-1]]
    return stage, written, json.loads((stage.out_dir / "summary.json").read_text())


def test_the_image_stands_before_the_text_of_the_first_user_turn_only(tmp_path):
    turns = [{"role": "system", "text": "Be brief."}, ASK, ANSWER, {"role": "user", "text": "Sure?"}, ANSWER]
    image = encoded()
    stage, written, summary = run_inject(tmp_path, [{"images": [image], "turns": turns}])
    assert written[0]["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    assert set(written[0]) == {"id", "split", "category", "messages", "images"}
    assert summary == {"in": 1, "kept": 1, "dropped": {}, "splits": {"train": 1, "val": 0, "test": 0}}
    assert stage.logged == [({"inject/kept": 1, "inject/dropped": 0}, 0)]


def test_a_text_only_sample_gets_plain_messages(tmp_path):
    _, written, _ = run_inject(tmp_path, [{}])
    assert written[0]["images"] == []
    assert written[0]["messages"][0] == {"role": "user", "content": [{"type": "text", "text": "What is it?"}]}


def test_line_separators_of_unicode_inside_a_text_end_no_line(tmp_path):
    text = "one\u2028two\x85three\x0bfour"
    _, written, _ = run_inject(tmp_path, [{"turns": [ASK, {"role": "assistant", "text": text}]}])
    assert written[0]["messages"][1]["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"images": [b"no image at all"]}, "image undecodable"),
        ({"images": [encoded((30, 30))[:-30]]}, "image undecodable"),
        ({"images": [b""]}, "image undecodable"),
        ({"images": [encoded((33, 31))]}, "image too large"),
        ({"images": [encoded((1, 8))]}, "image too small"),
        ({"images": [encoded(), encoded((5, 5))]}, "more than one image"),
        ({"images": [encoded()], "turns": [ANSWER]}, "image but no user turn"),
        ({"images": [encoded()], "turns": [{"role": "user", "content": [SAID]}]}, "placeholders and images differ"),
        (
            {"images": [encoded()], "turns": [ASK, ANSWER, {"role": "user", "content": [HERE]}]},
            "a turn of nothing but an image",
        ),
        (
            {"images": [encoded()], "turns": [ASK, ANSWER, {"role": "tool", "content": [SAID, HERE]}, ANSWER]},
            "image in a tool result",
        ),
    ],
)
def test_an_image_at_fault_is_dropped_with_its_reason(tmp_path, sample, reason):
    _, written, summary = run_inject(tmp_path, [{}, sample], max_image_pixels=1000)
    assert [row["id"] for row in written] == ["s0"]
    assert summary["dropped"] == {reason: 1}


def test_size_is_checked_from_the_header_before_anything_is_decoded():
    broken = bytearray(encoded((40, 40)))
    broken[60:] = b""
    assert reason_to_drop(bytes(broken), max_pixels=1599, min_side=2) == "image too large"
    assert reason_to_drop(bytes(broken), max_pixels=1600, min_side=2) == "image undecodable"


def test_a_decompression_bomb_is_too_large_whatever_the_limit(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert reason_to_drop(encoded((12, 12)), max_pixels=10**9, min_side=1) == "image too large"  # Pillow warns
    assert reason_to_drop(encoded((20, 20)), max_pixels=10**9, min_side=1) == "image too large"  # Pillow raises


@given(cut=st.integers(0, 2000), flips=st.dictionaries(st.integers(0, 2000), st.integers(1, 255), max_size=5))
@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_whatever_the_bytes_the_answer_is_a_reason_or_a_decodable_image(file_format, cut, flips):
    data = bytearray(encoded((24, 16), file_format=file_format))
    for place, change in flips.items():
        data[place % len(data)] ^= change
    data = bytes(data[: len(data) - cut % len(data)])
    reason = reason_to_drop(data, max_pixels=10_000, min_side=2)
    assert reason in ("", "image undecodable", "image too large", "image too small")
    if not reason:
        with strict_pillow():
            assert decode(data).mode == "RGB"


TALK = [
    {"role": "user", "content": [SAID, HERE, {"type": "text", "text": "or this"}, HERE]},
    ANSWER,
    {"role": "user", "content": [HERE]},
    ANSWER,
]


def test_several_images_stay_in_place_on_demand(tmp_path):
    images = [encoded((4 + place, 4)) for place in range(3)]
    samples = [{"images": images, "turns": TALK}, {}]
    _, written, summary = run_inject(tmp_path / "a", samples, image_policy="in-place")
    assert [turn["content"] for turn in written[0]["messages"]][::2] == [TALK[0]["content"], TALK[2]["content"]]
    assert [image["size"] for image in written[0]["images"]] == [len(image) for image in images]
    assert summary["kept"] == 2
    stage, _, summary = run_inject(tmp_path / "b", samples)
    assert summary["dropped"] == {"more than one image": 1}
    table = (stage.out_dir / "dropped.csv").read_text().splitlines()
    assert table[1] == 's0,more than one image,"3 images; image_policy = ""in-place"" keeps them"'


def test_one_image_moves_to_the_first_user_turn_and_stays_in_place_on_demand(tmp_path):
    turns = [{"role": "user", "content": [SAID]}, ANSWER, {"role": "user", "content": [SAID, HERE]}, ANSWER]
    sample = {"images": [encoded()], "turns": turns}
    _, moved, _ = run_inject(tmp_path / "a", [sample])
    assert [turn["content"] for turn in moved[0]["messages"]][::2] == [[HERE, SAID], [SAID]]
    _, stayed, _ = run_inject(tmp_path / "b", [sample], image_policy="in-place")
    assert [turn["content"] for turn in stayed[0]["messages"]][::2] == [[SAID], [SAID, HERE]]


@pytest.mark.parametrize("policy", ["first-user-turn", "in-place"])
def test_no_texts_stand_side_by_side(tmp_path, policy):
    parts = [SAID, SAID, HERE, SAID, SAID] if policy == "in-place" else [SAID, SAID, SAID, SAID]
    sample = {"turns": [{"role": "user", "content": parts}, ANSWER], "images": [encoded()][: parts.count(HERE)]}
    _, written, _ = run_inject(tmp_path, [sample], image_policy=policy)
    twice = {"type": "text", "text": "Which?Which?"}
    four = {"type": "text", "text": "Which?Which?Which?Which?"}
    assert written[0]["messages"][0]["content"] == ([twice, HERE, twice] if policy == "in-place" else [four])


def test_one_broken_image_of_several_drops_the_sample(tmp_path):
    sample = {"images": [encoded((4, 4)), encoded((5, 5)), b"broken"], "turns": TALK}
    assert run_inject(tmp_path, [{}, sample], image_policy="in-place")[2]["dropped"] == {"image undecodable": 1}


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path):
    kinds = [encoded((20, 20)), b"broken", encoded((9, 90), file_format="JPEG"), encoded((1, 5)), encoded((60, 60))]
    samples = [{"images": [kinds[place % 5] + b"x" * (place % 7)]} if place % 4 else {} for place in range(120)]
    digests = set()
    for workers in (1, 2, 7, None):
        stage, written, summary = run_inject(tmp_path / str(workers), samples, max_image_pixels=3000, workers=workers)
        assert len(written) + sum(summary["dropped"].values()) == summary["in"] == 120
        assert stage.progressed[-1] == (120, 120)
        digests.add(folder_digest(stage.out_dir))
    assert len(digests) == 1
    assert set(summary["dropped"]) == {"image undecodable", "image too small", "image too large"}


def test_rows_are_checked_a_bounded_number_ahead(tmp_path):
    taken = []

    def rows():
        for place in range(1000):
            taken.append(place)
            yield {"id": str(place), "conversations": [], "images": []}

    found = checked(rows(), InjectImages(samples=Ref("ingest"), workers=2), tmp_path)
    assert next(found)[0]["id"] == "0"
    assert len(taken) == 5
    assert [row["id"] for row, _ in found] == [str(place) for place in range(1, 1000)]


def test_packs_are_hard_linked_and_copied_where_that_fails(tmp_path, monkeypatch):
    stage, _, _ = run_inject(tmp_path / "a", [{"images": [encoded()]}])
    assert (stage.out_dir / "images-00000.bin").stat().st_nlink == 2

    def refuse(*paths):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied, _, _ = run_inject(tmp_path / "b", [{"images": [encoded()]}])
    assert (copied.out_dir / "images-00000.bin").stat().st_nlink == 1
    assert folder_digest(stage.out_dir) == folder_digest(copied.out_dir)


@given(kinds=st.lists(st.sampled_from([b"broken", encoded(), None]), max_size=12))
def test_kept_and_dropped_add_up(tmp_path_factory, kinds):
    samples = [{}, *({"images": [kind]} if kind else {} for kind in kinds)]
    _, written, summary = run_inject(tmp_path_factory.mktemp("rows"), samples)
    assert summary["in"] == len(samples)
    assert summary["kept"] == len(written) == len(samples) - kinds.count(b"broken")
    assert sum(summary["dropped"].values()) == kinds.count(b"broken")


def test_more_drops_than_allowed_or_nothing_left_fail(tmp_path):
    broken = {"images": [b"broken"]}
    with pytest.raises(DataError, match=r"max_dropped = 1 .*:\n +2  image undecodable \(first: sample \"s1\"\)"):
        run_inject(tmp_path / "a", [{}, broken, broken], max_dropped=1)
    with pytest.raises(DataError, match="no sample is left of 1"):
        run_inject(tmp_path / "b", [broken])
