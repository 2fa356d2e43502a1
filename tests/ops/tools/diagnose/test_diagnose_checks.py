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

from ops.artifacts import Draft, DraftCheckpoint, TargetFeatures, TargetModel
from ops.lib.data.files import read_json, write_json
from ops.lib.data.sample_account import Loss
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.losses.slots import draw_anchors
from ops.lib.target.model import Target
from ops.tools.diagnose import masks
from ops.tools.diagnose.answers import LEAST_OWN, count_own, kept_findings, own_finding
from ops.tools.diagnose.bench import paired_gain, spread_samples, tau_of, unpaired_gain
from ops.tools.diagnose.curve import curve_finding, flat_finding, skipped_finding
from ops.tools.diagnose.features import features_finding
from ops.tools.diagnose.feeding import unless_open
from ops.tools.diagnose.finding import TOO_FEW, Finding, sorted_findings, unjudged, unmeasured, with_next_step
from ops.tools.diagnose.masks import anchors_by_category, look, mask_findings
from ops.tools.diagnose.outcomes import (
    amount_finding,
    category_finding,
    decoding_finding,
    gap_finding,
    random_finding,
    repetition_finding,
)
from ops.tools.diagnose.text import diagnosis_text
from ops.tools.diagnose.trained import explained, target_finding
from ops.train_dflash.verdicts import LONGER

IMAGES: list[Any] = [SimpleNamespace(category="image")] * 8
TEXTS: list[Any] = [SimpleNamespace(category="text")] * 8


def answers(tau: int, count: int = 8, steps: int = 6) -> list[Decoded]:
    """So many answers with this tau, each of so many steps."""
    return [Decoded(tuple(range(tau * steps + 1)), accepted=(tau - 1,) * steps) for _ in range(count)]


def of_taus(*taus: int) -> list[Decoded]:
    """One answer of each."""
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
        "prompts": 1,
        "dtype": "float32",
        "device": "cpu",
        "block_size": 8,
        "evaluation": None,
        "tau": {"exported": 3.0, "low": None, "high": None, "corrected": 3.0},
        "findings": [each.to_json() for each in sorted_findings(kept_findings(losses))],
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
    assert (False, False, True) == (fine.is_cause, fine.is_note, fine.is_measured)
    (unknown,) = kept_findings(None)
    assert not unknown.is_measured


def test_stored_features_that_the_target_gives_again_are_no_cause(loaded, features, tokens):
    found = features_finding(loaded, features, tokens, is_online=False)
    assert not found.is_cause
    assert found.is_measured


def test_features_of_the_layer_behind_are_named_with_that_layer(loaded, features, tokens, tmp_path):
    shifted = tmp_path / "features"
    shutil.copytree(features.path, shifted)
    info = read_json(shifted / "features.json")
    told = [layer - 1 for layer in info["target_layer_ids"]]
    write_json(shifted / "features.json", info | {"target_layer_ids": told})
    found = features_finding(loaded, TargetFeatures(shifted, "shifted"), tokens, is_online=False)
    assert found.is_cause
    assert f"what is stored for layer {told[0]} is layer {told[0] + 1}'s" in found.measured


