"""What tau says by itself: of which prompts it is low, whether they are new ones, and whether anything was learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ops.dflash.decode import Decoded
from ops.diagnose.bench import LEAST_PROMPTS, paired_gain, tau_of, unpaired_gain
from ops.diagnose.finding import Finding, unmeasured
from ops.tokenize_chat.shards import TokenSample

CATEGORY_RATIO = 2.0
GAP_RATIO = 1.5
OF_EXPECTED = 0.6
NO_STEP = "every answer to the prompts of the training is one token long, which takes no draft"


def category_finding(prompts: Sequence[TokenSample], answers: Sequence[Decoded]) -> Finding:
    """answers: some of them with a verification step."""
    every: dict[str, list[Decoded]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        every.setdefault(prompt.category, []).append(answer)
    groups = {name: group for name, group in every.items() if _steps(group)}
    by_tau = sorted(groups, key=lambda name: tau_of(groups[name]))
    told = ", ".join(
        [f"{name} {tau_of(groups[name]):.2f} ({len(groups[name])} prompts)" for name in by_tau]
        + [f"{name} no step ({len(every[name])} prompts)" for name in sorted(every.keys() - groups.keys())]
    )
    if len(groups) < 2:
        return Finding(name="categories", measured=f"tau {told}", normal="there is no other category to compare with")
    lowest, highest = groups[by_tau[0]], groups[by_tau[-1]]
    pairs = len(groups) * (len(groups) - 1) // 2
    gain = unpaired_gain(highest, lowest, comparisons=pairs)
    return Finding(
        name="categories",
        measured=f"tau {told}",
        normal=f"within a factor of {CATEGORY_RATIO:g}; beyond it the lowest decides what a mixed load gains. No "
        "mistake: texts that are hard to foresee have a lower tau with any draft",
        advice=f'more samples of "{by_tau[0]}", with answers of the target\'s own, where it is to be served',
        is_note=gain.is_certain and tau_of(highest) > CATEGORY_RATIO * tau_of(lowest),
    )


def exported_metrics(training: Mapping[str, Any]) -> Mapping[str, float] | None:
    """train/... of the steps before the weights that are exported; of the last steps where the record has no others."""
    return training.get("selected_metrics") or training.get("final_metrics")


def gap_finding(seen: Sequence[Decoded], held_out: Sequence[Decoded], training: Mapping[str, Any]) -> Finding:
    """seen: of prompts of the training; training: training.json, for what it measured of its val split."""
    if not _steps(seen):
        return unmeasured("held-out gap", NO_STEP)
    told = f"tau {tau_of(seen):.2f} on prompts of the training, {tau_of(held_out):.2f} on held-out ones"
    accuracies = [
        f"{metrics[f'{split}/accuracy']:.0%} {name}"
        for split, name, metrics in (
            ("train", "in training", exported_metrics(training)),
            ("val", "on val", training.get("val_metrics")),
        )
        if metrics
    ]
    if accuracies:
        told += f"; slots right: {', '.join(accuracies)}"
    gain = unpaired_gain(seen, held_out)
    return Finding(
        name="held-out gap",
        measured=told,
        normal=f"at most {GAP_RATIO:g} times as high on the training's own; beyond it they are known by heart",
        advice="train on more, and more varied, samples like those that are to be served, for fewer epochs",
        is_cause=gain.is_certain and tau_of(seen) > GAP_RATIO * tau_of(held_out),
    )


def decoding_finding(
    prompts: Sequence[TokenSample],
    seen: Sequence[Decoded],
    training: Mapping[str, Any],
    learnt: Mapping[str, int],
    *,
    is_own: bool,
) -> Finding:
    """What training measured of its slots against real decoding of the same prompts, without the last step of each
    answer: the end cuts off what it accepts, and of ends training knows nothing. learnt: anchors of the training by
    category, which weigh here what the prompts hold in other shares. is_own: the answers are.
    """
    name, metrics = "training against decoding", exported_metrics(training)
    if not metrics:
        return unmeasured(name, "the training's record is gone")
    whole: dict[str, list[int]] = {}
    for prompt, answer in zip(prompts, seen, strict=True):
        whole.setdefault(prompt.category, []).extend(count + 1 for count in answer.accepted[:-1])
    means = {category: fmean(counts) for category, counts in whole.items() if counts and learnt.get(category)}
    if not means:
        return unmeasured(name, "no answer to the prompts of the training takes more than one step")
    expected, real = metrics["train/expected_tau"], fmean(means.values(), [learnt[category] for category in means])
    told = (
        f"accuracy {metrics['train/accuracy']:.0%} in training, which promises tau {expected:.2f}; decoding its "
        f"prompts gives {real:.2f}, without the last step of each answer, categories in the shares of the training"
    )
    normal = f"at least {OF_EXPECTED:g} of what is promised, since training counts a slot as right by itself"
    if not is_own:
        return Finding(name=name, measured=f"{told}; but the answers are not the target's own", normal=normal)
    return Finding(
        name=name,
        measured=told,
        normal=normal,
        advice="decoding feeds the draft otherwise than training did, in a way not measured here; report it with this",
        is_cause=real - 1 < OF_EXPECTED * (expected - 1),
    )


def random_finding(answers: Sequence[Decoded], untrained: Sequence[Decoded]) -> Finding:
    """Against a draft of random weights, on the same prompts."""
    with_step = sum(answer.steps > 0 for answer in answers)
    if with_step < LEAST_PROMPTS:
        return unmeasured("anything learnt", f"it takes {LEAST_PROMPTS} prompts with a step, and there are {with_step}")
    return Finding(
        name="anything learnt",
        measured=f"tau {tau_of(answers):.2f} against {tau_of(untrained):.2f} of random weights",
        normal="clearly above random weights, whose proposals are almost never accepted",
        advice="nothing was learnt that decoding can use: put the other causes right; without any, look at train/loss, "
        "raise lr, and train on more steps",
        is_cause=not paired_gain(answers, untrained).is_certain,
    )


def _steps(answers: Sequence[Decoded]) -> int:
    return sum(answer.steps for answer in answers)
