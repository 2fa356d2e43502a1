"""What is told where speculative decoding changed an answer: ties, and bugs apart from them."""

from __future__ import annotations

import attrs
import pytest
import torch
from evaluate_cases import BLOCK, make_draft, run_evaluate, small_draft
from lively_target import make_lively

from dsl.errors import DataError
from ops.artifacts import Draft, TargetModel
from ops.evaluate import turns
from ops.lib.data.files import read_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.decoding.decode import Decoded, decode_plain
from ops.lib.drafts.decoding.sampling import GreedyChoice
from ops.lib.target.model import Target


@pytest.fixture(scope="module")
def target(target, tmp_path_factory) -> TargetModel:
    return make_lively(target, tmp_path_factory.mktemp("lively") / "target")


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Draft:
    return make_draft(small_draft(Target.load(target)), tmp_path_factory.mktemp("draft"))


def changed_in_the_third_token(target, margin):
    """Instead of `decode_speculative_batch`: answers whose third token is another, by this margin."""
    loaded = Target.load(target)

    def decode(_target, _draft, samples, settings, _use, _clock=None):
        right = [decode_plain(loaded, sample, settings.max_new_tokens) for sample in samples]
        if settings.max_new_tokens < 2:  # the warm-up
            return right
        return [
            Decoded(
                (*answer.tokens[:2], answer.tokens[2] + 1),
                (1,),
                (*answer.margins[:2], margin),
                {2: {answer.tokens[2] + 1: 0.0, answer.tokens[2]: margin}} if margin < settings.within else {},
            )
            for answer in right
        ]

    return decode


@pytest.mark.parametrize(("margin", "tie_margin"), [(1.5, 1.0), (0.5, 0.0), (1e-6, 1e-4)])
def test_a_changed_answer_is_an_error_unless_both_passes_say_tie(
    draft, target, tokens, tmp_path, monkeypatch, margin, tie_margin
):
    monkeypatch.setattr(turns, "decode_speculative_batch", changed_in_the_third_token(target, margin))
    with pytest.raises(DataError, match=r"changed 4 of 4 answers beyond a tie"):
        run_evaluate(tmp_path, draft, target, tokens, tie_margin=tie_margin, random_draft=False)


class Nudged:
    """A target whose passes over a block add to one logit what makes the token win that stands at `rank` behind the
    best, by `margin` over the best one.
    """

    def __init__(self, rank: int, margin: float) -> None:
        self.rank, self.margin = rank, margin

    def __call__(self, _module, _arguments, output):
        logits = output.logits
        if logits.shape[1] == BLOCK:
            best = logits.topk(self.rank + 1)
            to_win = best.values[..., :1] + self.margin
            output.logits = logits.scatter(-1, best.indices[..., self.rank :], to_win)
        return output


@pytest.mark.parametrize(
    ("rank", "tie_margin", "verdict"), [(1, 1e9, "ties"), (1, 1e-3, "errors"), (15, 1e9, "ties"), (16, 1e9, "errors")]
)
def test_a_block_that_prefers_another_token_by_little_is_a_bug_unless_plain_decoding_has_it_near_too(
    draft, target, tokens, tmp_path, monkeypatch, capsys, rank, tie_margin, verdict
):
    load = Target.load

    def nudged(*arguments):
        loaded = load(*arguments)
        loaded.model.register_forward_hook(Nudged(rank, 1e-5))
        return loaded

    monkeypatch.setattr(Target, "load", nudged)
    changes = {"tie_margin": tie_margin, "random_draft": False, "max_new_tokens": 8}
    if verdict == "ties":
        stage = run_evaluate(tmp_path, draft, target, tokens, **changes)
        assert ([0], [4]) == (stage.metric("eval/lossless_errors"), stage.metric("eval/ties"))
        told = capsys.readouterr().out
        assert "info: tie: sample" in told
        assert "warning: 4 of 4 answers differ at a tie, more than one in ten" in told
        return
    with pytest.raises(DataError, match=r"changed 4 of 4 answers beyond a tie") as caught:
        run_evaluate(tmp_path, draft, target, tokens, **changes)
    assert 4 == str(caught.value).count("is far from the best one plainly\n")
    for difference in read_json(tmp_path / "work" / "report" / "report.json")["differences"]:
        assert 0 <= difference["speculative_margin"] < 1e-4
        assert (difference["behind_plain"], difference["behind_speculative"]) == (
            None,
            pytest.approx(difference["speculative_margin"]),
        )


