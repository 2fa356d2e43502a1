"""What a sample may hold: what is dropped and why, and where its texts and images stand behind `inject_images`."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import format_cases as cases
import pytest
from format_reading import TURNS, inject, read
from PIL import Image

from dsl.errors import DataError
from ops.artifacts import Samples

IMAGE_PART = {"type": "image", "image": base64.b64encode(cases.png((20, 20))).decode()}
DROPPED = [
    ({"messages": TURNS, "video": "a.mp4"}, "videos are not supported"),
    ({"messages": TURNS, "videos": ["a.mp4"]}, "videos are not supported"),
    ({"messages": [{"role": "user", "content": "<video>\nWhat?"}, TURNS[1]]}, "videos are not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}, TURNS[1]]},
     "videos are not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}, TURNS[1]]},
     "videos are not supported"),
    ({"messages": TURNS, "image": "data:video/mp4;base64,AAAA"}, "videos are not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, TURNS[1]]},
     "audio is not supported"),
    ({"messages": TURNS, "audios": ["a.wav"]}, "audio is not supported"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
     "a tool call has no name"),
    ({"messages": [*TURNS, {"role": "tool", "content": "5"}]}, "a tool result without a call"),
    ({"messages": TURNS, "tools": [{"type": "web_search"}]}, "a tool that is no function"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}, TURNS[1]]}, "unknown content part"),
    ({"messages": TURNS, "image": "https://example.com/a.png"}, "image behind a URL"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x/a"}]}, TURNS[1]]},
     "image behind a URL"),
    ({"messages": TURNS, "image": "data:image/png;base64,iVBORw0KGgo!"}, "image undecodable"),
    ({"messages": TURNS, "image": "data:image/svg+xml,%3Csvg%3E"}, "image undecodable"),
    ({"messages": TURNS, "image": "/9j/" + "A" * 301}, "image undecodable"),
    ({"messages": TURNS, "image": {"base64": "%%%"}}, "image undecodable"),
    ({"messages": TURNS, "image": {"path": "data:image/png,x"}}, "image undecodable"),
    ({"messages": TURNS, "image": {"bytes": None, "path": "gone.png"}}, "image missing"),
    ({"messages": [{"role": "user", "content": "<image> and <image>"}, TURNS[1]], "image": "a.png"},
     "placeholders and images differ"),
    ({"messages": [{"role": "user", "content": "<image>\nWhat?"}, TURNS[1]]}, "placeholders and images differ"),
    ({"messages": [{"role": "user", "content": [IMAGE_PART]}, TURNS[1]], "images": ["a.png"]},
     "placeholders and images differ"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "<image>\nWhat?"}]}, TURNS[1]]},
     "placeholders and images differ"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "<video>\nWhat?"}]}, TURNS[1]]},
     "videos are not supported"),
    ({"messages": [TURNS[0], {"role": "assistant", "content": [IMAGE_PART]}]}, "image in an answer"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}, TURNS[1]]}, "empty text"),
    ({"messages": [TURNS[0], {**TURNS[1], "reasoning_content": "\ud800"}]}, "invalid text"),
]  # fmt: skip


def test_samples_that_cannot_be_used_are_dropped_and_counted_and_told_in_a_table(tmp_path):
    (tmp_path / "a.png").write_bytes(cases.png())
    rows = [{"messages": TURNS}, *(row for row, _ in DROPPED)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage, written, summary = read(tmp_path / "data.jsonl", tmp_path)
    table = (stage.out_dir / "dropped.csv").read_text("utf-8").splitlines()
    assert [row["id"] for row in written] == ["1"]
    assert [reason for _, reason in DROPPED] == [line.split(",")[1] for line in table[1:]]
    assert summary["kept"] + sum(summary["dropped"].values()) == summary["in"] == len(rows)
    assert str(tmp_path) not in "".join(table)  # the same account wherever the data lie


@pytest.mark.parametrize("image", [None, "", [], [None], {"bytes": None, "path": None}])
def test_an_empty_column_of_images_is_a_sample_of_text(tmp_path, image):
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": TURNS, "image": image, "images": None}) + "\n")
    _, rows, _ = read(tmp_path / "data.jsonl", tmp_path)
    assert [(row["category"], row["images"]) for row in rows] == [("text", [])]


def test_a_file_of_videos_says_that_they_are_not_supported(tmp_path):
    (tmp_path / "data.jsonl").write_text((json.dumps({"messages": TURNS, "video": "a.mp4"}) + "\n") * 3)
    with pytest.raises(DataError, match=r"no sample is left of 3:\n +3  videos are not supported"):
        read(tmp_path / "data.jsonl", tmp_path)


def test_what_an_assistant_thought_is_kept_as_a_key_of_its_own(tmp_path):
    turns = [{"role": "developer", "content": "Think."}, TURNS[0], {**TURNS[1], "reasoning_content": "Hm, that."}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns, "system": "not used"}) + "\n")
    stage, _, _ = read(tmp_path / "data.jsonl", tmp_path / "a")
    samples = inject(stage.artifact(Samples), tmp_path / "b")
    row = json.loads((samples.path / "samples.jsonl").read_text())
    assert [turn["role"] for turn in row["messages"]][-3:] == ["system", "user", "assistant"]
    assert [turn.get("reasoning_content") for turn in row["messages"]][-2:] == [None, "Hm, that."]


def test_parts_name_the_images_of_the_row_by_index_and_texts_are_joined(tmp_path):
    names = ["a.png", "b.png"]
    for place, name in enumerate(names):
        Image.new("RGB", (10 + place, 10)).save(tmp_path / name)
    content = [
        {"type": "text", "text": " Second "},
        {"type": "text", "text": "first: "},
        {"type": "image", "index": 1},
        {"type": "image", "index": 0},
    ]
    row = {"system": "Look.", "messages": [{"role": "user", "content": content}, TURNS[1]], "images": names}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    _, rows, _ = read(tmp_path / "data.jsonl", tmp_path)
    sizes = [(tmp_path / name).stat().st_size for name in ("b.png", "a.png")]
    assert sizes == [image["size"] for image in rows[0]["images"]]
    assert rows[0]["conversations"][:2] == [
        {"role": "system", "content": [{"type": "text", "text": "Look."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": " Second first: "}, {"type": "image"}, {"type": "image"}],
        },
    ]


def content_of(tmp_path: Path, user: str | list[dict], answer: str = "This one.", count: int = 0, **config) -> list:
    """The content of the user's and the assistant's turn behind inject, of a sample with `count` images."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "a.png").write_bytes(cases.png())
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns, "images": ["a.png"] * count}) + "\n")
    stage, _, _ = read(tmp_path / "data.jsonl", tmp_path / "ingest")
    samples = inject(stage.artifact(Samples), tmp_path / "inject", **config)
    row = json.loads((samples.path / "samples.jsonl").read_text("utf-8"))
    return [[part.get("text", IMAGE) for part in turn["content"]] for turn in row["messages"]]


