"""The checks of a diagnosis that need no decoding: each finds what was put wrong, and nothing in what is right."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from simulated_answers import simulated

from dsl.finding import Finding
from ops.artifacts import Draft, DraftCheckpoint, TargetFeatures, TargetModel
from ops.lib.data.files import read_json, write_json
from ops.lib.data.sample_account import Loss
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.losses.slots import draw_anchors
from ops.lib.target.model import Target
from ops.tools.diagnose import training_data
from ops.tools.diagnose.bench import CHANCE, paired_gain, spread_samples, tau_of, unpaired_gain
from ops.tools.diagnose.curve import curve_finding, flat_finding, skipped_finding
from ops.tools.diagnose.export import target_finding
from ops.tools.diagnose.features import features_finding
from ops.tools.diagnose.feeding import unless_open
from ops.tools.diagnose.judgement import (
    CAUSE,
    FINE,
    MORE_PROMPTS,
    NOTE,
    TOO_FEW,
    UNJUDGED,
    UNMEASURED,
    judged,
    measured_of,
    sorted_findings,
    unjudged,
    unmeasured,
    with_next_step,
)
from ops.tools.diagnose.outcomes import (
    amount_finding,
    category_finding,
    decoding_finding,
    gap_finding,
    random_finding,
    repetition_finding,
)
from ops.tools.diagnose.text import diagnosis_text
from ops.tools.diagnose.training_data import (
    LEAST_OWN,
    anchors_by_category,
    count_own,
    kept_findings,
    look,
    mask_findings,
    own_finding,
)
from ops.train_dflash.verdicts import LONGER

IMAGES: list[Any] = [SimpleNamespace(category="image")] * 8
TEXTS: list[Any] = [SimpleNamespace(category="text")] * 8


def answers(tau: int, count: int = 8, steps: int = 6) -> list[Decoded]:
    """So many answers with this tau, each of so many steps."""
    return [Decoded(tuple(range(tau * steps + 1)), accepted=(tau - 1,) * steps) for _ in range(count)]


def of_taus(*taus: int) -> list[Decoded]:
    """Answers with these taus, one each."""
    return [answer for tau in taus for answer in answers(tau, count=1)]


@pytest.fixture(scope="module")
def loaded(target) -> Target:
    return Target.load(target)


def test_data_of_which_much_was_lost_is_not_called_ok():
    """Answers of other tokens are a cause of a low tau, missing samples are worth knowing."""
    losses = (
        ("ingest", Loss("samples", "40% of the samples (4 of 10) are dropped: 4 image missing", "set image_root")),
        ("regenerate", Loss("answers", "27% of the answers (163 of 611) are changed", "set drop_retokenised = true")),
    )
    result = {
        "node": "export",
        "split": "test",
        "instead_of": None,
        "budget": None,
        "prompts": 1,
        "dtype": "float32",
        "device": "cpu",
        "block_size": 8,
        "evaluation": None,
        "tau": {"exported": 3.0, "low": None, "high": None, "corrected": 3.0},
        "findings": [each.to_json() for each in sorted_findings(kept_findings(losses), {})],
        "gains": {},
    }
    normal = "normal: no node loses more than 10% of its samples or answers"
    assert [
        f"CAUSE  samples kept: regenerate: 27% of the answers (163 of 611) are changed | {normal} | "
        "do: set drop_retokenised = true",
        f"note   samples kept: ingest: 40% of the samples (4 of 10) are dropped: 4 image missing | {normal} | "
        "may help: set image_root",
        "causes of a low tau, the largest first: samples kept",
    ] == diagnosis_text(result).splitlines()[1:]
    (fine,) = kept_findings(())
    assert FINE == fine.level
    (unknown,) = kept_findings(None)
    assert unknown.level == UNMEASURED


def test_stored_features_that_the_target_gives_again_are_no_cause(loaded, features, tokens):
    found = features_finding(loaded, features, tokens, is_online=False)
    assert found.level != CAUSE
    assert found.level != UNMEASURED


def test_features_of_the_layer_behind_are_named_with_that_layer(loaded, features, tokens, tmp_path):
    shifted = tmp_path / "features"
    shutil.copytree(features.path, shifted)
    info = read_json(shifted / "features.json")
    told = [layer - 1 for layer in info["target_layer_ids"]]
    write_json(shifted / "features.json", info | {"target_layer_ids": told})
    found = features_finding(loaded, TargetFeatures(shifted, "shifted"), tokens, is_online=False)
    assert found.level == CAUSE
    assert f"what is stored for layer {told[0]} is layer {told[0] + 1}'s" in found.what


def test_features_of_other_tokens_are_named(loaded, features, tokens, tmp_path):
    swapped = tmp_path / "tokens"
    shutil.copytree(tokens.path, swapped)
    rows = (swapped / "samples.jsonl").read_text().splitlines()
    (swapped / "samples.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    found = features_finding(loaded, features, evolve(tokens, path=swapped), is_online=False)
    assert found.level == CAUSE
    assert "captured from other tokens" in found.what


def test_a_training_that_captures_online_has_no_features_to_compare(loaded):
    found = features_finding(loaded, None, None, is_online=True)
    assert found.level == UNMEASURED
    assert "online" in found.what


def test_answers_of_the_data_set_are_not_the_targets_own(loaded, tokens):
    reader = TokenReader(tokens, "train")
    samples = [reader.sample(index) for index in range(3)]
    with torch.no_grad():
        chosen = 0
        for sample in samples:
            best = loaded.forward(loaded.inputs([sample])).logits[0].argmax(-1)
            chosen += int((best[:-1] == sample.input_ids[1:])[sample.loss_mask[1:]].sum())
    own = count_own(loaded, samples)
    assert (chosen, sum(int(sample.loss_mask.sum()) for sample in samples)) == (own.chosen, own.tokens)
    assert own.tokens == own.expected
    found = own_finding(loaded, samples, None)
    assert found.level == CAUSE
    assert "put regenerate_answers between" in found.advice
    kept = own_finding(loaded, samples, None, "answer")
    assert 'answer left the answers of the data set unchanged (answers = "data"): set answers = "target"' in kept.advice
    again = own_finding(loaded, samples, 0.0)
    assert again.level == CAUSE
    assert "differ from this target's" in again.advice


def test_sampled_answers_of_the_target_s_own_are_no_cause(loaded, tokens):
    reader, temperature = TokenReader(tokens, "train"), 0.1
    torch.manual_seed(0)
    samples = []
    for index in range(4):
        sample = reader.sample(index)
        ids_S = sample.input_ids.clone()
        for place in sample.loss_mask.nonzero().squeeze(1).tolist():
            with torch.no_grad():
                logits_V = loaded.forward(loaded.inputs([evolve(sample, input_ids=ids_S)])).logits[0, place - 1]
            ids_S[place] = torch.multinomial((logits_V / temperature).softmax(-1), 1)
        samples.append(evolve(sample, input_ids=ids_S))
    own = count_own(loaded, samples, temperature)
    assert own.share < LEAST_OWN and abs(own.share - own.expected_share) < 0.1
    found = own_finding(loaded, samples, temperature)
    assert found.level != CAUSE
    assert "at temperature 0.1, at which they were regenerated" in found.what
    assert own_finding(loaded, samples, None).level == CAUSE
    assert own_finding(loaded, [reader.sample(0)], temperature).level == CAUSE
    assert own_finding(loaded, samples, 1.0).level != CAUSE  # so hot that a few tokens more or less are chance


def test_loss_mask_and_blocks_are_counted_as_a_loop_over_slots_counts_them(tokens):
    reader, block = TokenReader(tokens, "train"), 8
    seen = look(reader, reader.info["mask_token_id"], block)
    slots = kept = 0
    for index in range(len(reader)):
        mask = reader.labels(index)[1].tolist()
        for anchor in range(len(mask) - 1):
            if mask[anchor] and mask[anchor + 1]:
                slots += block - 1
                ahead = mask[anchor + 1 : anchor + block]
                kept += next((place for place, learnt in enumerate(ahead) if not learnt), len(ahead))
    assert (slots, kept) == (seen.slots, seen.kept)
    assert (0, 0) == (seen.without, seen.mask_tokens)


def test_the_loss_mask_is_judged_by_the_texts_however_large_the_images_are(tokens, target, monkeypatch):
    reader = TokenReader(tokens, "train")
    places = [int((reader.labels(place)[0] == reader.info["image_token_id"]).sum()) for place in range(len(reader))]
    seen = look(reader, reader.info["mask_token_id"], 8)
    assert seen.image_tokens == sum(places) > 0
    large = evolve(seen, tokens=305_000, image_tokens=300_000, loss_tokens=400)
    monkeypatch.setattr(training_data, "look", lambda *_: large)
    found = mask_findings(tokens, target, 7, 8)[0]
    assert found.level != CAUSE
    assert found.what.startswith("8.0% of 5,000 text tokens of the training, without the 300,000 image tokens; ")


def test_tokens_of_the_training_are_judged(tokens, target):
    mask_token_id = read_json(tokens.path / "tokens.json")["mask_token_id"]
    assert [] == [found.code for found in mask_findings(tokens, target, mask_token_id, 8) if found.level == CAUSE]
    end = read_json(target.path / "target.json")["eos_token_ids"][0]
    by_name = {found.code: found for found in mask_findings(tokens, target, end, 512)}
    assert by_name["cut blocks"].level == CAUSE
    assert by_name["mask token in texts"].level == CAUSE
    assert "is an EOS id" in by_name["mask token in texts"].what


def test_a_draft_of_another_target_is_named_and_what_that_explains_is_marked(target, tmp_path):
    write_json(tmp_path / "training.json", {"target": "another"})
    training, draft = DraftCheckpoint(tmp_path, "training"), Draft(tmp_path, "draft")
    wrong = target_finding(draft, training, target)
    assert wrong.level == CAUSE
    own = judged("own answers", "", "", "regenerate", is_cause=True)

    def advice(found: Finding, of_target: Finding) -> str:
        return next(each for each in sorted_findings([of_target, found], {}) if each.code == found.code).advice

    assert "fix target, which explains this; if it remains, regenerate" == advice(own, wrong)
    for found, of_target in (
        (evolve(own, level=NOTE), wrong),
        (evolve(own, code="loss mask"), wrong),
        (own, evolve(wrong, level=FINE)),
    ):
        assert "regenerate" == advice(found, of_target)
    assert target_finding(draft, training, TargetModel(target.path, "another")).level != CAUSE


@pytest.mark.parametrize(("held_out", "is_cause"), [(5, False), (2, True)])
def test_a_draft_that_knows_the_training_by_heart_alone_is_named(held_out, is_cause):
    assert is_cause == (gap_finding(answers(6), answers(held_out), {}).level == CAUSE)


@pytest.mark.parametrize(
    ("samples", "held_out", "is_cause"), [(999, 2, True), (1000, 2, False), (999, 6, False), (999, 5, True)]
)
def test_too_little_data_is_named_where_tau_is_lower_on_what_the_training_never_saw(samples, held_out, is_cause):
    found = amount_finding(answers(6), answers(held_out), {"samples": 1200, "samples_seen": samples})
    assert is_cause == (found.level == CAUSE)
    assert (samples < 1000 and not is_cause) == (found.level == NOTE)
    assert f"{samples:,} of 1,200 samples of the training were in a step; tau is 6.00 on some" in found.what
    assert found.level == FINE or "add samples like those to be served to the data of ingest" in found.advice


def test_the_amount_of_data_is_not_judged_without_its_record_and_by_a_few_prompts():
    record = {"samples": 40, "samples_seen": 40}
    assert "record is gone" in amount_finding(answers(6), answers(2), {}).what
    assert amount_finding(answers(1, steps=0), answers(2), record).level == UNMEASURED
    found = amount_finding(answers(6), answers(2, count=3), record)
    assert (UNMEASURED, MORE_PROMPTS) == (found.level, found.advice)


@pytest.mark.parametrize(
    ("found", "step"),
    [
        ({"test": 16}, "diagnose with more prompts (--prompts)"),
        ({"test": 5}, "the split test has only 5 samples: raise test_fraction of ingest, or add samples to the data, "),
        ({"val": 0}, "the split val has only 0 samples: raise val_fraction of ingest, or add samples to the data, "),
        ({"test": 16, "train": 3}, "the split train has only 3 samples: add samples to the data, and run the pipeline"),
        (
            {"test": 5, "train": 3},
            "the split test has only 5 samples: raise test_fraction of ingest, or add samples to",
        ),
    ],
)
def test_what_more_prompts_could_decide_names_how_to_get_them(found, step):
    open_ = gap_finding(answers(6, count=3), answers(1, count=3), {})
    assert with_next_step(open_, 16, found).advice.startswith(step)
    other = unmeasured("held-out gap", "the record is gone")
    assert other == with_next_step(other, 16, found)


@pytest.mark.parametrize(("text", "is_note"), [(4, False), (2, True)])
def test_a_category_far_below_the_other_is_worth_knowing_and_no_cause(text, is_note):
    prompts: list[Any] = [SimpleNamespace(category=name) for name in ("image", "text") for _ in range(8)]
    found = category_finding(prompts, [*answers(6), *answers(text)])
    assert (NOTE if is_note else FINE) == found.level
    assert f"text {text}.00 (8 prompts), image 6.00 (8 prompts)" in found.what


@pytest.mark.parametrize(("tau", "is_own", "is_cause"), [(5, True, False), (2, True, True), (2, False, False)])
def test_decoding_that_keeps_nothing_of_what_training_promised_is_named(tau, is_own, is_cause):
    training = {"final_metrics": {"train/expected_tau": 6.0, "train/accuracy": 0.98}}
    assert is_cause == (decoding_finding(IMAGES, answers(tau), training, {"image": 9}, 6, is_own=is_own).level == CAUSE)


@pytest.mark.parametrize(("texts", "told", "is_cause"), [(1, "gives 5.50", False), (18, "gives 1.50", True)])
def test_decoding_is_weighed_by_what_the_training_drew_most_anchors_of(texts, told, is_cause):
    training = {"final_metrics": {"train/expected_tau": 5.5, "train/accuracy": 0.8}}
    found = decoding_finding(
        [*IMAGES[:4], *TEXTS[:4]],
        [*answers(6, count=4), *answers(1, count=4, steps=40)],
        training,
        {"image": 9 if texts == 1 else 2, "text": texts},
        6,
        is_own=True,
    )
    assert told in found.what
    assert is_cause == (found.level == CAUSE)


def test_a_draft_whose_short_answers_end_within_their_blocks_is_not_accused_of_their_ends():
    training = {"final_metrics": {"train/expected_tau": 6.0, "train/accuracy": 1.0}}
    perfect = [Decoded(tuple(range(8)), accepted=(5, 0)) for _ in range(8)]
    found = decoding_finding(IMAGES, perfect, training, {"image": 9}, 6, is_own=True)
    assert found.level != CAUSE
    assert "gives 6.00" in found.what
    shorter = [Decoded(tuple(range(6)), accepted=(4,))]
    told = decoding_finding(IMAGES[:1], shorter, training, {"image": 9}, 6, is_own=True)
    assert told.level == UNMEASURED
    assert "no answer to the training prompts is as long as a block (6 tokens)" in told.what


def test_answers_as_long_as_a_block_do_not_pick_the_steps_that_accepted_little():
    """Four of five slots right: what an answer's last step accepts is not to be left out for its being the last."""
    block, generator = 8, np.random.default_rng(0)
    expected = sum(0.8**slot for slot in range(block))
    training = {"final_metrics": {"train/expected_tau": expected, "train/accuracy": 0.8}}
    for length in (block, block + 2, 2 * block):
        seen = [simulated(generator, 0.8, block, length) for _ in range(400)]
        found = decoding_finding(IMAGES * 50, seen, training, {"image": 9}, block, is_own=True)
        assert found.level != UNMEASURED and found.level != CAUSE
        assert float(found.what.partition("gives ")[2].partition(",")[0]) == pytest.approx(expected, rel=0.08)


