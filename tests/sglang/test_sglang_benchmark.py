"""The benchmarks of SGLang's capture at a tiny size: the table comes out, and what is measured is right."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import figures_of, parts_of
from benchmarks.gpu_parts import capture
from benchmarks.gpu_report import page
from ops.lib.sglang.runtime import SglangRuntime

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
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


def test_the_gpu_benchmark_measures_sglangs_capture_beside_its_plain_prefill(monkeypatch, capsys):
    (part,) = (part for part in parts_of("cpu", True, Path())[1] if part.needs == "sglang")
    assert capture.__name__ == part.module
    calls = []
    for name in ("capture", "prefill"):
        monkeypatch.setattr(SglangRuntime, name, noted(calls, getattr(SglangRuntime, name)))
    monkeypatch.setattr(sys, "argv", [part.module, *part.options])
    capture.main()
    found = figures_of(capsys.readouterr().out, None)
    assert ["capture", "prefill"] == sorted(found)
    rounds = ["capture", "prefill", "capture", "prefill", "prefill", "capture"]  # the first one warms up
    assert rounds == [name for name, _ in calls]
    assert {True} == {6 == len(lengths) and 8 <= min(lengths) <= max(lengths) <= 24 for _, lengths in calls}
    for speeds in found.values():
        assert 2 == len(speeds["times"])
        assert statistics.median(speeds["times"]) == speeds["median"] > 0
    entry = {"status": "done", "seconds": 1.0, "figures": found}
    shown = page({"commit": "", "device": "cpu", "tiny": True, "seconds": 1.0, "parts": {part.name: entry}})
    assert f"| SGLang, capture | {found['capture']['median']:,.0f} |" in shown


def noted(calls, method):
    """A method of the runtime that runs as it is, and whose calls are noted: its name, its samples' lengths."""

    def call(self, samples, **further):
        calls.append((method.__name__, [len(sample.input_ids) for sample in samples]))
        return method(self, samples, **further)

    return call
