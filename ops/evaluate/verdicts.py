"""What an evaluation says of its draft: sentences for the first screen of the report. Loads no torch.

Two figures differ where their 95 % intervals do not overlap, which is stricter than a paired test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve

from dsl.finding import Finding, Level
from ops.evaluate.intervals import ALL
from ops.evaluate.load import load_text
from ops.evaluate.rivals import rival_in
from ops.lib.report_sections import NOT_KNOWN, Section, interval_text, is_known, verdict

CEILING = 0.95  # of block_size: a tau that can hardly rise
LEAST_GAIN = 0.05  # of a tau, below which a gain of it does not count; `dflow diagnose` judges by it too
CATEGORY_RATIO = 2.0  # of the highest category's tau to the lowest's, beyond which the lowest limits a mixed load
NO_INTERVAL = "no interval of one prompt"
MORE_PROMPTS, OF_PROMPTS = "evaluate more prompts", "max_prompts"
SLOWER = (
    "do not serve it: plain decoding is faster. Where it will be served on another machine, measure there: on a CPU, "
    "a pass over a block costs as much as its tokens"
)
UNCERTAIN = (
    f"whether it is faster than plain decoding cannot be told: {MORE_PROMPTS}, or measure where it will be served"
)
DFLOW = "dflow"  # as a publisher
NEARLY_NONE = 1.1  # a tau of a draft of which hardly a token is accepted
ITS_TARGET = (
    "evaluate it with the target that it was trained for: its publisher names the model and the version; a base model, "
    "fine-tunes of it and later versions have the same sizes and other weights"
)
NOTHING_LEARNT = "find out why nothing was learnt that decoding can use: see what limits it, and dflow diagnose RUN"


def verdicts(report: Mapping[str, Any], measured: Mapping[str, Any] | None) -> Iterator[Section]:
    """The verdict sections of an evaluated draft. report: report.json. measured: measurements.json, None if
    it is gone.
    """
    tau = report["tau"][ALL]
    if rival := rival_in(report):
        yield Section(rival, _of_rival(report, measured))
        yield Section("losslessness", _lossless(report))
        return
    if tau["steps"]:
        yield Section("tau", _with_target(_with_speed(_against_random(report), measured), report))
    else:
        text = f"no tau: the target's answer to each of the {tau['prompts']} prompts is one token"
        yield Section("tau", verdict("good", text, "error", "evaluate prompts with longer answers"))
    yield Section("speed-up", _against_plain(measured), is_timed=measured is not None)
    yield Section("losslessness", _lossless(report))
    if tau["steps"]:
        yield from _limits(report)
    if measured is not None:
        yield Section("time", _slowest(measured))
    if measured is not None and "load" in measured:
        yield Section("load", _under_load(measured["load"]), is_timed=True)


def _of_rival(report: Mapping[str, Any], measured: Mapping[str, Any] | None) -> Finding:
    """What a rival reaches, without a judgement: it is what a draft is compared with."""
    tau = report["tau"][ALL]
    text = f"{_figure(tau)} tokens per pass of the target" if tau["steps"] else "no answer has a step"
    if measured is not None and is_known(measured["speedup_low"], measured["speedup_high"]):
        text += f", {measured['speedup']:.2f} times as fast as plain decoding"
    return verdict("good", f"{text}, in blocks of {report['block_size']}; a draft has to be better")


def _against_random(report: Mapping[str, Any]) -> Finding:
    tau = report["tau"][ALL]
    text = f"{_figure(tau)} tokens per pass of the target, of at most {report['block_size']}; plain decoding has 1"
    if "tau_random" not in report:
        text += ". Against a random draft: not measured"
        return verdict("good", text, "warning", "compare with a random draft", "random_draft")
    chance = report["tau_random"][ALL]
    text += f", a random draft {_figure(chance)}"
    if tau["low"] is None or chance["high"] is None:
        return verdict("good", f"{text}. An interval needs two prompts", "warning", MORE_PROMPTS, OF_PROMPTS)
    if tau["tau"] <= chance["tau"]:
        return verdict("good", f"{text}. It is no better than chance", "error", NOTHING_LEARNT)
    if tau["low"] <= chance["high"]:
        return verdict(
            "good", f"{text}. Chance is not ruled out: the intervals overlap", "warning", MORE_PROMPTS, OF_PROMPTS
        )
    if tau["tau"] < (1 + LEAST_GAIN) * chance["tau"]:
        return verdict("good", f"{text}. It is above chance by less than {LEAST_GAIN:.0%}", "warning", NOTHING_LEARNT)
    return verdict("good", f"{text}. It is better than chance", "good")


def _with_speed(tau: Finding, measured: Mapping[str, Any] | None) -> Finding:
    """The verdict on tau, adjusted by the speed-up: a draft that slows decoding down is not good, whatever its tau."""
    if measured is None:
        return tau
    low, high = measured["speedup_low"], measured["speedup_high"]
    if (measured["speedup"] if low is None else low) > 1:
        return tau
    level: Level = "error" if tau.level == "error" else "warning"
    if low is not None and high >= 1:
        text = f"{tau.what}. Whether it is faster than plain decoding cannot be told"
        if tau.advice:
            return evolve(tau, what=text, level=level)
        return verdict("good", text, level, UNCERTAIN, OF_PROMPTS)
    return evolve(tau, what=f"{tau.what}. Plain decoding is faster", level=level, where=None, advice=SLOWER)


def _with_target(tau: Finding, report: Mapping[str, Any]) -> Finding:
    """The verdict on tau, with a remark if a draft trained elsewhere may belong to another target."""
    imported = report.get("imported")
    if imported is None:
        return tau
    other = imported.get("trained_for")
    if other is None and imported.get("publisher") == DFLOW:
        return tau  # its record names this target
    named = f"its record names another target, {other[:12]}" if other else ""
    chance = report["tau_random"][ALL]["tau"] if "tau_random" in report else 1.0
    if report["tau"][ALL]["tau"] < max(NEARLY_NONE, (1 + LEAST_GAIN) * chance):
        text = f"{tau.what}. Likely cause: it was trained for another target" + (f" ({named})" if named else "")
        return evolve(tau, what=text, level="error", where=None, advice=ITS_TARGET)
    if named:
        text = f"{tau.what}. But {named}: if that had other weights, tau is higher with it"
        return evolve(tau, what=text, advice=tau.advice or ITS_TARGET)
    return tau


def _against_plain(measured: Mapping[str, Any] | None) -> Finding:
    if measured is None:
        return verdict("good", "not measured: measurements.json of this run is gone", "warning", "evaluate again")
    low, high = measured["speedup_low"], measured["speedup_high"]
    interval = "no interval of one batch" if low is None else f"{low:.2f} to {high:.2f}"
    number = (
        f"{measured['speedup']:.2f} ({interval})" if is_known(low, high) else f"{NOT_KNOWN}, somewhere in {interval}"
    )
    text = f"{number} times as fast as plain decoding, in batches of {measured['batch_size']} at most"
    if low is None:
        text += ". An interval needs two batches"
        return verdict("good", text, "warning", "evaluate more prompts, or in smaller batches", "batch_size")
    if low > 1:
        return verdict("good", f"{text}. It is faster", "good")
    if high < 1:
        return verdict("good", f"{text}. It is slower", "error", SLOWER)
    return verdict("good", f"{text}. No difference is certain", "warning", UNCERTAIN, OF_PROMPTS)


def _under_load(curve: Mapping[str, Any]) -> Finding:
    text = f"measured in batches of {', '.join(str(best['batch_size']) for best in curve['best'])}: {load_text(curve)}"
    if curve["costs_from"] is not None:
        return verdict("limit", text, "warning", f"serve without it from {curve['costs_from']} concurrent requests")
    return verdict("limit", text)


def _lossless(report: Mapping[str, Any]) -> Finding:
    if report["lossless"] is None:
        advice = "check the answers too, by an evaluation with temperature = 0"
        return verdict("safe", "not measured: answers were sampled", "warning", advice, "temperature")
    errors, ties = report["lossless"]["errors"], report["lossless"]["ties"]
    text = f"{report['prompts'] - errors} of {report['prompts']} answers are those of the target alone"
    text += f", {ties} of them up to a tie of two logits" if ties else ""
    if errors:
        return verdict("safe", text, "error", "do not serve it: decoding changes answers (docs/evaluation.md)")
    return verdict("safe", text, "good")


def _limits(report: Mapping[str, Any]) -> Iterator[Section]:
    tau, size = report["tau"][ALL], report["block_size"]
    if tau["tau"] >= CEILING * size:
        text = f"tau {tau['tau']:.2f} is at its ceiling, the {size} slots of a block"
        yield Section("block size", verdict("limit", text, "warning", "train with a larger block_size"))
    kinds = {name: of for name, of in report["tau"].items() if name != ALL and of["steps"]}
    if len(kinds) < 2:
        return
    by_tau = sorted(kinds, key=lambda name: kinds[name]["tau"])
    text = ", ".join(f"{name} {_figure(kinds[name])}" for name in by_tau)
    lowest, highest = kinds[by_tau[0]], kinds[by_tau[-1]]
    if None in (lowest["high"], highest["low"]):
        yield Section("categories", verdict("limit", f"tau: {text}; an interval needs two prompts of each"))
    elif lowest["high"] >= highest["low"]:
        yield Section("categories", verdict("limit", f"tau: {text}; no difference is certain"))
    elif highest["tau"] <= CATEGORY_RATIO * lowest["tau"]:
        yield Section("categories", verdict("limit", f"tau: {text}"))
    else:
        advice = f'train on more samples of "{by_tau[0]}", with answers of the target\'s own, if it is to be served'
        text += f"; the lowest limits a mixed load: the highest is more than {CATEGORY_RATIO:g} times as high"
        yield Section("categories", verdict("limit", f"tau: {text}", "warning", advice))


def _slowest(measured: Mapping[str, Any]) -> Finding:
    parts, seconds = measured["parts"]["speculative"], measured["speculative_seconds"]
    shares = [(name, parts[name] / seconds) for name in ("verify", "draft", "prefill", "overhead")]
    text = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares, key=lambda each: -each[1]))
    if parts["draft"] > parts["verify"]:
        advice = "make the draft cheaper: fewer layers (num_layers of train_dflash)"
        return verdict(
            "limit", f"of speculative decoding: {text}; the draft takes longer than the target", "warning", advice
        )
    return verdict("limit", f"of speculative decoding: {text}")


def _figure(tau: Mapping[str, Any]) -> str:
    return f"{tau['tau']:.2f} ({interval_text(tau, NO_INTERVAL)})"
