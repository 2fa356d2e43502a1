"""Shards of features are mapped into memory: a sample costs no reading of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draft_chain import make_features, make_target
from safetensors.torch import load_file

from ops.lib.target.feature_shards import FeatureReader

IO = Path("/proc/self/io")


def bytes_read() -> int:
    """What this process has read from files by calls so far; what it touches in mapped ones does not count."""
    return int(IO.read_text().split()[1])


@pytest.mark.skipif(not IO.exists(), reason="needs Linux' count of the bytes that a process reads")
def test_the_rows_of_a_sample_are_mapped_and_the_shard_is_never_read(tmp_path: Path) -> None:
    features = make_features(tmp_path / "features", make_target(tmp_path / "target"), samples=400, val=1)
    (shard,) = features.path.glob("train-*.safetensors")
    stored = load_file(shard)
    begin = int(stored["token_offsets"][300])
    before = bytes_read()
    reader = FeatureReader(features, "train")
    rows = reader.features(300, 2, 7)
    assert bytes_read() - before < shard.stat().st_size / 100
    assert torch.equal(stored["features"][begin + 2 : begin + 7], rows)
