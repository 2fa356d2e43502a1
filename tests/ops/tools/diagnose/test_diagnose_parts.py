"""A planted loss of tau at a context length, turn, kind of token or group is named, with what the training lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from ops.artifacts import TokenShards
from ops.evaluate.prompts import Prompt
from ops.evaluate.statistics import steps_of
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import KINDS, TokenReader, TokenSample, write_token_shard
from ops.lib.drafts.decoding.decode import Decoded
from ops.tokenize_chat.kinds import CALL, END, TEXT, Markup, Opening, TokenKinds
from ops.tools.diagnose.judgement import CAUSE, FINE, MORE_PROMPTS, NOTE, UNMEASURED
from ops.tools.diagnose.parts import learnt_tokens, part_findings, tables_of_tau

BLOCK, EOS = 8, 1
WORDS, CALLED = (
    "It is so, and that is all there is to say of it. ",
    "<tool_call>look at the sky, and at the sea too</tool_call>",
)
KINDS_OF = TokenKinds(
    Markup(("<think>",), ("</think>",), Opening("<tool_call>")), lambda ids: "".join(map(chr, ids)), (EOS,)
)  # a token is a letter


@frozen
class Sample:
    """A conversation: the tokens before its answer, its turn and group, and the text of its answer."""

    before: int = 300
    turn: int = 0
    topic: str = "chat"
    answer: str = WORDS * 2


def token_sample(sample: Sample, name: str, with_kinds: bool = True) -> TokenSample:
    answer = [*map(ord, sample.answer), EOS]
    ids = torch.tensor([ord(".")] * sample.before + answer)
    mask = torch.arange(len(ids)) >= sample.before
    kinds = torch.zeros(len(ids), dtype=torch.uint8)
    kinds[mask] = torch.from_numpy(KINDS_OF.of(answer, ()))
    empty = torch.empty(0, 4), torch.empty(0, 3, dtype=torch.int64)
    answers = ((sample.before, sample.turn),) if with_kinds else ()
    return TokenSample(
        name, "text", ids, mask, *empty, sample.before, answers=answers, kinds=kinds if with_kinds else None
    )


def training(folder: Path, samples: Sequence[Sample], with_kinds: bool = True) -> TokenReader:
    """The reader of the tokens of a training on these samples."""
    folder.mkdir(parents=True)
    made = [token_sample(sample, str(place), with_kinds) for place, sample in enumerate(samples)]
    write_token_shard(folder / "train-00000.safetensors", made, 4)
    write_json(folder / "tokens.json", {"image_token_id": None, "shards": []})
    records = [
        {
            "id": each.id,
            "split": "train",
            "category": "text",
            "shard": "train-00000.safetensors",
            "row": place,
            "prompt_tokens": each.prompt_tokens,
            "topic": sample.topic,
            **({"answers": each.answers} if with_kinds else {}),
        }
        for place, (each, sample) in enumerate(zip(made, samples, strict=True))
    ]
    write_jsonl(folder / "samples.jsonl", records)
    return TokenReader(TokenShards(folder, "tokens"), "train")


def prompt(sample: Sample) -> Prompt:
    """The prompt of a conversation, as an evaluation asks it."""
    return Prompt(
        origin="a test",
        id="a",
        category="text",
        length=sample.before,
        has_images=False,
        sample=lambda: token_sample(sample, "a"),
        topic=sample.topic,
        turn=sample.turn,
    )


def decoded(sample: Sample, accepted: int, in_calls: int, noise: np.random.Generator) -> Decoded:
    """An answer whose steps accept so many tokens, or others where their anchor is in a call; one more or less."""
    ids = [*map(ord, sample.answer), EOS]
    kinds, steps, anchor = KINDS_OF.of(ids, ()), [], 0
    while anchor < len(ids) - 1:
        wanted = in_calls if kinds[anchor] == CALL else accepted
        steps.append(int(np.clip(wanted + noise.integers(-1, 2), 0, BLOCK - 1)))
        anchor += steps[-1] + 1
    return Decoded(tuple(ids), accepted=tuple(steps))


EASY, POOR, MANY = 5, 1, 8
USUAL = [Sample()] * MANY
PLANTED = {
    "contexts": ([Sample(before=5000)] * MANY, "tau 2.0", "at contexts 4k to 8k"),
    "turns": ([Sample(turn=3)] * MANY, "tau 2.0", "behind 3 answers"),
    "groups": ([Sample(topic="code")] * MANY, "tau 2.0", 'in the group "code"'),
    "kinds of tokens": ([Sample(answer=WORDS + CALLED)] * MANY, "tau 2.", "in calls of tools"),
}


def judged(held_out, reader, poor, noise=0):
    """The findings, by name, of a draft whose answers to the samples in `poor` are poor, or their calls."""
    generator = np.random.default_rng(noise)
    answers = []
    for sample in held_out:
        is_poor = sample in poor and CALLED not in sample.answer
        answers.append(decoded(sample, POOR if is_poor else EASY, POOR if sample in poor else EASY, generator))
    learnt = None if reader is None else learnt_tokens(reader, KINDS_OF)
    tables = tables_of_tau([prompt(sample) for sample in held_out], answers, KINDS_OF, learnt, BLOCK)
    whole = [tokens for each in answers for at, tokens in steps_of(each) if at + BLOCK <= each.generated]
    for parts in tables.values():
        assert sum(each.generated for part in parts for each in part.own) == sum(whole)
        assert sum(each.steps for part in parts for each in part.own) == len(whole)
        assert sum(part.figures.share for part in parts) == pytest.approx(1)
    return {finding.code: finding for finding in part_findings(tables, learnt)}, tables


@pytest.mark.parametrize("name", PLANTED)
def test_a_loss_where_the_training_has_nothing_is_a_cause_with_its_name(name, tmp_path):
    lost, tau, where = PLANTED[name]
    found, _ = judged(USUAL + lost, training(tmp_path / "t", USUAL * 4), lost)
    assert [name] == [code for code, finding in found.items() if finding.level == CAUSE]
    assert found[name].what.startswith(tau) and f" {where}, " in found[name].what
    assert "and 0.0% of the " in found[name].what and found[name].advice.endswith("and train again")
    if name == "contexts":
        longest = Sample().before + len(Sample().answer)
        assert f"of which none has more than {longest:,} tokens before it" in found[name].what


@pytest.mark.parametrize("name", PLANTED)
def test_a_loss_where_the_training_has_its_share_is_no_cause(name, tmp_path):
    lost, _, where = PLANTED[name]
    found, _ = judged(USUAL + lost, training(tmp_path / "t", (USUAL + lost) * 2), lost)
    assert (NOTE, True) == (found[name].level, where in found[name].what)
    assert {FINE} == {finding.level for code, finding in found.items() if code != name}


@pytest.mark.parametrize("name", PLANTED)
def test_what_the_training_lacks_is_no_cause_where_tau_is_as_high(name, tmp_path):
    lost, _, _ = PLANTED[name]
    found, _ = judged(USUAL + lost, training(tmp_path / "t", USUAL), [])
    assert {FINE} == {finding.level for finding in found.values()}


def test_a_few_prompts_make_nothing_certain_and_more_are_asked_for(tmp_path):
    lost = PLANTED["contexts"][0][:2]
    found, _ = judged(USUAL + lost, training(tmp_path / "t", USUAL), lost)
    assert (UNMEASURED, MORE_PROMPTS) == (found["contexts"].level, found["contexts"].advice)
    assert "the training hardly has at contexts 4k to 8k" in found["contexts"].what


def test_of_two_losses_the_one_that_the_training_lacks_is_named(tmp_path):
    had, lacking = [Sample(topic="maths")] * MANY * 2, [Sample(topic="code")] * MANY
    found, _ = judged(USUAL * 2 + had + lacking, training(tmp_path / "t", USUAL + had), had + lacking)
    assert (CAUSE, True) == (found["groups"].level, 'in the group "code"' in found["groups"].what)


def test_parts_that_the_training_lacks_are_one_cause_where_each_alone_is_too_few(tmp_path):
    lacking = [Sample(topic=topic) for topic in ("code", "maths", "law") for _ in range(3)]
    found, _ = judged(USUAL + lacking, training(tmp_path / "t", USUAL * 4), lacking)
    text = found["groups"].what
    assert (CAUSE, True) == (found["groups"].level, 'in the group "' in text)
    assert all(topic in text.partition("\n")[0] for topic in ("code", "maths", "law"))
    fine, _ = judged(USUAL + lacking, training(tmp_path / "fine", USUAL * 4), [])
    assert FINE == fine["groups"].level


def test_without_the_training_s_samples_a_loss_is_a_note():
    lost, _, where = PLANTED["turns"]
    found, tables = judged(USUAL + lost, None, lost)
    assert (NOTE, True) == (found["turns"].level, where in found["turns"].what)
    assert "the store no longer has the training samples" in found["turns"].what
    assert {None} == {part.figures.learnt for parts in tables.values() for part in parts}


def test_tokens_that_were_tokenised_without_kinds_are_counted_as_those_with(tmp_path):
    samples = [Sample(answer=WORDS + CALLED), Sample(before=1020, topic="code"), Sample(answer="")]
    counted = [
        learnt_tokens(training(tmp_path / str(stored), samples, with_kinds=stored), KINDS_OF)
        for stored in (True, False)
    ]
    assert counted[0] == counted[1]
    by_hand: dict[str, Counter[str]] = {table: Counter() for table in ("context", "turn", "kind", "group")}
    for each in samples:
        for place, kind in enumerate(KINDS_OF.of([*map(ord, each.answer), EOS], ())):
            by_hand["context"]["00k" if each.before + place < 1024 else "01k"] += 1
            by_hand["turn"]["0"] += 1
            by_hand["group"][each.topic] += 1
            by_hand["kind"].update([KINDS[kind]] if kind != END else [])
    assert by_hand == counted[0].tokens
    assert {KINDS[TEXT], KINDS[CALL]} == counted[0].tokens["kind"].keys()
    assert 1020 + len(WORDS * 2) == counted[0].longest
    unknown = learnt_tokens(training(tmp_path / "unknown", samples, with_kinds=False), None)
    assert not unknown.tokens["kind"] and unknown.tokens["turn"] == counted[0].tokens["turn"]


@pytest.mark.parametrize("name", PLANTED)
def test_what_the_training_lacks_is_named_where_all_held_out_answers_are_there(name, tmp_path):
    """Nothing is beside them to compare tau with, so it is no cause."""
    lost, _, where = PLANTED[name]
    if name == "kinds of tokens":
        lost = [Sample(answer=CALLED * 2)] * MANY
    found, _ = judged(lost, training(tmp_path / "t", USUAL * 4), lost)
    assert (NOTE, True) == (found[name].level, f"all held-out tokens are {where}, " in found[name].what)
    assert "and 0.0% of the " in found[name].what and found[name].advice.endswith("and train again")
    learnt_there, _ = judged(lost, training(tmp_path / "there", lost), lost)
    assert (FINE, True) == (learnt_there[name].level, "no other part" in learnt_there[name].what)


def test_tables_that_are_not_known_are_left_out(tmp_path):
    answers = [decoded(Sample(), EASY, EASY, np.random.default_rng(0))]
    tables = tables_of_tau([evolve(prompt(Sample()), turn=None, topic=None)], answers, None, None, BLOCK)
    assert ["context"] == list(tables)
    [finding] = part_findings(tables, None)
    assert (FINE, True) == (finding.level, "no other part" in finding.what)