IMAGE = "an image"


@pytest.mark.parametrize(
    ("text", "in_place", "moved"),
    [
        ("Compare this:\n<image>\nwith a cat", ["Compare this:\n", IMAGE, "\nwith a cat"], "Compare this:\nwith a cat"),
        ("Compare this:<image>with a cat", ["Compare this:", IMAGE, "with a cat"], "Compare this:\nwith a cat"),
        ("<image>\nWhat?", [IMAGE, "What?"], "What?"),
        ("What?\n<image>", ["What?", IMAGE], "What?"),
        ("What?\r\n<image>\r\n", ["What?", IMAGE], "What?"),
        ("\n<image>\n  x = 1\n", [IMAGE, "  x = 1\n"], "  x = 1\n"),
    ],
)
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_line_break_stands_where_an_image_leaves_from_between_two_texts(tmp_path, text, in_place, moved, as_parts):
    user = [{"type": "text", "text": text}] if as_parts else text
    assert content_of(tmp_path / "a", user, count=1, image_policy="in-place") == [in_place, ["This one."]]
    assert content_of(tmp_path / "b", user, count=1) == [[IMAGE, moved], ["This one."]]


def test_images_in_a_row_keep_the_line_breaks_that_stand_between_texts_alone(tmp_path):
    text = "<image>\n<image>\nFirst\n\nthen <image>\n<image> and\n<image>"
    expected = [IMAGE, IMAGE, "First\n\nthen ", IMAGE, "\n", IMAGE, " and", IMAGE]
    assert expected == content_of(tmp_path, text, count=5, image_policy="in-place")[0]


def test_an_image_part_between_texts_leaves_a_line_break(tmp_path):
    parts = [{"type": "text", "text": "Is"}, {"type": "image"}, {"type": "text", "text": "a cat?"}]
    assert [IMAGE, "Is\na cat?"] == content_of(tmp_path, parts, count=1)[0]


@pytest.mark.parametrize(
    ("user", "answer", "expected"),
    [
        ("  Go on:\n\n", "    return x\n", ["  Go on:\n\n", "    return x"]),
        ("Write it", "\n<image>\nis a tag", ["Write it", "\n<image>\nis a tag"]),
    ],
)
def test_texts_keep_their_white_space_but_for_that_behind_an_answer(tmp_path, user, answer, expected):
    assert [[text] for text in expected] == content_of(tmp_path, user, answer)
