"""Prompts whose answers would end behind the positions of target or draft."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from attrs import frozen
from evaluate_cases import make_draft, run_evaluate, small_draft

from dsl.errors import DataError
from ops.evaluate.lengths import check_lengths, spread_prompts
from ops.evaluate.prompts import Prompt
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.target.model import Target


@frozen
class Asked:
    """A prompt of so many tokens."""

    length: int
    later_lengths: tuple[int, ...] = ()

    @property
    def origin(self) -> str:
        return f"b.jsonl:{self.length}"


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return make_draft(small_draft(Target.load(target)), tmp_path_factory.mktemp("draft"))


@pytest.fixture
def draft_config(draft):
    return load_draft(draft.path).config


def model(**text) -> dict[str, Any]:
    """The target's config of these fields."""
    return {"model_type": "qwen3", **text}


def test_an_answer_may_end_at_the_last_position_and_not_behind_it(draft_config):
    target = model(max_position_embeddings=4096)
    check_lengths([Asked(491), Asked(3)], target, draft_config, 20)
    with pytest.raises(DataError) as caught:
        check_lengths([Asked(492), Asked(491), Asked(495)], target, draft_config, 20)
    first, *lines, remedy = str(caught.value).splitlines()
    assert "2 of 3 prompts and their answers (max_new_tokens = 20, and the first token)" in first
    assert "more tokens than the 512 positions of the draft" in first
    assert ["  b.jsonl:492: 492 + 21 = 513", "  b.jsonl:495: 495 + 21 = 516"] == lines
    assert remedy.startswith("set max_new_tokens = 16 or less, or remove these prompts")
    check_lengths([Asked(492), Asked(491), Asked(495)], target, draft_config, 16)
    with pytest.raises(DataError, match="no max_new_tokens is small enough for all of them"):
        check_lengths([Asked(511)], target, draft_config, 1)
    check_lengths([Asked(510)], target, draft_config, 1)


def test_the_last_block_stays_within_the_first_range_of_a_rope(draft_config):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    target = model(max_position_embeddings=4096, rope_parameters=rope)
    most = 64 - draft_config.block_size - 21
    check_lengths([Asked(most)], target, draft_config, 20)
    with pytest.raises(DataError, match=r"original_max_position_embeddings, less a block, of its config\.json"):
        check_lengths([Asked(most + 1)], target, draft_config, 20)


def test_later_turns_may_stand_behind_the_longest_answers_to_those_before(draft_config):
    target = model(max_position_embeddings=4096)
    prompts = [Asked(10, (449, 470)), Asked(20)]
    check_lengths(prompts, target, draft_config, 13)
    with pytest.raises(DataError) as caught:
        check_lengths(prompts, target, draft_config, 20)
    first, line, remedy = str(caught.value).splitlines()
    assert "1 of 4 prompts and their answers" in first
    assert "  b.jsonl:10 (turn 3): 470 + 3 x 21 = 533" == line
    assert remedy.startswith("set max_new_tokens = 13 or less, or remove these prompts")
    assert remedy.endswith("or set first_turn = true")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 200),
        (
            {
                "max_position_embeddings": 160,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
            },
            400,
        ),
        (
            {
                "max_position_embeddings": 320,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 20},
            },
            320,
        ),
        ({"max_position_embeddings": 300, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 300),
    ],
)
def test_a_target_counts_as_far_as_its_rope_is_stretched(draft_config, text, limit):
    check_lengths([Asked(limit - 11)], model(**text), draft_config, 10)
    with pytest.raises(DataError, match=f"the {limit} positions of the target"):
        check_lengths([Asked(limit - 10)], model(**text), draft_config, 10)


def test_a_target_that_names_no_limit_has_that_of_the_draft(draft_config):
    with pytest.raises(DataError, match="the 512 positions of the draft"):
        check_lengths([Asked(510)], model(), draft_config, 10)


def test_very_many_are_counted(draft_config):
    with pytest.raises(DataError, match=r"\.\.\. and 20 more"):
        check_lengths([Asked(600)] * 120, model(), draft_config, 10)


def test_samples_of_the_split_are_named_before_the_first_prompt_is_decoded(draft, target, tokens, tmp_path):
    reader = TokenReader(tokens, "test")
    prompts = spread_prompts(Prompt.held_out(reader), 2)
    longest = max(prompts, key=lambda prompt: prompt.length)
    limit = longest.length + 20
    short = attrs.evolve(load_draft(draft.path).config, max_position_embeddings=limit)
    (tmp_path / "draft").mkdir()
    exported = make_draft(short, tmp_path / "draft")
    with pytest.raises(DataError) as caught:
        run_evaluate(tmp_path, exported, target, tokens)
    assert f"  sample {longest.id}: {longest.length} + 21 = {limit + 1}\n" in str(caught.value)
    assert [] == list((tmp_path / "work").iterdir())
    run_evaluate(tmp_path, exported, target, tokens, max_new_tokens=19, random_draft=False)
