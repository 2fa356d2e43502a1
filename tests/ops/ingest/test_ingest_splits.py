"""Which samples are taken, and into which split they fall."""

import json
from collections import Counter

import attrs
from fake_stage import FakeStage
from hypothesis import given
from hypothesis import strategies as st
from own_samples import GOOD, run_ingest

from ops.ingest.op import Ingest
from ops.ingest.plan import smoke
from ops.ingest.run import ingest
from ops.ingest.splits import kept_of, quotas


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


@given(
    counts=st.dictionaries(st.sampled_from(["train", "val", "test"]), st.integers(1, 400), min_size=1),
    limit=st.integers(1, 500),
    least=st.integers(1, 40),
)
def test_quotas_give_every_split_the_least_number_that_the_limit_allows(counts, limit, least):
    shares = quotas(counts, limit, least)
    assert sum(shares.values()) == min(limit, sum(counts.values()))
    for split, share in shares.items():
        assert min(least, limit // len(counts), counts[split]) <= share <= counts[split]


def test_a_smoke_run_takes_several_samples_of_a_split_that_the_data_has_few_of():
    config = Ingest(source="builtin:digits", val_fraction=0.02, test_fraction=0.02, seed=0)
    small = attrs.evolve(config, **smoke(config, 16))
    assert kept_of(small, {"train": 960, "val": 20, "test": 20}) == {"train": 8, "val": 4, "test": 4}
    assert kept_of(small, {"train": 960, "val": 2}) == {"train": 14, "val": 2}


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


def test_the_builtin_sample_gives_the_same_bytes_again_and_fewer_on_demand(tmp_path):
    stages = [FakeStage(tmp_path / name) for name in "ab"]
    for stage in stages:
        ingest(Ingest(source="builtin:digits", max_samples=64, seed=0), stage)
    first, second = [stage.artifact(Ingest.output).digest for stage in stages]
    assert first == second
    summary = json.loads((stages[0].out_dir / "summary.json").read_text())
    assert summary["kept"] == 128
    assert min(summary["splits"].values()) > 0
