"""What a diagnosis finds around a draft in a run's graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import asdict
from serve_cases import PIPELINE

from dsl.graph import Graph
from dsl.read_toml import read_graph
from ops.lib.data.files import write_json
from ops.tools.diagnose.chain import Chain

BENCHMARK = """
[node.tests_first]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokenize"
benchmark = "bench.jsonl"
temperature = 1.0
block_size = 3
max_new_tokens = 7
"""
OF_VAL = """
[node.of_val]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokenize"
split = "val"
"""
REGENERATE = """
[node.regenerate]
op = "regenerate_answers"
samples = "@inject"
target = "@target"
temperature = 0.7

[node.own]
op = "tokenize_chat"
samples = "@regenerate"
target = "@target"
"""
WARM = """
[node.first]
op = "export_draft"
draft = "@train"
target = "@target"

[node.new_ingest]
op = "ingest"
source = "builtin:digits"
max_samples = 8

[node.new_inject]
op = "inject_images"
samples = "@new_ingest"

[node.new]
op = "tokenize_chat"
samples = "@new_inject"
target = "@target"

[node.new_capture]
op = "capture_targets"
tokens = "@new"
target = "@target"

[node.new_shard]
op = "shard_sequence"
{shard}

[node.second]
op = "train_dflash"
{train}
batches = "@new_shard"
target = "@target"
warm_start = "@first"

[node.warm]
op = "export_draft"
draft = "@second"
target = "@target"
"""
TUNED = """
[node.tuned]
op = "finetune_vlm"
tokens = "@own"

[node.new]
op = "tokenize_chat"
samples = "@inject"
target = "@tuned"
"""
STORED = 'features = "@new_capture"'
ONLINE = 'tokens = "@new"'


@pytest.fixture
def read(tmp_path):
    """The graph of the served pipeline with references renamed, and further nodes before its evaluation."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "bench.jsonl").write_text("")

    def read(more: str = "", *, judged: bool = True, **renamed: str) -> Graph:
        text = PIPELINE.format(checkpoint=tmp_path / "checkpoint")
        for old, new in renamed.items():
            text = text.replace(f"@{old}", f"@{new}")
        head, evaluation = text.split("[node.eval]")
        file = tmp_path / "pipeline.toml"
        file.write_text(head + more + (f"[node.eval]{evaluation}" if judged else ""))
        return read_graph(file, [])

    return read


def chain_of(graph: Graph, folder: Path) -> Chain:
    return Chain.of(graph, {name: (folder / name, name) for name in graph.nodes}, "export")


def with_report(folder: Path, node: str, tau: float) -> None:
    (folder / node).mkdir()
    write_json(folder / node / "report.json", {"tau": {"all": {"tau": tau}}})


def test_of_two_evaluations_that_of_the_split_is_followed_and_named(read, tmp_path):
    with_report(tmp_path, "eval", 2.5)
    chain = chain_of(read(BENCHMARK), tmp_path)
    assert 128 == chain.max_new_tokens
    expected = {"node": "eval", "tau": 2.5, "benchmark": None, "temperature": None, "block_size": None}
    assert chain.evaluation is not None
    assert expected == asdict(chain.evaluation)
    assert chain.answered is not None
    assert tmp_path / "eval" == chain.answered.path


def test_what_the_only_evaluation_does_otherwise_is_told(read, tmp_path):
    with_report(tmp_path, "tests_first", 3.1)
    chain = chain_of(read(BENCHMARK, judged=False), tmp_path)
    assert 7 == chain.max_new_tokens
    expected = {
        "node": "tests_first",
        "tau": 3.1,
        "benchmark": "bench.jsonl",
        "temperature": 1.0,
        "block_size": 3,
    }
    assert chain.evaluation is not None
    assert expected == asdict(chain.evaluation)
    assert chain.answered is None, "its prompts are not those of the split"


def test_without_an_evaluation_there_is_none_to_tell(read, tmp_path):
    assert chain_of(read(judged=False), tmp_path).evaluation is None


def test_the_temperature_of_regenerated_answers_is_known(read, tmp_path):
    assert chain_of(read(judged=False), tmp_path).regenerated_at is None
    graph = read(REGENERATE, judged=False, tokenize="own")
    chain = chain_of(graph, tmp_path)
    assert (0.7, None) == (chain.regenerated_at, chain.kept_by)


def test_answers_of_the_data_set_were_not_regenerated_at_any_temperature(read, tmp_path):
    kept = REGENERATE.replace("temperature = 0.7", 'answers = "data"')
    chain = chain_of(read(kept, judged=False, tokenize="own"), tmp_path)
    assert (None, "regenerate") == (chain.regenerated_at, chain.kept_by)


def test_what_the_nodes_above_the_training_lost_is_found_in_the_order_of_the_data(read, tmp_path):
    graph = read(REGENERATE, judged=False, tokenize="own")
    assert chain_of(graph, tmp_path).losses is None
    spoilt = {"of": "answers", "text": "27% of the answers (163 of 611) are changed", "remedy": "drop them"}
    for node, summary in {
        "ingest": {"in": 10, "dropped": {"image missing": 4}},
        "inject": {"in": 6, "dropped": {}},
        "regenerate": {"in": 6, "dropped": {}, "losses": [spoilt]},
        "own": {"in": 6, "dropped": {"longer than max_length": 1}},
    }.items():
        (tmp_path / node).mkdir(exist_ok=True)
        write_json(tmp_path / node / "summary.json", summary)
    assert [
        ("ingest", "40% of the samples (4 of 10) are dropped: 4 image missing"),
        ("regenerate", "27% of the answers (163 of 611) are changed"),
        ("own", "17% of the samples (1 of 6) are dropped: 1 longer than max_length"),
    ] == [(node, loss.text) for node, loss in chain_of(graph, tmp_path).losses or ()]


@pytest.mark.parametrize(
    ("train", "shard", "is_online", "captured"),
    [(STORED, STORED, False, "new_capture"), (f'capture = "online"\n{ONLINE}', ONLINE, True, None)],
)
def test_what_a_warm_start_s_draft_was_trained_on_is_not_what_this_one_learnt(
    read, tmp_path, train, shard, is_online, captured
):
    graph = read(REGENERATE + WARM.format(train=train, shard=shard), judged=False, tokenize="own")
    made = {name: (tmp_path / name, name) for name in graph.nodes}
    chain = Chain.of(graph, made, "warm")
    assert chain.training is not None and chain.learnt is not None
    assert ("second", "new", "new") == (chain.training.digest, chain.learnt.digest, chain.judged.digest)
    assert (is_online, captured) == (chain.is_online, None if chain.features is None else chain.features.digest)
    assert chain.regenerated_at is None
    assert 0.7 == Chain.of(graph, made, "first").regenerated_at


def test_answers_that_only_the_target_was_trained_on_are_not_those_of_the_draft(read, tmp_path):
    assert chain_of(read(REGENERATE + TUNED, judged=False, tokenize="new"), tmp_path).regenerated_at is None


def test_prompts_are_of_the_evaluation_s_split_or_of_another_unless_one_is_named(read, tmp_path):
    graph = read(judged=False)
    made = {name: (tmp_path / name, name) for name in graph.nodes}
    for asked, expected in ((None, ("test", ("val",))), ("val", ("val", ())), ("test", ("test", ()))):
        chain = Chain.of(graph, made, "export", asked)
        assert expected == (chain.split, chain.other_splits)
    with_report(tmp_path, "of_val", 2.5)
    chain = chain_of(read(OF_VAL, judged=False), tmp_path)
    assert ("val", ("test",)) == (chain.split, chain.other_splits)