def test_a_cause_that_few_prompts_may_show_by_chance_is_not_named_and_more_prompts_are_asked_for():
    training = {"final_metrics": {"train/expected_tau": 6.0, "train/accuracy": 0.98}}
    found = [
        decoding_finding(IMAGES[:3], answers(2, count=3), training, {"image": 9}, 6, is_own=True),
        decoding_finding(IMAGES[:4], of_taus(1, 1, 4, 5), training, {"image": 9}, 6, is_own=True),
        gap_finding(answers(6, count=3), answers(1, count=3), {}),
        random_finding(answers(1, count=3), answers(1, count=3)),
        random_finding(of_taus(1, 1, 1, 2), answers(1, count=4)),
        random_finding(answers(1, count=4, steps=2), answers(1, count=4, steps=2)),
    ]
    twice = {"final_metrics": {"train/expected_tau": 2.0, "train/accuracy": 0.5}}
    found.append(decoding_finding(IMAGES[:4], answers(1, count=4, steps=6), twice, {"image": 9}, 6, is_own=True))
    assert [UNMEASURED] * 7 == [each.level for each in found]
    assert [True, True, True, False, True, True, True] == [TOO_FEW in each.what for each in found]
    assert "4 prompts with a step are needed, and there are 3" in found[3].what
    assert [MORE_PROMPTS] * 7 == [each.advice for each in found]


