"""Findings from tau: which prompts are low, whether only held-out ones are, and whether anything was learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, sqrt
from typing import Any

from scipy.special import stdtrit

from dsl.finding import Finding
from ops.evaluate.statistics import is_repetition, steps_of
from ops.evaluate.verdicts import CATEGORY_RATIO, LEAST_GAIN
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import Decoded
from ops.tools.diagnose.bench import (
    CHANCE,
    most_saved,
    paired_gain,
    stepped,
    tau_of,
    unpaired_gain,
)
from ops.tools.diagnose.judgement import (
    AMOUNT,
    CATEGORIES,
    DECODING,
    HELD_OUT_GAP,
    LEARNT,
    LEAST_PROMPTS,
    REPEATED,
    TOO_FEW,
    judged,
    too_few,
    unless_chance,
    unmeasured,
)
from ops.train_dflash.verdicts import GAP_RATIO, exported_metrics, exported_window

OF_EXPECTED = 0.6
LEAST_SAMPLES = 1000
NOTHING_SAVED = 0.1  # of the passes of the target
NO_STEP = "every answer to the training prompts is one token long, which needs no draft"


def category_finding(prompts: Sequence[TokenSample], answers: Sequence[Decoded]) -> Finding:
    """A finding on how tau differs between the prompts' categories. answers: at least one with a verification step."""
    every: dict[str, list[Decoded]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        every.setdefault(prompt.category, []).append(answer)
    groups = {name: group for name, group in every.items() if stepped(group)}
    by_tau = sorted(groups, key=lambda name: tau_of(groups[name]))
    text = ", ".join(
        [f"{name} {tau_of(groups[name]):.2f} ({len(groups[name])} prompts)" for name in by_tau]
        + [f"{name} no step ({len(every[name])} prompts)" for name in sorted(every.keys() - groups.keys())]
    )
    if len(groups) < 2:
        return judged(name=CATEGORIES, measured=f"tau {text}", normal="there is no other category to compare with")
    lowest, highest = groups[by_tau[0]], groups[by_tau[-1]]
    pairs = len(groups) * (len(groups) - 1) // 2
    gain = unpaired_gain(highest, lowest, CHANCE / pairs)
    return judged(
        name=CATEGORIES,
        measured=f"tau {text}",
        normal=f"within a factor of {CATEGORY_RATIO:g}; beyond it the lowest limits the gain of a mixed load. No "
        "mistake: texts that are hard to predict have a lower tau with any draft",
        advice=f'more samples of "{by_tau[0]}", with answers of the target\'s own, where it is to be served',
        is_note=gain.is_certain and tau_of(highest) > CATEGORY_RATIO * tau_of(lowest),
    )


def repetition_finding(answers: Sequence[Decoded]) -> Finding:
    """A finding on how many of the target's answers repeat the same few tokens. answers: decoded greedily."""
    repeated = sum(is_repetition(answer.tokens) for answer in answers)
    return judged(
        name=REPEATED,
        measured=f"{repeated} of {len(answers)} answers of the target repeat the same few tokens",
        normal="at most half: any draft predicts those; above that tau says nothing about a real target",
        advice="use a target with trained weights, whose answers do not repeat",
        is_note=2 * repeated > len(answers),
    )


def gap_finding(seen: Sequence[Decoded], held_out: Sequence[Decoded], training: Mapping[str, Any]) -> Finding:
    """A finding on tau of training prompts compared with held-out ones.

    seen: answers to training prompts. training: training.json, with its metrics on the val split.
    """
    if not stepped(seen):
        return unmeasured(HELD_OUT_GAP, NO_STEP)
    text = f"tau {tau_of(seen):.2f} on prompts of the training, {tau_of(held_out):.2f} on held-out ones"
    accuracies = [
        f"{metrics[f'{split}/accuracy']:.0%} {name}"
        for split, name, metrics in (
            ("train", exported_window(training), exported_metrics(training)),
            ("val", "on val", training.get("val_metrics")),
        )
        if metrics
    ]
    if accuracies:
        text += f"; slots right: {', '.join(accuracies)}"
    found = judged(
        name=HELD_OUT_GAP,
        measured=text,
        normal=f"at most {GAP_RATIO:g} times as high on the training's own; above that they are memorized",
        advice="train on more, and more varied, samples like those to be served, for fewer epochs",
        is_cause=tau_of(seen) > GAP_RATIO * tau_of(held_out),
    )
    return found if unpaired_gain(seen, held_out).is_certain else unless_chance(found)


def amount_finding(seen: Sequence[Decoded], held_out: Sequence[Decoded], training: Mapping[str, Any]) -> Finding:
    """A finding on whether there is too little data: so few samples that a higher tau on them needs no
    further proof.
    """
    name, samples = AMOUNT, training.get("samples_seen")
    if samples is None:
        return unmeasured(name, "the training's record is gone")
    if not stepped(seen):
        return unmeasured(name, NO_STEP)
    text = f"{samples:,} of {training['samples']:,} samples of the training were in a step"
    is_little = samples < LEAST_SAMPLES
    is_cause = is_little and tau_of(seen) >= (1 + LEAST_GAIN) * tau_of(held_out)
    finding = judged(
        name=name,
        measured=f"{text}; tau is {tau_of(seen):.2f} on some of them, {tau_of(held_out):.2f} on held-out ones",
        normal=f"{LEAST_SAMPLES:,} or more, many thousands for a draft worth serving",
        advice="add samples like those to be served to the data of ingest (source; max_samples may limit it)",
        is_cause=is_cause,
        is_note=is_little and not is_cause,
    )
    few = min(len(stepped(seen)), len(stepped(held_out))) < LEAST_PROMPTS
    return unless_chance(finding) if few else finding


def decoding_finding(
    prompts: Sequence[TokenSample],
    seen: Sequence[Decoded],
    training: Mapping[str, Any],
    learnt: Mapping[str, int],
    block_size: int,
    *,
    is_own: bool,
) -> Finding:
    """A finding on the training's accuracy by slot, compared with real decoding of the same prompts.

    Only steps that begin at least a block before the answer's end count: the end cuts off what later steps accept,
    which training does not model. Which steps count does not depend on the tokens they accept. learnt: the training's
    anchors by category, as weights. is_own: whether the answers are the target's own.
    """
    name, metrics = DECODING, exported_metrics(training)
    if not metrics:
        return unmeasured(name, "the training's record is gone")
    whole: dict[str, list[list[int]]] = {}
    for prompt, answer in zip(prompts, seen, strict=True):
        yields = [tokens for anchor, tokens in steps_of(answer) if anchor + block_size <= answer.generated]
        if yields and learnt.get(prompt.category):
            whole.setdefault(prompt.category, []).append(yields)
    if not whole:
        return unmeasured(name, f"no answer to the training prompts is as long as a block ({block_size} tokens)")
    real, at_most = _mean_yield(list(whole.values()), [learnt[category] for category in whole])
    expected = metrics["train/expected_tau"]
    text = (
        f"accuracy {metrics['train/accuracy']:.0%} {exported_window(training)}, which predicts tau {expected:.2f}; "
        f"decoding its prompts gives {real:.2f}, of the steps at least {block_size} tokens before an answer's end, "
        "categories in the shares of the training"
    )
    normal = f"at least {OF_EXPECTED:g} of the predicted tau, since training counts each slot independently"
    if not is_own:
        return judged(name=name, measured=f"{text}; but the answers are not the target's own", normal=normal)
    least = 1 + OF_EXPECTED * (expected - 1)
    found = judged(
        name=name,
        measured=text,
        normal=normal,
        advice="decoding gives the draft other inputs than training, in a way not measured here; report this output",
        is_cause=real < least,
    )
    return found if at_most < least else unless_chance(found)


def _mean_yield(groups: Sequence[Sequence[Sequence[int]]], weights: Sequence[int]) -> tuple[float, float]:
    """The weighted mean of tokens per step, and its upper bound at the error probability CHANCE.

    groups: for each group the prompts, for each prompt the tokens of each step. Groups differ in their means; their
    spread is assumed equal.
    """
    mean, error, squares, prompts, steps = 0.0, 0.0, 0.0, 0, 0
    for group, weight in zip(groups, weights, strict=True):
        share, count = weight / sum(weights), sum(map(len, group))
        group_mean = sum(map(sum, group)) / count
        mean += share * group_mean
        error += share**2 / len(group)
        squares += sum((sum(each) - group_mean * len(each)) ** 2 for each in group) * (len(group) / count) ** 2
        prompts, steps = prompts + len(group), steps + count
    freedom = prompts - len(groups)
    if prompts < LEAST_PROMPTS or not freedom:
        return mean, float("inf")
    # One more or one less token could always have been accepted.
    return mean, mean + float(stdtrit(freedom, 1 - CHANCE)) * hypot(sqrt(squares / freedom * error), 1 / steps)


def random_finding(answers: Sequence[Decoded], untrained: Sequence[Decoded]) -> Finding:
    """A finding on tau compared with a draft of random weights, on the same prompts."""
    name, with_step = LEARNT, len(stepped(answers))
    text = f"tau {tau_of(answers):.2f} against {tau_of(untrained):.2f} of random weights"
    if with_step < LEAST_PROMPTS:
        return too_few(name, f"{text}; {LEAST_PROMPTS} prompts with a step are needed, and there are {with_step}")
    is_better, saved = paired_gain(answers, untrained).is_certain, most_saved(answers, untrained)
    if not is_better and saved > NOTHING_SAVED:
        return too_few(name, f"{text}; {TOO_FEW}")
    return judged(
        name=name,
        measured=text,
        normal="clearly above random weights, whose proposals are almost never accepted",
        advice="nothing was learnt that decoding can use: fix the other causes; if there are none, look at train/loss, "
        "raise lr, and train on more steps",
        is_cause=not is_better,
    )
