"""Blocks of an evaluation that are larger than those of the training are told before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dsl.errors import PipelineError
from dsl.read_toml import read_graph
from ops.evaluate.op import Evaluate

TINY = Path(__file__).resolve().parents[3] / "pipelines" / "tiny.toml"  # trains blocks of 8
EDGES = 'draft = "@export"\ntarget = "@target"\ntokens = "@tokenize"\n'
MISTAKE = "node.eval.block_size", "9 is more than the 8 that the draft is trained with: use 2 to 8"


def mistakes(*arguments: str, sweeps: Sequence[str] = ()) -> list[tuple[str, str]]:
    try:
        read_graph(TINY, list(arguments), list(sweeps))
    except PipelineError as error:
        return [(mistake.path, mistake.what) for mistake in error.mistakes]
    return []


@pytest.mark.parametrize("arguments", [(), ("eval.block_size=8",), ("eval.block_size=9", "train.block_size=9")])
def test_blocks_as_large_as_in_the_training_are_right(arguments: Sequence[str]) -> None:
    assert [] == mistakes(*arguments)


def test_smaller_blocks_than_in_the_training_are_right_where_no_gate_reads_the_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'extends = "{TINY}"\n[node.small]\nop = "evaluate"\nblock_size = 2\n{EDGES}')
    read_graph(file)
    found = [message for _, message in mistakes("eval.block_size=2")]
    assert 1 == len(found)
    assert "this evaluation has block_size = 2, and a served draft is compared with" in found[0]


def test_larger_blocks_than_in_the_training_are_a_mistake_of_the_pipeline() -> None:
    assert [MISTAKE[1]] == [message for _, message in mistakes("eval.block_size=9")]
    swept = [message for _, message in mistakes("eval.block_size=6", sweeps=["train.block_size=[4,8]"])]
    assert ["6 is more than the 4 that the draft is trained with: use 2 to 4"] == [
        message for message in swept if not message.startswith("this evaluation has block_size = 6, and a served draft")
    ]
    assert 2 == len(swept)


def test_a_training_with_a_wrong_block_size_has_that_mistake_alone() -> None:
    assert ["must be >= 2, got 1"] == [message for _, message in mistakes("train.block_size=1", "eval.block_size=9")]


def test_where_the_draft_is_not_trained_in_the_pipeline_its_blocks_are_seen_when_it_is_loaded() -> None:
    assert {} == Evaluate.mistakes_with_nodes_above({"block_size": 9}, lambda *_edges: {})


def test_the_mistake_stands_at_the_field_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'extends = "{TINY}"\n[node.eval]\nblock_size = 9\n')
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    (mistake,) = caught.value.mistakes
    assert (MISTAKE, 3) == ((mistake.path, mistake.what), mistake.position.line if mistake.position else None)