def test_what_wrong_positions_may_explain_is_not_named_where_these_were_not_measured():
    cause = judged("training against decoding", "tau 1.31", "", is_cause=True)
    fine = judged("mask token", "", "")
    assert cause == unless_open(cause, [fine])
    told = unless_open(cause, [fine, unmeasured("positions", TOO_FEW)])
    assert (UNMEASURED, "tau 1.31; positions, not measured, may explain that") == (told.level, told.what)


def test_groups_without_a_verification_step_are_told_and_left_out():
    prompts: list[Any] = [SimpleNamespace(category=name) for name in "aaaabbbbcccc"]
    nothing = [Decoded((0,))] * 4
    found = category_finding(prompts, [*nothing, *answers(4, count=4), *answers(1, count=4)])
    assert "tau c 1.00 (4 prompts), b 4.00 (4 prompts), a no step (4 prompts)" == measured_of(found)
    assert found.level == NOTE and '"c"' in found.advice
    alone = category_finding(prompts[:8], [*nothing, *answers(4, count=4)])
    assert FINE == alone.level
    assert gap_finding(nothing, answers(4), {}).level == UNMEASURED


def test_a_draft_no_better_than_random_weights_is_named():
    assert random_finding(answers(1), answers(1)).level == CAUSE
    assert random_finding(answers(3), answers(1)).level != CAUSE


