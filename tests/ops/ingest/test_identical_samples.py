"""Samples with the same content: counted where they are held out and trained on, or dropped."""

import pytest
from own_samples import ANSWER, ASK, GOOD, run_ingest

OTHER = {"conversations": [{"role": "user", "text": "And this?"}, ANSWER]}


def warnings(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


def of(split: str, row: dict, **more) -> dict:
    return {**row, "split": split, **more}


def test_samples_of_test_that_are_trained_on_are_counted_in_a_warning_and_kept(tmp_path, capsys):
    rows = [of("test", GOOD), of("train", GOOD, id="other id"), of("test", GOOD), of("test", OTHER), of("val", OTHER)]
    _, written, summary = run_ingest(tmp_path, rows)
    assert [row["id"] for row in written] == ["1", "other id", "3", "4", "5"]
    assert summary == {"in": 5, "kept": 5, "dropped": {}, "splits": {"train": 1, "val": 1, "test": 3}}
    assert warnings(capsys) == [
        "warning: 2 of 3 samples of test have the same turns and images as a sample of train: what is measured on "
        'them, such as tau, is not that of unseen prompts; duplicates = "drop" keeps the first of identical samples'
    ]


def test_identical_samples_within_a_split_are_no_warning(tmp_path, capsys):
    run_ingest(tmp_path, [of("train", GOOD), of("train", GOOD), of("test", OTHER), of("test", OTHER)])
    assert [] == warnings(capsys)


def test_the_bytes_of_images_decide_and_not_their_names(tmp_path, capsys):
    for name, content in (("a.png", b"x"), ("b.png", b"x"), ("c.png", b"y")):
        (tmp_path / name).write_bytes(content)
    run_ingest(tmp_path, [of("train", GOOD, image="a.png"), of("val", GOOD, image="c.png"), of("test", GOOD)])
    assert [] == warnings(capsys)
    run_ingest(tmp_path, [of("train", GOOD, image="a.png"), of("val", GOOD, image="b.png")])
    assert warnings(capsys)[0].startswith("warning: 1 of 1 samples of val have the same turns and images")


@pytest.mark.parametrize("different", [{"text": "A dog."}, {"text": "A cat.", "reasoning_content": "Hm."}])
def test_another_answer_or_thought_is_another_content(tmp_path, capsys, different):
    answered = {"conversations": [ASK, {"role": "assistant", **different}]}
    run_ingest(tmp_path, [of("train", GOOD), of("test", answered)])
    assert [] == warnings(capsys)


def test_only_the_first_of_identical_samples_is_used_where_duplicates_are_dropped(tmp_path, capsys):
    rows = [of("test", GOOD), of("train", GOOD), of("train", OTHER), of("val", GOOD), of("train", OTHER)]
    stage, written, summary = run_ingest(tmp_path, rows, duplicates="drop")
    assert [(row["id"], row["split"]) for row in written] == [("1", "test"), ("3", "train")]
    assert summary["dropped"] == {"same content as an earlier sample": 3}
    table = (stage.out_dir / "dropped.csv").read_text().splitlines()
    assert table[1:] == [f"{sample_id},same content as an earlier sample," for sample_id in ("2", "4", "5")]
    assert [] == warnings(capsys)
