"""What a right answer says: from the source, past answers that the target wrote itself, to the tokenised samples."""

from __future__ import annotations

import json

import pytest
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint
from format_cases import png

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TargetModel
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, read_jsonl
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

TURNS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a cat."}]


def injected(folder, **source):
    stage = FakeStage(folder / "ingest")
    ingest(Ingest(seed=0, **source), stage)
    inject = FakeStage(folder / "inject", {"samples": stage.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("ingest")), inject)
    return inject.artifact(ImageSamples)


def labels(folder, samples, processor):
    stage = FakeStage(folder, {"samples": samples})
    tokenize_chat(TokenizeChat(samples=Ref("a"), processor=str(processor), min_loss_tokens=1), stage)
    return {row["id"]: row["label"] for row in read_jsonl(stage.out_dir / "samples.jsonl")}


def test_another_field_of_the_rows_may_be_the_topic(tmp_path):
    rows = [{"id": str(place), "messages": TURNS, "source": f"site {place}"} for place in range(2)]
    rows.append({"id": "without", "messages": TURNS, "category": "math"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"source": str(tmp_path / "rows.jsonl"), "val_fraction": 0.0, "test_fraction": 0.0}
    samples = injected(tmp_path / "a", **options, group="source")
    found = {row["id"]: row.get("topic") for row in read_jsonl(samples.path / "samples.jsonl")}
    assert {"0": "site 0", "1": "site 1", "without": None} == found
    samples = injected(tmp_path / "b", **options)
    found = {row["id"]: row.get("topic") for row in read_jsonl(samples.path / "samples.jsonl")}
    assert {"0": None, "1": None, "without": "math"} == found
    with pytest.raises(DataError, match='group = "sorce": no sample has a text or an integer in such a field'):
        injected(tmp_path / "c", **options, group="sorce")
    with pytest.raises(ConfigError, match="group is for data of your own"):
        Ingest(source="builtin:digits", group="source")


KEPT = {"math": "math", " two words ": "two words", 7: "7"}
IGNORED = (None, "", "  ", True, 1.5, ["math"], {"a": 1}, "x" * 201, "\ud800")


def test_the_category_of_a_row_stays_with_its_sample_as_its_topic(checkpoint, tmp_path):
    rows = [{"id": str(place), "messages": TURNS, "category": value} for place, value in enumerate([*KEPT, *IGNORED])]
    rows.append({"id": "without", "messages": TURNS})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fractions = {"val_fraction": 0.0, "test_fraction": 0.0}
    samples = injected(tmp_path, source=str(tmp_path / "rows.jsonl"), **fractions)
    stage = FakeStage(tmp_path / "tokens", {"samples": samples})
    tokenize_chat(TokenizeChat(samples=Ref("a"), processor=str(checkpoint), min_loss_tokens=1), stage)
    records = list(read_jsonl(stage.out_dir / "samples.jsonl"))
    assert len(rows) == len(records)
    expected = {str(place): topic for place, topic in enumerate(KEPT.values())}
    for found in (records, list(read_jsonl(samples.path / "samples.jsonl"))):
        assert expected == {row["id"]: row["topic"] for row in found if "topic" in row}
        assert {"text"} == {row["category"] for row in found}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("checkpoint"))


def test_the_class_of_an_image_is_its_label_whatever_the_answer_says_and_the_target_answers(checkpoint, tmp_path):
    expected = {}
    for name in ("cat", "sea horse"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "data" / "train" / name / f"{number}.png").write_bytes(png())
            expected[f"train/{name}/{number}.png"] = name
    folder = {"source": str(tmp_path / "data"), "val_fraction": 0.0, "test_fraction": 0.0}
    samples = injected(tmp_path, **folder, answer="It is a {label}.")
    assert expected == labels(tmp_path / "tokens", samples, checkpoint)
    loaded = FakeStage(tmp_path / "target")
    load_target(LoadTarget(checkpoint=str(checkpoint)), loaded)
    stage = FakeStage(tmp_path / "again", {"samples": samples, "target": loaded.artifact(TargetModel)})
    options = {"max_new_tokens": 3, "finish_reasons": ("stop", "length"), "seed": 0}
    regenerate_answers(RegenerateAnswers(samples=Ref("a"), target=Ref("b"), **options), stage)
    kept = read_json(stage.out_dir / "summary.json")["kept"]
    answered = labels(tmp_path / "tokens again", stage.artifact(ImageSamples), checkpoint)
    assert kept == len(answered) > 0
    assert {sample: expected[sample] for sample in answered} == answered


def test_a_row_may_say_its_label_and_the_last_answer_stands_for_one_that_is_missing(checkpoint, tmp_path):
    given = {"said": "cat", "empty": " ", "null": None, "number": 3}
    rows = [{"id": name, "split": "train", "label": label, "messages": TURNS} for name, label in given.items()]
    rows.append({"id": "missing", "split": "train", "messages": TURNS})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = injected(tmp_path, source=str(tmp_path / "data.jsonl"))
    assert ["said"] == [row["id"] for row in read_jsonl(samples.path / "samples.jsonl") if "label" in row]
    sentence = "It is a cat."
    assert {
        "said": "cat",
        "empty": sentence,
        "null": sentence,
        "number": sentence,
        "missing": sentence,
    } == labels(tmp_path / "tokens", samples, checkpoint)