@pytest.mark.parametrize(("slope", "is_cause"), [(0.0, False), (-0.02, True)])
def test_a_loss_that_still_falls_at_the_end_is_named(slope, is_cause):
    curve = [(step, 4 + slope * step + 0.05 * (-1) ** step) for step in range(1, 101)]
    assert is_cause == (curve_finding(curve, {}).level == CAUSE)


@pytest.mark.parametrize(
    ("select", "told"), [("tau", "tau on val was best at step 50 of 100; "), ("loss", "the loss on val was lowest at ")]
)
def test_a_loss_that_still_falls_behind_the_selected_step_is_no_cause(select, told):
    curve = [(step, 4 - 0.02 * step) for step in range(1, 101)]
    early = curve_finding(curve, {"selected_step": 50, "recipe": {"select": select}})
    assert early.level != CAUSE
    assert early.what.startswith(told)
    late = curve_finding(curve, {"selected_step": 90, "recipe": {"select": select}})
    assert late.level == CAUSE
    assert late.what.startswith("train/loss fell")


def test_what_training_promised_is_that_of_the_selected_step():
    last = {"train/expected_tau": 6.0, "train/accuracy": 0.98}
    selected = {"train/expected_tau": 2.2, "train/accuracy": 0.5}
    training = {"final_metrics": last, "selected_metrics": selected}
    found = decoding_finding(IMAGES, answers(2), training, {"image": 9}, 6, is_own=True)
    assert found.level != CAUSE
    assert "predicts tau 2.20" in found.what
    assert "slots right: 50% in training" in gap_finding(answers(2), answers(2), training).what


