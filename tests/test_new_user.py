"""A folder as a new user would prepare it: an own JSONL file, JPEGs of all sizes (some broken), and a checkpoint."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from family_checkpoints import make_checkpoint
from init_cases import SMALL_RUN
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
BROKEN = {
    "empty.jpg": lambda jpeg: b"",
    "cut.jpg": lambda jpeg: jpeg[: len(jpeg) // 3],
    "text.jpg": lambda jpeg: b"not an image at all",
    "page.jpg": lambda jpeg: b"<html>404</html>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """30 good JPEGs, 5 that cannot be used (one of them missing), and 10 lines of text only."""
    folder = tmp_path_factory.mktemp("mine")
    make_checkpoint("qwen3_vl", folder / "checkpoint")
    (folder / "photos").mkdir()
    drawn = random.Random(0)
    names = []
    for index in range(30):
        size = (drawn.randint(20, 400), drawn.randint(20, 400))
        Image.effect_noise(size, 60).convert("RGB").save(folder / "photos" / f"{index}.jpg", quality=80)
        names.append(f"{index}.jpg")
    jpeg = (folder / "photos" / "0.jpg").read_bytes()
    for name, broken in BROKEN.items():
        (folder / "photos" / name).write_bytes(broken(jpeg))
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for place, name in enumerate([*names, *BROKEN, "missing.jpg"]):
            answer = f"Photo {place} shows noise, of every shade between black and white, and nothing besides it."
            turns = [{"role": "user", "text": "What is this?"}, {"role": "assistant", "text": answer}]
            file.write(json.dumps({"id": name, "image": f"photos/{name}", "conversations": turns}) + "\n")
        for place in range(10):
            turns = [
                {"role": "user", "text": f"Count from {place}."},
                {"role": "assistant", "text": ", ".join(str(place + step) for step in range(20))},
            ]
            file.write(json.dumps({"id": f"count-{place}", "conversations": turns}) + "\n")
    command = [
        sys.executable,
        "-m",
        "executor.cli",
        "init",
        str(folder / "data.jsonl"),
        "-o",
        str(folder / "mine.toml"),
    ]
    command += ["--target", str(folder / "checkpoint")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "data: 40 samples (json), 30 with images, 10 text only" in said
    assert "images: 30 of 34 examined can be decoded" in said and "dropped: 1 (image missing)" in said
    return folder


@pytest.fixture(scope="module")
def finished(folder) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "executor.cli", "run", str(folder / "mine.toml"), "--store", str(folder / "runs")]
    command += [part for name, value in SMALL_RUN.items() for part in ("-s", f"{name}={value}")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def artifact(folder: Path, node: str) -> Path:
    command = [sys.executable, "-m", "executor.cli", "status", "--json", "--store", str(folder / "runs")]
    status = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    digest = next(row["digest"] for row in status["nodes"] if row["id"] == node)
    return folder / "runs" / "objects" / digest


def test_it_ends_with_a_draft_and_an_answer_that_is_the_targets_own(folder, finished):
    assert 0 == finished.returncode, finished.stdout + finished.stderr
    names = {file.name for file in (artifact(folder, "check") / "draft").iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} == names
    assert {"errors": 0} == {
        "errors": json.loads((artifact(folder, "eval") / "report.json").read_text())["lossless"]["errors"]
    }


def test_broken_photos_are_counted_with_their_reasons_and_told(folder, finished):
    summaries = {
        node: json.loads((artifact(folder, node) / "summary.json").read_text())
        for node in ("ingest", "inject", "regenerate")
    }
    dropped = summaries["ingest"]["dropped"] | summaries["inject"]["dropped"]
    assert {"image missing": 1, "image undecodable": 4} == dropped
    assert [45, 44, 40] == [summaries[node]["in"] for node in summaries]
    assert all(summary["in"] == summary["kept"] + sum(summary["dropped"].values()) for summary in summaries.values())
    assert "image undecodable" in finished.stdout
    table = (artifact(folder, "inject") / "dropped.csv").read_text().splitlines()
    assert sorted(BROKEN) == sorted(line.split(",")[0] for line in table[1:])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_images_in_two_folders_become_a_report(tmp_path):
    make_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    for place in range(10):
        kind = tmp_path / "photos" / ("cat" if place % 2 else "dog")
        kind.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((60 + 10 * place, 80), 60).convert("RGB").save(kind / f"{place}.jpg")
    said = dflow(tmp_path, "init", "photos", "--target", "checkpoint")
    assert "data: 10 samples (image-folder), 10 with images, 0 text only" in said
    settings = [part for name, value in SMALL_RUN.items() for part in ("-s", f"{name}={value}")]
    dflow(tmp_path, "run", "pipeline.toml", *settings)
    dflow(tmp_path, "report", "-o", "report.html")
    page = (tmp_path / "report.html").read_text().replace("<wbr>", "")  # names may go on in the next line
    assert [] == [
        told
        for told in ("eval/tau", "photos", "train_dflash", '<img alt="eval: acceptance_by_slot"')
        if told not in page
    ]


def dflow(folder: Path, *arguments: str) -> str:
    """Run a command in the folder; returns its output."""
    command = [sys.executable, "-m", "executor.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout
