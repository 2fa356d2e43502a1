"""The benchmark of SGLang's capture at a tiny size: the table comes out, and what is measured is right."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_sglangs_capture_is_measured_beside_its_plain_prefill_and_transformers(tmp_path):
    sizes = ["--samples=8", "--tokens", "8", "20", "--grid", "4", "4", "--batch-tokens=128", "--rounds=2"]
    command = [sys.executable, "benchmarks/capture.py", "--sglang", *sizes, "--dtype=float32"]
    done = subprocess.run(
        [*command, f"--json={tmp_path / 'figures.json'}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert ["text", "image", "mixed"] == list(figures)
    for kind, found in figures.items():
        pairs = zip(found["capture"], found["prefill"], strict=True)
        assert found["of_prefill"] == pytest.approx(statistics.median(ours / other for ours, other in pairs))
        assert found["difference"] < 1e-5
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"| {kind}"))
        assert f"{found['of_prefill']:.2f}" == row.split("|")[4].strip()
        assert ("holds" if found["of_prefill"] >= 0.9 else "missed") == row.split("|")[5].strip()