@pytest.mark.parametrize("num_anchors", [3, 16, None])
def test_anchors_are_counted_by_category_as_the_training_draws_them(tokens, num_anchors):
    reader, expected = TokenReader(tokens, "train"), {"image": 0, "text": 0}
    for place, record in enumerate(reader.records):
        mask_S = reader.labels(place)[1]
        most = len(mask_S) if num_anchors is None else num_anchors
        expected[record["category"]] += len(draw_anchors(mask_S, most, seed=0, epoch=0, sample=place))
    assert expected == anchors_by_category(reader, num_anchors)


def test_fewer_than_four_prompts_make_nothing_certain():
    assert not unpaired_gain(answers(6, count=1), answers(1, count=15)).is_certain
    assert not unpaired_gain(answers(6, count=3), answers(1, count=15)).is_certain
    assert unpaired_gain(answers(6, count=4), answers(1, count=15)).is_certain
    without_step = [Decoded((0,))] * 9
    assert not unpaired_gain([*answers(6, count=3), *without_step], answers(1)).is_certain
    assert not paired_gain([*answers(6, count=3), *without_step], [*answers(1, count=3), *without_step]).is_certain


def test_a_gain_picked_out_of_many_must_be_the_more_certain():
    after, before = of_taus(4, 4, 5, 5, 6, 6, 7, 7), of_taus(3, 3, 4, 4, 3, 3, 2, 2)
    assert unpaired_gain(after, before).is_certain
    assert not unpaired_gain(after, before, CHANCE / 10).is_certain


def test_of_four_prompts_a_gain_of_each_may_be_chance():
    assert not unpaired_gain(of_taus(3, 4, 5, 6), of_taus(1, 2, 2, 2)).is_certain


