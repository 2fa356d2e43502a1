"""Own JSONL files: every kind of bad input, the account of what was dropped, splits and packs."""

import hashlib
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from fake_stage import FakeStage
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import DataError
from executor.external import ExternalDigests
from ops.ingest.op import Ingest
from ops.ingest.quotas import quotas
from ops.ingest.run import MAX_IMAGE_BYTES, ingest
from ops.vision.packs import PackWriter, read_packed

ANSWER = {"role": "assistant", "text": "A cat."}
ASK = {"role": "user", "text": "What is it?"}
GOOD = {"conversations": [ASK, ANSWER]}


def turn_row(turn: dict, num_images: int = 0) -> dict:
    """A turn of one text as samples.jsonl holds it."""
    content = [*[{"type": "image"}] * num_images, {"type": "text", "text": turn["text"]}]
    return {"role": turn["role"], "content": content}


def write_source(folder: Path, rows: list) -> str:
    """A source of objects (written as JSON) and strings (written as they are)."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / "data.jsonl")


def run_ingest(folder: Path, rows: list, **config) -> tuple[FakeStage, list[dict], dict]:
    """The stage, the samples written and the summary."""
    stage = FakeStage(folder)
    ingest(Ingest(source=write_source(folder, rows), seed=0, **config), stage)
    lines = (stage.out_dir / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return stage, [json.loads(line) for line in lines], json.loads((stage.out_dir / "summary.json").read_text())


def test_samples_are_written_with_roles_text_split_and_image(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/7.png").write_bytes(b"not checked here")
    rows = [
        {"id": "a", "split": "val", "image": "cats/7.png", "conversations": [ASK, ANSWER]},
        {"split": "train", "conversations": [{"role": "system", "text": " Be brief.\n"}, ASK, ANSWER]},
    ]
    stage, written, summary = run_ingest(tmp_path, rows)
    reference = {
        "sha256": hashlib.sha256(b"not checked here").hexdigest(),
        "pack": "images-00000.bin",
        "offset": 0,
        "size": 16,
    }
    assert written == [
        {
            "id": "a",
            "split": "val",
            "category": "image",
            "conversations": [turn_row(ASK, num_images=1), turn_row(ANSWER)],
            "images": [reference],
        },
        {
            "id": "2",
            "split": "train",
            "category": "text",
            "conversations": [turn_row({"role": "system", "text": " Be brief.\n"}), turn_row(ASK), turn_row(ANSWER)],
            "images": [],
        },
    ]
    assert summary == {"in": 2, "kept": 2, "dropped": {}, "splits": {"train": 1, "val": 1, "test": 0}}
    assert stage.logged == [({"ingest/kept": 2, "ingest/dropped": 0}, 0)]
    assert (stage.out_dir / "images-00000.bin").read_bytes() == b"not checked here"


def test_llava_spelling_is_read_and_its_image_markers_removed(tmp_path):
    (tmp_path / "x.png").write_bytes(b"x")
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    _, written, _ = run_ingest(tmp_path, [{"id": 7, "image": ["x.png"], "conversations": turns}])
    assert written[0]["id"] == "7"
    assert written[0]["conversations"] == [turn_row(ASK, num_images=1), turn_row(ANSWER)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": []}, "no turns"),
        ({"conversations": [ASK, {"role": "robot", "text": "hm"}, ANSWER]}, "unknown role"),
        ({"conversations": [{"role": "user", "text": "  "}, ANSWER]}, "empty text"),
        ({"conversations": [{"role": "user", "text": "\ud800"}, ANSWER]}, "invalid text"),
        ({**GOOD, "label": "\ud800"}, "invalid text"),
        ({"conversations": [ANSWER, ASK, ANSWER]}, "starts with the assistant"),
        ({"conversations": [{"role": "system", "text": "Hm"}, ANSWER]}, "starts with the assistant"),
        ({"conversations": [ASK]}, "no answer"),
        ({**GOOD, "image": "absent.png"}, "image missing"),
        ({**GOOD, "image": "."}, "image missing"),
        ({**GOOD, "image": "a\u0000b"}, "image missing"),
        ({**GOOD, "image": "n" * 5000}, "image missing"),
        ({**GOOD, "image": "loop.png"}, "image missing"),
        ({**GOOD, "image": "../secret.png"}, "image outside the folder"),
        ({**GOOD, "image": "link.png"}, "image outside the folder"),
        ({**GOOD, "image": "/etc/hostname"}, "image outside the folder"),
        ({**GOOD, "image": ["inside.png", "../secret.png"]}, "image outside the folder"),
    ],
)
def test_a_sample_at_fault_is_dropped_with_its_reason(tmp_path, row, reason):
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "inside.png").write_bytes(b"x")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    stage, written, summary = run_ingest(folder, [GOOD, row])
    assert [sample["id"] for sample in written] == ["1"]
    assert summary["dropped"] == {reason: 1}
    assert stage.logged == [({"ingest/kept": 1, "ingest/dropped": 1}, 0)]


def test_an_image_that_cannot_be_read_is_dropped(tmp_path, monkeypatch):
    (tmp_path / "x.png").write_bytes(b"x")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    _, written, summary = run_ingest(tmp_path, [GOOD, {**GOOD, "image": "x.png"}])
    assert [sample["id"] for sample in written] == ["1"]
    assert summary["dropped"] == {"image unreadable": 1}


def test_a_link_inside_the_folder_is_followed(tmp_path):
    (tmp_path / "real.png").write_bytes(b"x")
    (tmp_path / "link.png").symlink_to(tmp_path / "real.png")
    _, written, _ = run_ingest(tmp_path, [{**GOOD, "image": "link.png"}])
    assert written[0]["images"][0]["size"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"conversations": [', "broken JSON at column 20: Expecting value"),
        ("[1]", "expected an object, got list"),
        ('{"text": "hm"}', 'no list "conversations"'),
        ('{"conversations": ["hm"]}', "conversations[0]: expected an object, got str"),
        ('{"conversations": [{"text": "hm"}]}', 'conversations[0]: no string "role" (or "from")'),
        (
            '{"conversations": [{"role": "user", "text": 1}]}',
            "conversations[0]: expected a text or a list of parts, got int",
        ),
        ('{"conversations": [{"role": "user"}]}', 'conversations[0]: no "content" (or "text", "value")'),
        ('{"messages": [{"role": "user", "content": [3]}]}', "messages[0].content[0]: expected an object, got int"),
        ('{"messages": [{"role": "user", "content": [{"x": 1}]}]}', 'messages[0].content[0]: no string "type"'),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            'messages[0].content[0]: no string "text"',
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "image": 5}]}]}',
            'messages[0].content[0]: its image must be a path, bytes, base64 or {"url": ...}',
        ),
        ('{"conversations": [], "image": "a", "images": ["b"]}', 'both "image" and "images": give one of them'),
        ('{"conversations": [], "system": 1}', '"system" must be a string'),
        ('{"conversations": [], "image": 7}', '"image" must be a path, bytes, base64 or null, or a list of them'),
        ('{"conversations": [], "imgae": "x.png"}', 'unknown key "imgae" (did you mean "image"?)'),
        ('{"conversations": [], "img": ["x.png"]}', 'unknown key "img" (did you mean "image"?)'),
        ('{"conversations": [], "split_name": "test"}', 'unknown key "split_name" (did you mean "split"?)'),
        ('{"message": [{"role": "user"}]}', 'no list "conversations" (or "messages")'),
        ('{"conversations": [], "split": "dev"}', "\"split\" must be one of train, val, test, got 'dev'"),
        ('{"conversations": [], "split": ["train"]}', "\"split\" must be one of train, val, test, got ['train']"),
        ('{"conversations": [], "id": 1.5}', '"id" must be a string or an integer, got 1.5'),
        ('{"conversations": [], "id": "\\ud800"}', '"id" holds half a surrogate pair'),
        ("[" * 100_000, "broken JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_malformed_line_is_named_with_file_and_line(tmp_path, line, message):
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path, [GOOD, "", line])
    assert str(error.value).startswith(f"{tmp_path}/data.jsonl:3: {message}")


def test_other_columns_of_a_data_set_are_no_mistakes(tmp_path):
    columns = {"image_id": 7, "idx": 3, "uid": "u", "image_size": [3, 4], "message": "hm", "split_name": None}
    assert run_ingest(tmp_path, [{**GOOD, **columns, "image_path": "somewhere"}])[2]["kept"] == 1


def test_a_column_that_could_be_a_misspelt_key_is_none_where_that_key_is_given(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"x")
    row = {"system": "Look.", "split": "train", **GOOD}
    named = {"image_id": "a.png", "image_path": "a.png", "image_file": "a.png", "systems": "s", "split_name": "test"}
    others = {**named, "conversation": [ASK, ANSWER], "image_url": "https://example.com/a.png"}
    rows = [{**row, "image": "x.png", **others}, {**row, "images": ["x.png"], **others}]
    assert run_ingest(tmp_path / "a", rows)[2]["in"] == 2
    for key in ("image_path", "image_file"):
        with pytest.raises(DataError, match=f'unknown key "{key}" .did you mean "image"'):
            run_ingest(tmp_path / key, [{**row, "image": None, key: "a.png"}])


def test_text_that_is_not_utf8_is_named_with_file_and_line(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"id": "\xff"}\n')
    with pytest.raises(DataError) as error:
        ingest(Ingest(source=str(tmp_path / "data.jsonl"), seed=0), FakeStage(tmp_path))
    assert str(error.value) == f"{tmp_path}/data.jsonl:2: not UTF-8 at byte 9"


def test_all_mistakes_of_a_file_are_reported_together_up_to_20(tmp_path):
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path, ["{", GOOD, "[]", {**GOOD, "id": "a"}, {**GOOD, "id": "a"}])
    assert str(error.value).split("\n") == [
        f"{tmp_path}/data.jsonl:1: broken JSON at column 2: Expecting property name enclosed in double quotes",
        f"{tmp_path}/data.jsonl:3: expected an object, got list",
        f'{tmp_path}/data.jsonl:5: id "a" is that of {tmp_path}/data.jsonl:4 as well; ids must differ, or set '
        'duplicate_ids = "number"',
    ]
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path, ["{"] * 30)
    lines = str(error.value).split("\n")
    assert len(lines) == 21
    assert lines[-1] == "... stopped after 20 mistakes"


def test_a_missing_source_and_an_unknown_builtin_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match="no such file or folder; `source` must name a data file or folder"):
        ingest(Ingest(source=str(tmp_path / "absent.jsonl"), seed=0), FakeStage(tmp_path))
    with pytest.raises(DataError, match='the only built-in sample is "builtin:digits"'):
        ingest(Ingest(source="builtin:digit", seed=0), FakeStage(tmp_path))


def test_more_drops_than_max_dropped_fail_with_the_reasons(tmp_path):
    rows = [GOOD, {"conversations": [ASK]}, {"conversations": []}, {"conversations": [ASK]}]
    assert run_ingest(tmp_path / "enough", rows, max_dropped=3)[2]["kept"] == 1
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path / "less", rows, max_dropped=2)
    assert str(error.value).split("\n") == [
        "more than max_dropped = 2 samples were dropped:",
        '       2  no answer (first: sample "2")',
        '       1  no turns (first: sample "3")',
        "the first of them:",
        '  sample "2": no answer',
        '  sample "3": no turns',
        '  sample "4": no answer',
        f"all of them: {tmp_path}/less/out/dropped.csv",
    ]


def test_splits_drops_and_empty_splits_are_told_before_later_nodes_spend_their_time(tmp_path, capsys):
    run_ingest(tmp_path, [{**GOOD, "split": "train"}, {"conversations": [ASK]}])
    remedy = 'give samples a "split", or raise val_fraction or test_fraction'
    assert capsys.readouterr().out.splitlines() == [
        "dflow: kept train 1, val 0, test 0",
        'dflow: dropped 1  no answer (first: sample "2")',
        'dflow: sample "2": no answer',
        f'dflow: the split "val" is empty; {remedy}',
        f'dflow: the split "test" is empty; {remedy}',
    ]


def test_samples_with_reasoning_are_told_since_only_some_templates_show_it(tmp_path, capsys):
    thought = {"conversations": [ASK, {**ANSWER, "reasoning_content": "Hm."}]}
    run_ingest(tmp_path, [GOOD, thought, {**GOOD, "split": "val"}, thought])
    line = "dflow: 2 samples carry reasoning_content, which only some chat templates show"
    assert line in capsys.readouterr().out.splitlines()


def test_a_source_of_which_nothing_is_left_fails(tmp_path):
    with pytest.raises(DataError, match=r"no sample is left of 1:\n +1  no answer"):
        run_ingest(tmp_path / "a", [{"conversations": [ASK]}])
    with pytest.raises(DataError, match="no sample is left of 0:\n  the source is empty"):
        run_ingest(tmp_path / "b", [])


ROWS = st.sampled_from(
    [GOOD, {"conversations": []}, {"conversations": [ASK]}, {**GOOD, "image": "absent.png"}, {**GOOD, "split": "test"}]
)


@given(rows=st.lists(ROWS, min_size=1, max_size=30), limit=st.none() | st.integers(1, 30))
def test_kept_and_dropped_by_reason_add_up_to_in(tmp_path_factory, rows, limit):
    _, written, summary = run_ingest(tmp_path_factory.mktemp("rows"), [GOOD, *rows], max_samples=limit)
    good = 1 + sum(row["conversations"] == GOOD["conversations"] and "image" not in row for row in rows)
    assert summary["in"] == 1 + len(rows)
    assert summary["kept"] + sum(summary["dropped"].values()) == summary["in"]
    assert summary["kept"] == len(written) == min(good, limit or good)
    assert summary["splits"] == {
        split: sum(row["split"] == split for row in written) for split in ("train", "val", "test")
    }


@given(
    counts=st.dictionaries(st.sampled_from(["train", "val", "test"]), st.integers(1, 400), min_size=1),
    limit=st.none() | st.integers(1, 500),
)
def test_quotas_use_up_the_limit_in_proportion_and_forget_no_split(counts, limit):
    shares = quotas(counts, limit)
    total = sum(counts.values())
    limit = total if limit is None else min(limit, total)
    assert sum(shares.values()) == limit
    for split, share in shares.items():
        assert 0 <= share <= counts[split]
        assert abs(share - limit * counts[split] / total) <= 3
        assert share >= (limit >= len(counts))


def test_splits_depend_on_seed_and_id_alone(tmp_path):
    rows = [{**GOOD, "id": f"s{number}"} for number in range(600)]
    _, first, _ = run_ingest(tmp_path / "a", rows, test_fraction=0.2, val_fraction=0.1)
    _, other_order, _ = run_ingest(tmp_path / "b", rows[::-1], test_fraction=0.2, val_fraction=0.1)
    splits = {row["id"]: row["split"] for row in first}
    assert splits == {row["id"]: row["split"] for row in other_order}
    counts = Counter(splits.values())
    assert (abs(counts["test"] - 120) < 40, abs(counts["val"] - 60) < 30) == (True, True)
    assert run_ingest(tmp_path / "c", rows, test_fraction=0.0, val_fraction=0.0)[2]["splits"]["train"] == 600


def test_max_samples_takes_as_many_of_each_category_and_no_other_drop_limit_applies(tmp_path):
    (tmp_path / "x.png").write_bytes(b"x")
    rows = [{**GOOD, "split": "train" if n % 4 else "test", "image": "x.png" if n % 2 else None} for n in range(80)]
    _, written, summary = run_ingest(tmp_path, rows, max_samples=10, max_dropped=0)
    assert Counter((row["category"], row["split"]) for row in written) == {
        ("image", "train"): 10,
        ("text", "train"): 5,
        ("text", "test"): 5,
    }
    assert summary["dropped"] == {"over max_samples": 60}


def test_the_same_samples_are_taken_in_whatever_order_they_come(tmp_path):
    rows = [{**GOOD, "id": f"s{number}"} for number in range(90)]
    taken = [
        {row["id"]: row["split"] for row in run_ingest(tmp_path / name, order, max_samples=31)[1]}
        for name, order in (("a", rows), ("b", rows[::-1]))
    ]
    assert taken[0] == taken[1]
    assert len(taken[0]) == 31


def test_progress_ends_at_the_number_of_samples(tmp_path):
    stage, _, _ = run_ingest(tmp_path, [GOOD] * 250)
    assert [done for done, _ in stage.progressed] == [100, 200, 250]
    assert [240 <= total <= 260 for _, total in stage.progressed] == [True, True, True]


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
    return ExternalDigests(None).of_all(Ingest(source=str(folder / "data.jsonl"), **config).external_files())


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
    assert table[1] == '2,image file too large,"large.png: 268435457 bytes, more than 268435456"'


def test_the_builtin_sample_gives_the_same_bytes_again_and_fewer_on_demand(tmp_path):
    stages = [FakeStage(tmp_path / name) for name in "ab"]
    for stage in stages:
        ingest(Ingest(source="builtin:digits", max_samples=64, seed=0), stage)
    first, second = [stage.artifact(Ingest.output).digest for stage in stages]
    assert first == second
    summary = json.loads((stages[0].out_dir / "summary.json").read_text())
    assert summary["kept"] == 128
    assert min(summary["splits"].values()) > 0