def test_a_token_that_is_not_the_best_of_its_own_pass_is_a_bug_however_near_it_is(
    draft, target, tokens, tmp_path, monkeypatch
):
    def second_best(_self, _proposal, logits):
        return torch.zeros(len(logits), dtype=torch.int64), logits[:, 0].topk(2).indices[:, 1]

    monkeypatch.setattr(GreedyChoice, "accept", second_best)
    with pytest.raises(DataError, match="not even the best token of its own pass"):
        run_evaluate(
            tmp_path, draft, target, tokens, tie_margin=1e9, max_prompts=1, max_new_tokens=2, random_draft=False
        )


def test_a_loss_names_the_first_differing_token_with_both_margins_and_keeps_the_report(
    draft, target, tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr(turns, "decode_speculative_batch", changed_in_the_third_token(target, 1.25))
    with pytest.raises(DataError) as caught:
        run_evaluate(tmp_path, draft, target, tokens, random_draft=False)
    reader = TokenReader(tokens, "test")
    right = decode_plain(Target.load(target), reader.sample(0), 20)
    text = f"sample {reader.records[0]['id']} ({reader.records[0]['category']}): token 2 is {right.tokens[2] + 1} "
    assert text in str(caught.value)
    assert f"by a margin of {1.25:.2e}, plain decoding gives {right.tokens[2]} " in str(caught.value)
    assert f"by a margin of {right.margins[2]:.2e}; {right.tokens[2] + 1} is far from" in str(caught.value)
    kept = tmp_path / "work" / "report"
    assert str(kept) in str(caught.value)
    report = read_json(kept / "report.json")
    assert {"errors": 4, "ties": 0} == report["lossless"]
    assert [2, "error", 1.25] == [
        report["differences"][0][name] for name in ("position", "verdict", "speculative_margin")
    ]
    assert "differs: an error" in (kept / "prompts.html").read_text()
    assert [] == list((tmp_path / "out").iterdir())


def test_a_loss_is_gone_once_its_cause_is_fixed(draft, target, tokens, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(turns, "decode_speculative_batch", changed_in_the_third_token(target, 1.25))
        with pytest.raises(DataError, match="changed 4 of 4 answers"):
            run_evaluate(tmp_path, draft, target, tokens, random_draft=False)
    assert (tmp_path / "work" / "report" / "report.json").exists()
    again = run_evaluate(tmp_path, draft, target, tokens, random_draft=False)
    assert {"errors": 0, "ties": 0} == read_json(again.out_dir / "report.json")["lossless"]


def test_passes_that_differ_by_more_than_rounding_are_told_even_where_no_token_changed(
    draft, target, tokens, tmp_path, monkeypatch, capsys
):
    decode = turns.decode_speculative_batch

    def moved(*arguments):
        return [
            attrs.evolve(answer, margins=tuple(margin + 0.01 for margin in answer.margins))
            for answer in decode(*arguments)
        ]

    monkeypatch.setattr(turns, "decode_speculative_batch", moved)
    stage = run_evaluate(tmp_path, draft, target, tokens, max_prompts=1, random_draft=False)
    assert [0] == stage.metric("eval/lossless_errors")
    assert "warning: if both ways chose the same token, the margins" in capsys.readouterr().out
    rounded = read_json(stage.out_dir / "measurements.json")["rounding"]
    assert 0.01 == pytest.approx(rounded["median"], abs=1e-4)