def test_a_fall_within_the_noise_of_the_loss_is_no_cause():
    torch.manual_seed(0)
    curve = [(step, float(2 + torch.randn(()))) for step in range(1, 41)]
    assert curve_finding(curve, {}).level != CAUSE
    assert curve_finding(curve[:10], {}).level == UNMEASURED
    rare = curve_finding([(step, 3.0) for step in range(10, 111, 10)], {})
    assert "11 points of train/loss are too few; lower log_every" in rare.what
    short = curve_finding([(step, 3.0) for step in range(5, 71, 5)], {})
    assert (False, f"70 steps are too few to see where train/loss is heading; {LONGER}") == (
        short.level != UNMEASURED,
        short.what,
    )
    assert curve_finding([], {}).level == UNMEASURED


@pytest.mark.parametrize(
    ("floor", "fall", "noise", "told"),
    [(3.0, 0.0, 0.05, "flat since step 10"), (3.0, 1.0, 0.05, ""), (0.3, 0.0, 0.05, ""), (3.0, 0.0, 0.4, "flat since")],
)
def test_a_high_loss_that_does_not_fall_over_most_of_the_training_is_named(floor, fall, noise, told):
    curve = [
        (step, floor + max(0.0, 10 - step) + fall * (1 - step / 230) + noise * (-1) ** (step // 5))
        for step in range(5, 231, 5)
    ]
    found = flat_finding(curve)
    assert (CAUSE if told else FINE) == found.level
    assert told in found.what
    assert not told or "lower lr" in found.advice
    assert [UNMEASURED] * 2 == [flat_finding(short).level for short in ([], curve[:10])]


def test_a_gain_that_hangs_on_one_prompt_is_not_certain():
    before = answers(2)
    after = [*answers(4, count=1, steps=12), *answers(2, count=7)]
    gain = paired_gain(after, before)
    assert gain.value == pytest.approx(tau_of(after) - 2)
    assert (True, False) == (gain.counts, gain.is_certain)
    assert paired_gain(answers(3), before).is_certain


def test_samples_are_spread_over_the_categories(tokens):
    reader = TokenReader(tokens, "train")
    chosen = spread_samples(reader, 7)
    assert 7 == len({sample.id for sample in chosen})
    counts = [sum(sample.category == name for sample in chosen) for name in ("image", "text")]
    assert [3, 4] == sorted(counts)
    assert len(reader) == len(spread_samples(reader, 10_000))


def test_causes_come_first_by_what_they_explain():
    def cause(name: str) -> Finding:
        return judged(name, "", "", is_cause=True)

    fine, note = judged("fine", "", ""), judged("note", "", "", is_note=True)
    causes = [cause("small"), cause("target"), cause("large")]
    found = [unmeasured("gone", ""), unjudged(cause("open")), cause("own answers"), fine, note, *causes]
    gains = {"small": 0.5, "large": 2.0, "own answers": 9.0, "fine": 9.0, "open": 7.0}
    ordered = [each.code for each in sorted_findings(found, gains)]
    assert ["large", "small", "target", "own answers", "note", "fine", "open", "gone"] == ordered


def test_at_the_ceiling_of_tau_a_cause_is_not_judged_and_what_is_none_has_no_advice():
    cause, note, fine = (
        judged("x", "", "", "mend it", is_cause=is_cause, is_note=is_note)
        for is_cause, is_note in ((True, False), (False, True), (False, False))
    )
    assert UNJUDGED == unjudged(cause).level
    assert [note, fine] == [unjudged(note), unjudged(fine)]
    assert ["mend it", "mend it", "", ""] == [found.advice for found in (cause, note, fine, unjudged(cause))]


def test_answers_of_the_same_few_tokens_are_a_note():
    cycle, text = Decoded((1, 2) * 10), Decoded(tuple(range(20)))
    assert repetition_finding([cycle, text]).level != NOTE
    found = repetition_finding([cycle, cycle, text])
    assert found.level == NOTE and "2 of 3 answers of the target repeat" in found.what


def test_skipped_steps_are_a_cause_above_one_per_cent():
    assert skipped_finding({}).level == UNMEASURED
    assert skipped_finding({"steps": 100, "skipped_steps": 1}).level != CAUSE
    found = skipped_finding({"steps": 100, "skipped_steps": 2, "nonfinite_steps": 2})
    assert found.level == CAUSE
    assert "2 of 100 steps were skipped (2 with a loss or gradient that is not finite)" == measured_of(found)
    assert found.advice.startswith("lower lr")