def test_features_of_other_tokens_are_named(loaded, features, tokens, tmp_path):
    swapped = tmp_path / "tokens"
    shutil.copytree(tokens.path, swapped)
    rows = (swapped / "samples.jsonl").read_text().splitlines()
    (swapped / "samples.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    found = features_finding(loaded, features, evolve(tokens, path=swapped), is_online=False)
    assert found.is_cause
    assert "captured from other tokens" in found.measured


def test_a_training_that_captures_online_has_no_features_to_compare(loaded):
    found = features_finding(loaded, None, None, is_online=True)
    assert not found.is_measured
    assert "online" in found.measured


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
    assert found.is_cause
    assert "put regenerate_answers between" in found.advice
    kept = own_finding(loaded, samples, None, "answer")
    assert 'answer left the answers of the data set unchanged (answers = "data"): set answers = "target"' in kept.advice
    again = own_finding(loaded, samples, 0.0)
    assert again.is_cause
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
    assert not found.is_cause
    assert "at temperature 0.1, at which they were regenerated" in found.normal
    assert own_finding(loaded, samples, None).is_cause
    assert own_finding(loaded, [reader.sample(0)], temperature).is_cause
    assert not own_finding(loaded, samples, 1.0).is_cause  # so hot that a few tokens more or less are chance


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
    monkeypatch.setattr(masks, "look", lambda *_: large)
    found = mask_findings(tokens, target, 7, 8)[0]
    assert not found.is_cause
    assert found.measured.startswith("8.0% of 5,000 text tokens of the training, without the 300,000 image tokens; ")


def test_tokens_of_the_training_are_judged(tokens, target):
    mask_token_id = read_json(tokens.path / "tokens.json")["mask_token_id"]
    assert [] == [found.name for found in mask_findings(tokens, target, mask_token_id, 8) if found.is_cause]
    end = read_json(target.path / "target.json")["eos_token_ids"][0]
    by_name = {found.name: found for found in mask_findings(tokens, target, end, 512)}
    assert by_name["cut blocks"].is_cause
    assert by_name["mask token in texts"].is_cause
    assert "is an EOS id" in by_name["mask token in texts"].measured


def test_a_draft_of_another_target_is_named_and_what_that_explains_is_marked(target, tmp_path):
    write_json(tmp_path / "training.json", {"target": "another"})
    training, draft = DraftCheckpoint(tmp_path, "training"), Draft(tmp_path, "draft")
    wrong = target_finding(draft, training, target)
    assert wrong.is_cause
    own = Finding(name="own answers", measured="", normal="", is_cause=True)
    assert "target" == explained(own, wrong).explained_by
    assert "" == explained(evolve(own, is_cause=False), wrong).explained_by
    assert "" == explained(evolve(own, name="loss mask"), wrong).explained_by
    assert "" == explained(own, evolve(wrong, is_cause=False)).explained_by
    assert not target_finding(draft, training, TargetModel(target.path, "another")).is_cause


@pytest.mark.parametrize(("held_out", "is_cause"), [(5, False), (2, True)])
def test_a_draft_that_knows_the_training_by_heart_alone_is_named(held_out, is_cause):
    assert is_cause == gap_finding(answers(6), answers(held_out), {}).is_cause


@pytest.mark.parametrize(
    ("samples", "held_out", "is_cause"), [(999, 2, True), (1000, 2, False), (999, 6, False), (999, 5, True)]
)
def test_too_little_data_is_named_where_tau_is_lower_on_what_the_training_never_saw(samples, held_out, is_cause):
    found = amount_finding(answers(6), answers(held_out), {"samples": 1200, "samples_seen": samples})
    assert (is_cause, True) == (found.is_cause, found.is_measured)
    assert (samples < 1000 and not is_cause) == found.is_note
    assert f"{samples:,} of 1,200 samples of the training were in a step; tau is 6.00 on some" in found.measured
    assert "add samples like those to be served to the data of ingest" in found.advice


def test_the_amount_of_data_is_not_judged_without_its_record_and_by_a_few_prompts():
    record = {"samples": 40, "samples_seen": 40}
    assert "record is gone" in amount_finding(answers(6), answers(2), {}).measured
    assert not amount_finding(answers(1, steps=0), answers(2), record).is_measured
    found = amount_finding(answers(6), answers(2, count=3), record)
    assert (False, False, True) == (found.is_cause, found.is_measured, found.needs_prompts)


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
    assert with_next_step(open_, 16, found).to_json()["advice"].startswith(step)
    other = unmeasured("held-out gap", "the record is gone")
    assert other == with_next_step(other, 16, found)


@pytest.mark.parametrize(("text", "is_note"), [(4, False), (2, True)])
def test_a_category_far_below_the_other_is_worth_knowing_and_no_cause(text, is_note):
    prompts: list[Any] = [SimpleNamespace(category=name) for name in ("image", "text") for _ in range(8)]
    found = category_finding(prompts, [*answers(6), *answers(text)])
    assert (False, is_note) == (found.is_cause, found.is_note)
    assert f"text {text}.00 (8 prompts), image 6.00 (8 prompts)" in found.measured


@pytest.mark.parametrize(("tau", "is_own", "is_cause"), [(5, True, False), (2, True, True), (2, False, False)])
def test_decoding_that_keeps_nothing_of_what_training_promised_is_named(tau, is_own, is_cause):
    training = {"final_metrics": {"train/expected_tau": 6.0, "train/accuracy": 0.98}}
    assert is_cause == decoding_finding(IMAGES, answers(tau), training, {"image": 9}, 6, is_own=is_own).is_cause


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
    assert told in found.measured
    assert is_cause == found.is_cause


def test_a_draft_whose_short_answers_end_within_their_blocks_is_not_accused_of_their_ends():
    training = {"final_metrics": {"train/expected_tau": 6.0, "train/accuracy": 1.0}}
    perfect = [Decoded(tuple(range(8)), accepted=(5, 0)) for _ in range(8)]
    found = decoding_finding(IMAGES, perfect, training, {"image": 9}, 6, is_own=True)
    assert not found.is_cause
    assert "gives 6.00" in found.measured
    shorter = [Decoded(tuple(range(6)), accepted=(4,))]
    told = decoding_finding(IMAGES[:1], shorter, training, {"image": 9}, 6, is_own=True)
    assert not told.is_measured
    assert "no answer to the training prompts is as long as a block (6 tokens)" in told.measured


def test_answers_as_long_as_a_block_do_not_pick_the_steps_that_accepted_little():
    """Four of five slots right: what an answer's last step accepts is not to be left out for its being the last."""
    block, generator = 8, np.random.default_rng(0)
    expected = sum(0.8**slot for slot in range(block))
    training = {"final_metrics": {"train/expected_tau": expected, "train/accuracy": 0.8}}
    for length in (block, block + 2, 2 * block):
        seen = [simulated(generator, 0.8, block, length) for _ in range(400)]
        found = decoding_finding(IMAGES * 50, seen, training, {"image": 9}, block, is_own=True)
        assert found.is_measured and not found.is_cause
        assert float(found.measured.partition("gives ")[2].partition(",")[0]) == pytest.approx(expected, rel=0.08)


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
    assert [False] * 7 == [each.is_measured or each.is_cause for each in found]
    assert [True, True, True, False, True, True, True] == [TOO_FEW in each.measured for each in found]
    assert "4 prompts with a step are needed, and there are 3" in found[3].measured
    assert all(each.needs_prompts for each in found)


def test_what_wrong_positions_may_explain_is_not_named_where_these_were_not_measured():
    cause = Finding(name="training against decoding", measured="tau 1.31", normal="", is_cause=True)
    fine = Finding(name="mask token", measured="", normal="")
    assert cause == unless_open(cause, [fine])
    told = unless_open(cause, [fine, unmeasured("positions", TOO_FEW)])
    assert (False, False) == (told.is_cause, told.is_measured)
    assert "tau 1.31; positions, not measured, may explain that" == told.measured


def test_groups_without_a_verification_step_are_told_and_left_out():
    prompts: list[Any] = [SimpleNamespace(category=name) for name in "aaaabbbbcccc"]
    nothing = [Decoded((0,))] * 4
    found = category_finding(prompts, [*nothing, *answers(4, count=4), *answers(1, count=4)])
    assert "tau c 1.00 (4 prompts), b 4.00 (4 prompts), a no step (4 prompts)" == found.measured
    assert found.is_note and '"c"' in found.advice
    alone = category_finding(prompts[:8], [*nothing, *answers(4, count=4)])
    assert (False, False) == (alone.is_cause, alone.is_note)
    assert not gap_finding(nothing, answers(4), {}).is_measured


def test_a_draft_no_better_than_random_weights_is_named():
    assert random_finding(answers(1), answers(1)).is_cause
    assert not random_finding(answers(3), answers(1)).is_cause


@pytest.mark.parametrize(("slope", "is_cause"), [(0.0, False), (-0.02, True)])
def test_a_loss_that_still_falls_at_the_end_is_named(slope, is_cause):
    curve = [(step, 4 + slope * step + 0.05 * (-1) ** step) for step in range(1, 101)]
    assert is_cause == curve_finding(curve, {}).is_cause


@pytest.mark.parametrize(
    ("select", "told"), [("tau", "tau on val was best at step 50 of 100; "), ("loss", "the loss on val was lowest at ")]
)
def test_a_loss_that_still_falls_behind_the_selected_step_is_no_cause(select, told):
    curve = [(step, 4 - 0.02 * step) for step in range(1, 101)]
    early = curve_finding(curve, {"selected_step": 50, "recipe": {"select": select}})
    assert not early.is_cause
    assert early.measured.startswith(told)
    late = curve_finding(curve, {"selected_step": 90, "recipe": {"select": select}})
    assert late.is_cause
    assert late.measured.startswith("train/loss fell")


def test_what_training_promised_is_that_of_the_selected_step():
    last = {"train/expected_tau": 6.0, "train/accuracy": 0.98}
    selected = {"train/expected_tau": 2.2, "train/accuracy": 0.5}
    training = {"final_metrics": last, "selected_metrics": selected}
    found = decoding_finding(IMAGES, answers(2), training, {"image": 9}, 6, is_own=True)
    assert not found.is_cause
    assert "predicts tau 2.20" in found.measured
    assert "slots right: 50% in training" in gap_finding(answers(2), answers(2), training).measured


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
    assert not unpaired_gain(after, before, comparisons=10).is_certain


def test_of_four_prompts_a_gain_of_each_may_be_chance():
    assert not unpaired_gain(of_taus(3, 4, 5, 6), of_taus(1, 2, 2, 2)).is_certain


def test_a_fall_within_the_noise_of_the_loss_is_no_cause():
    torch.manual_seed(0)
    curve = [(step, float(2 + torch.randn(()))) for step in range(1, 41)]
    assert not curve_finding(curve, {}).is_cause
    assert not curve_finding(curve[:10], {}).is_measured
    rare = curve_finding([(step, 3.0) for step in range(10, 111, 10)], {})
    assert "11 points of train/loss are too few; lower log_every" in rare.measured
    short = curve_finding([(step, 3.0) for step in range(5, 71, 5)], {})
    assert (False, f"70 steps are too few to see where train/loss is heading; {LONGER}") == (
        short.is_measured,
        short.measured,
    )
    assert not curve_finding([], {}).is_measured


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
    assert (bool(told), True) == (found.is_cause, found.is_measured)
    assert told in found.measured
    assert "lower lr" in found.advice
    assert [False, False] == [flat_finding(short).is_measured for short in ([], curve[:10])]


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
    def cause(name: str, gain: float | None) -> Finding:
        return Finding(name=name, measured="", normal="", is_cause=True, gain=gain)

    fine = Finding(name="fine", measured="", normal="", gain=9.0)
    followed = evolve(cause("follows", 9.0), explained_by="large")
    causes = [cause("small", 0.5), cause("untold", None), cause("large", 2.0)]
    note = Finding(name="note", measured="", normal="", is_note=True)
    ordered = sorted_findings([unmeasured("gone", ""), unjudged(cause("open", 7.0)), followed, fine, note, *causes])
    assert ["large", "small", "untold", "follows", "note", "fine", "open", "gone"] == [found.name for found in ordered]


def test_at_the_ceiling_of_tau_a_cause_is_not_judged_and_what_is_none_has_no_advice():
    cause = Finding(name="x", measured="", normal="", advice="mend it", is_cause=True)
    fine = evolve(cause, is_cause=False)
    assert (False, False) == (unjudged(cause).is_cause, unjudged(cause).is_judged)
    assert unjudged(fine) == fine
    advice = [found.to_json()["advice"] for found in (cause, evolve(fine, is_note=True), fine, unjudged(cause))]
    assert ["mend it", "mend it", "", ""] == advice


def test_answers_of_the_same_few_tokens_are_a_note():
    cycle, text = Decoded((1, 2) * 10), Decoded(tuple(range(20)))
    assert not repetition_finding([cycle, text]).is_note
    found = repetition_finding([cycle, cycle, text])
    assert found.is_note and "2 of 3 answers of the target repeat" in found.measured


def test_skipped_steps_are_a_cause_above_one_per_cent():
    assert not skipped_finding({}).is_measured
    assert not skipped_finding({"steps": 100, "skipped_steps": 1}).is_cause
    found = skipped_finding({"steps": 100, "skipped_steps": 2, "nonfinite_steps": 2})
    assert found.is_cause
    assert "2 of 100 steps were skipped (2 with a loss or gradient that is not finite)" == found.measured
    assert found.advice.startswith("lower lr")
