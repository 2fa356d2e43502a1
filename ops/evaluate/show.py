"""Report sections of `evaluate`, from the files of its artifact; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.evaluate.comparison import compare_evaluations
from ops.evaluate.intervals import ALL, MOST_GROUPS, OTHERS, PART_LABELS, missing_kinds, parted
from ops.evaluate.load import best_points, load_text, points_of
from ops.evaluate.rivals import rival_in
from ops.evaluate.verdicts import verdicts
from ops.lib.data.files import read_json
from ops.lib.report_sections import NOT_KNOWN, Cell, Compared, Html, Section, Table, interval_text, is_known

PAGE_HEIGHT = 640


def report(folder: Path) -> Sequence[Section]:
    """The report sections of an evaluation: tau, its parts, losslessness, speed, answers, and verdicts."""
    report = read_json(folder / "report.json")
    measurements = folder / "measurements.json"  # not a part of the artifact's content
    measured = read_json(measurements) if measurements.exists() else None
    return [
        _tau(report, measured),
        *(_parts(table, parts, f"By {PART_LABELS[table]}.") for table, parts in parted(report).items()),
        *([_tau_by("temperature", report)] if "tau_by_temperature" in report else ()),
        *([_tau_by("block", report)] if "tau_by_block" in report else ()),
        *([_groups(report["tau_by_group"])] if "tau_by_group" in report and report["benchmark"] is None else ()),
        *([_confidence(measured["confidence"])] if measured is not None and "confidence" in measured else ()),
        _lossless(report),
        *(() if measured is None else (_speed(measured),)),
        *([_load(measured["load"])] if measured and "load" in measured else ()),
        Section("Answers", Html((folder / "prompts.html").read_text("utf-8"), PAGE_HEIGHT)),
        *verdicts(report, measured),
    ]


def compare(artifacts: Sequence[Compared]) -> Sequence[Section]:
    """The report sections that compare several drafts on the same prompts."""
    return list(compare_evaluations(artifacts))


def comparable(report: Mapping[str, Any], measured: Mapping[str, Any] | None) -> str:
    """The line by which tau compares with figures of others: what they depend on, and both means."""
    thinking = {None: "thinking as the chat template has it", True: "with thinking", False: "without thinking"}
    size = None if measured is None else measured["batch_size"]
    turns = {
        "last": "last turn of each conversation",
        "first": "first turn of each conversation",
        "each": "each turn, after the target's own answers",
        "every": "every answer that is learnt, behind the data's turns",
    }
    parts = [
        f"temperature {report['temperature']:g}",
        f"at most {report['max_new_tokens']} new tokens",
        thinking[report["enable_thinking"]],
        *([] if size is None else [f"batches of {size}"]),
        turns[report["turns"]],
        *(["prompts as z-lab words them"] if report["benchmark_prompt"] == "z-lab" else []),
    ]
    return (
        f"For comparison: {', '.join(parts)}; tau {_figure(report['tau'][ALL])} over all steps, "
        f"{_figure(report['mean_of_prompts'])} as the mean of prompts."
    )


def _figure(tau: Mapping[str, Any]) -> str:
    return "none" if tau["tau"] is None else f"{tau['tau']:.2f}"


def _tau(report: Mapping[str, Any], measured: Mapping[str, Any] | None) -> Section:
    untrained = report.get("tau_random", {})
    rows: list[Sequence[Cell]] = [
        (
            name,
            tau["prompts"],
            _rounded(tau["tau"]),
            interval_text(tau, "none for one prompt" if tau["steps"] else "no step"),
            _rounded(untrained[name]["tau"]) if name in untrained else None,
        )
        for name, tau in report["tau"].items()
    ]
    source = f"the split {report['split']}" if report["benchmark"] is None else f"the benchmark {report['benchmark']}"
    way = "greedy" if report["temperature"] == 0 else f"sampled at temperature {report['temperature']:g}"
    size = f"blocks of {report['block_size']}"
    if rival := rival_in(report):
        size += f", proposed by {rival}"
    if report["block_size"] != report["block_size_trained"]:
        size += f" (trained with {report['block_size_trained']})"
    return Section(
        "tau",
        Table(("prompts", "number", "tau", "95 % interval", "random draft"), rows),
        f"Tokens per verification step, of prompts from {source}: {way}, {size}, {report['dtype']}, at most "
        f"{report['max_new_tokens']} tokens each. 1 is plain decoding. Intervals resample prompts. "
        f"{report['tau'][ALL]['cut_steps']} steps accepted more than the answer contains, after its end or its maximum "
        "length: they would not gain from larger blocks."
        + (f" {comparable(report, measured)}" if "mean_of_prompts" in report else "")
        + "".join(f" {sentence}." for sentence in missing_kinds(report)),
    )


def _parts(label: str, parts: Mapping[str, Any], note: str) -> Section:
    """A table of tau by part. label: of the parts, which is in the title too."""
    rows: list[Sequence[Cell]] = [
        (name or OTHERS, tau["prompts"], tau["steps"], _rounded(tau["tau"]), interval_text(tau, "none for one prompt"))
        for name, tau in parts.items()
    ]
    return Section(f"tau by {label}", Table((label, "prompts", "steps", "tau", "95 % interval"), rows), note)


def _groups(taus: Mapping[str, Any]) -> Section:
    note = (
        f'The "category" of the data\'s own rows, of the {MOST_GROUPS} with the most prompts; the other prompts, those '
        f'without a category too, are "{OTHERS}".'
    )
    return _parts("group", taus, note)


def _tau_by(setting: str, report: Mapping[str, Any]) -> Section:
    """A table of tau at each temperature or block size."""
    taus = report[f"tau_by_{setting}"]
    rows: list[Sequence[Cell]] = [
        (name, _rounded(tau["tau"]), interval_text(tau, "none for one prompt"), *_differences(tau["lossless"]))
        for name, tau in sorted(taus.items(), key=lambda each: float(each[0]))
    ]
    columns = (setting, "tau", "95 % interval", "errors", "ties")
    note = "Errors and ties as under losslessness, at temperature 0 only."
    return Section(f"tau by {setting}", Table(columns, rows), note)


def _differences(lossless: Mapping[str, int] | None) -> tuple[int | None, int | None]:
    return (None, None) if lossless is None else (lossless["errors"], lossless["ties"])


def _load(curve: Mapping[str, Any]) -> Section:
    """A table of the speed at each batch size in blocks of each size."""
    points = points_of(curve)
    best = {(point.batch_size, point.block_size) for point in best_points(points)}
    rows: list[Sequence[Cell]] = []
    for point in points:
        low, high = point.speedup_low, point.speedup_high
        rows.append(
            (
                point.batch_size,
                point.block_size,
                _rounded(point.tau),
                round(point.plain_tokens_per_second, 1),
                round(point.tokens_per_second, 1),
                round(point.speedup, 2) if is_known(low, high) else NOT_KNOWN,
                "none for one batch" if low is None else f"{low:.2f} to {high:.2f}",
                "best" if (point.batch_size, point.block_size) in best else "",
            )
        )
    columns = ("batch size", "block size", "tau", "plain tokens / s", "tokens / s", "speed-up", "95 % interval", "")
    text = load_text(curve)
    note = (
        f"{text[0].upper()}{text[1:]}. Over plain decoding of the same prompts, measured once for all blocks of a "
        "batch size. `dflow serve --block-size N` serves in blocks of N."
    )
    return Section("Speed-up under load", Table(columns, rows), note)


def _rounded(tau: float | None) -> float | None:
    return None if tau is None else round(tau, 2)


def _confidence(confidence: Mapping[str, Any]) -> Section:
    parts = confidence["reliability"]
    rows: list[Sequence[Cell]] = [
        (
            f"{part['low']:g} to {part['high']:g}",
            part["slots"],
            round(part["confidence"], 3),
            round(part["accepted"], 3),
        )
        for part in parts
    ]
    total = (confidence["slots"], round(confidence["confidence"], 3), round(confidence["accepted"], 3))
    return Section(
        "Confidence head",
        Table(("confidence", "slots", "mean confidence", "accepted"), [*rows, ("all", *total)]),
        f"Expected calibration error {confidence['ece']:.4f} ({confidence['bins']} bins), Brier score "
        f"{confidence['brier']:.4f}. The head is trained to say how probable a token that is drawn at temperature 1 is "
        "to be accepted.",
    )


def _lossless(report: Mapping[str, Any]) -> Section:
    if report["lossless"] is None:
        rows: list[Sequence[Cell]] = [("not checked: answers were sampled", None)]
    else:
        rows = [("errors", report["lossless"]["errors"]), ("ties", report["lossless"]["ties"])]
    return Section(
        "Losslessness",
        Table(("differences from the target's own answers", "number"), rows),
        f"A tie: in both passes the logits of both tokens are less than {report['tie_margin']:g} below the best one.",
    )


def _speed(measured: Mapping[str, Any]) -> Section:
    columns = ("decoding", "tokens", "seconds", "tokens / s", "prefill", "draft", "verify", "overhead")
    rows: list[Sequence[Cell]] = []
    for way in ("plain", "speculative"):
        seconds, tokens = measured[f"{way}_seconds"], measured[f"{way}_tokens"]
        parts = measured["parts"][way]
        shares = [f"{100 * parts[name] / seconds:.0f} %" for name in ("prefill", "draft", "verify", "overhead")]
        rows.append((way, tokens, round(seconds, 2), round(tokens / seconds, 1), *shares))
    interval, low, high = "", measured["speedup_low"], measured["speedup_high"]
    if low is not None:
        interval = f" [{low:.2f}, {high:.2f}]"
    number = f"{measured['speedup']:.2f}" if is_known(low, high) else NOT_KNOWN
    return Section(
        "Speed",
        Table(columns, rows),
        f"Speed-up {number}{interval}, in {measured['batches']} "
        f"batch{'es' * (measured['batches'] != 1)} of at most "
        f"{measured['batch_size']}, each decoded both ways in turn. Verify is the target's forward passes after the "
        "prefill, including those of plain decoding.",
    )
