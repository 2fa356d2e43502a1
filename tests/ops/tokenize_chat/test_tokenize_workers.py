"""Workers that share tokenising: the bytes of one process, with drops, previews and several shards per split."""

from __future__ import annotations

import pytest
from chat_samples import LONG_ANSWER, conversation, png, run_tokenize, write_samples
from fake_stage import FakeStage, folder_digest
from shard_workers import KILLED, run_workers

from dsl.errors import DataError, StopRequested
from dsl.op import Ref
from ops.lib.data.files import read_json
from ops.tokenize_chat import pieces
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

RUN = "ops.tokenize_chat.run:tokenize_chat"
CHANGES = {"vocab_size": 400, "shard_samples": 5, "max_length": 300, "preview_samples": 6, "workers": 2}
CONFIG = TokenizeChat(samples=Ref("inject"), **CHANGES)
SMALL = {"ops.tokenize_chat.pieces:PIECE_ROWS": 4, "ops.tokenize_chat.pieces:PIECE_IMAGES": 2}
POINTS = {
    "in the middle of a piece": ("ops.tokenize_chat.run:tokenize_rows", 2),
    "between the end of a piece and its publication": ("ops.tokenize_chat.pieces:publish", 2),
    "while it writes the artifact": ("ops.tokenize_chat.run:tokens_info", 1),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Texts and images in all splits, some too long, one without an answer, and one with a special token."""
    rows = []
    for place in range(36):
        answer = LONG_ANSWER * 20 if place % 7 == 3 else f"{LONG_ANSWER} {place}"
        turns = [("user", f"Question {place}?"), ("assistant", answer)]
        if place == 8:
            turns = turns[:1]
        if place in (12, 13, 14, 15):  # a whole piece of drops
            turns[0] = ("user", "<|im_end|>")
        image = png(16 + 4 * place, 24) if place % 3 == 0 else None
        rows.append(conversation(*turns, image=image, split=("train", "train", "val", "test")[place // 4 % 4]))
    return write_samples(tmp_path_factory.mktemp("samples") / "samples", rows)


@pytest.fixture(scope="module")
def alone(samples, tmp_path_factory):
    """The artifact of one process."""
    stage = run_tokenize(tmp_path_factory.mktemp("alone"), samples, **CHANGES)
    summary = read_json(stage.out_dir / "summary.json")
    assert 8 < sum(summary["dropped"].values()) < 14 and all(summary["splits"].values())
    assert 6 <= len(read_json(stage.out_dir / "tokens.json")["shards"])
    return folder_digest(stage.out_dir)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_bytes_of_workers_are_those_of_one_process(samples, alone, tmp_path, workers):
    assert [0] * workers == run_workers(RUN, CONFIG, tmp_path, {"samples": samples}, workers, constants=SMALL)
    assert alone == folder_digest(tmp_path / "out")
    assert 9 == len(list((tmp_path / "work").glob("*.safetensors")))


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=pytest.mark.slow) if "artifact" in point else point for point in POINTS]
)
def test_a_killed_workers_pieces_and_artifact_are_made_by_the_other(samples, alone, tmp_path, point):
    codes = run_workers(RUN, CONFIG, tmp_path, {"samples": samples}, 2, {0: POINTS[point]}, SMALL)
    assert [KILLED, 0] == codes
    assert alone == folder_digest(tmp_path / "out")


def test_a_stop_keeps_the_finished_pieces(samples, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_ROWS", 4)
    stage = FakeStage(tmp_path, {"samples": samples}, workers=2, stop_after=3)
    with pytest.raises(StopRequested, match="finished pieces are kept"):
        tokenize_chat(CONFIG, stage)
    kept = {file: file.stat().st_ino for file in stage.work_dir.iterdir()}
    assert 3 == len(kept)
    again = FakeStage(tmp_path / "again", {"samples": samples}, workers=2)
    again.work_dir = stage.work_dir
    tokenize_chat(CONFIG, again)
    assert kept.items() <= {file: file.stat().st_ino for file in stage.work_dir.iterdir()}.items()
    assert alone == folder_digest(again.out_dir)
    assert [(36, 36)] == again.progressed[-1:]


def test_a_template_that_suits_no_sample_is_refused_by_the_worker_that_writes(tmp_path):
    samples = write_samples(tmp_path / "samples", [conversation(("user", "Hello?"))])
    with pytest.raises(DataError, match="no sample is left"):
        tokenize_chat(CONFIG, FakeStage(tmp_path, {"samples": samples}, workers=2))
