"""The Markdown page of benchmarks/gpu.py: a table per part, with the device, the versions and the commit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu_sizes import ALGORITHMS, contexts, step_sizes
from benchmarks.harness import table

Rows = list[list[str]]
SIDES = ("ours", "SpecForge", "speculators", "dense", "chunked")
SAME_LOSS = {("dflash", side) for side in ("SpecForge", "dense", "chunked")}
LOSS_LIMIT = 0.01  # relative, in bfloat16
_table = partial(table, aligned=False)


def page(found: Mapping[str, Any]) -> str:
    """The Markdown page of all figures; parts without figures are listed with the reason."""
    figures = {name: entry["figures"] for name, entry in found["parts"].items() if "figures" in entry}
    sections = ["# Figures of one GPU", _head(found, figures.get("machine"))]
    for title, text in (
        ("Tests", _tests(figures.get("tests"))),
        ("Training step", _steps(found, figures)),
        ("Where the time of our step goes", _profiles(figures)),
        ("The update", _updates(figures.get("optimizer"))),
        ("Capture", _capture(figures)),
        ("Decoding", _decoding(figures.get("evaluate"))),
        ("One rank of a process group", _ranks(figures.get("ranks"))),
        ("Attention and head", _attention(figures.get("attention"))),
        ("Parts", _parts(found)),
    ):
        if text:
            sections += [f"## {title}", text]
    return "\n\n".join(sections) + "\n"


def _head(found: Mapping[str, Any], machine: Mapping[str, Any] | None) -> str:
    lines = [f"Commit {found['commit']}, {found['seconds']:.0f} s."]
    if found["tiny"]:
        lines.append("**Tiny sizes: they prove that the code runs, and measure nothing.**")
    if machine is not None:
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
        memory = f", {machine['memory_gib']:.0f} GiB" if machine["memory_gib"] else ""
        lines.append(f"{machine['device']}{memory}; Python {machine['python']}, {versions}{cuda}.")
        peak = f"{machine['peak_flops'] / 1e12:.0f} TFLOP/s by the data sheet, " if machine["peak_flops"] else ""
        lines.append(f"Peak: {peak}{machine['matmul_flops'] / 1e12:.3g} TFLOP/s measured with one matrix product.")
    return "\n".join(lines)


def _tests(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    counts = f"{found['passed']} passed, {found['skipped']} skipped, {len(found['failed'])} failed"
    return "\n".join([f"{counts}; tests.log says more.", *(f"- {name}" for name in found["failed"])])


def _steps(found: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    rows: Rows = [
        ["context", "algorithm", "side", "s a step", "spread", "of ours", "tokens/s", "MFU", "MiB", "loss", "correct"]
    ]
    for context in contexts(found["tiny"]):
        for algorithm in ALGORITHMS:
            rows += _step_rows(context, algorithm, figures)
    if len(rows) == 1:
        return ""
    sizes = step_sizes(found["tiny"], 0)
    title = (
        f"Forward, loss and backward of a draft of hidden size {sizes['hidden']}, {sizes['layers']} layers, vocabulary "
        f"{sizes['vocabulary']:,}: {sizes['anchors']} anchors x {sizes['block']} of one sequence; no optimizer. "
        "MFU: the FLOPs that the algorithm's step needs (ops/lib/drafts/backbone/sizes.py), the same for all sides, "
        "over seconds and peak. SpecForge's DFlash, the dense reference and the chunked step must have our loss; other "
        "losses are of the same kind but for another problem, see benchmarks/sides."
    )
    return f"{title}\n\n{_table(rows)}"


def _step_rows(context: int, algorithm: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    machine = figures.get("machine", {})
    peak = machine.get("peak_flops") or machine.get("matmul_flops")
    flops = machine.get("step_flops", {}).get(algorithm, {}).get(str(context))
    ours = figures.get(f"step {context} {algorithm} ours")
    for side in SIDES:
        step = figures.get(f"step {context} {algorithm} {side}")
        if step is None:
            continue
        seconds, loss = step["seconds"], f"{step['loss']:.6f}"
        mfu = f"{flops / seconds / peak:.1%}" if flops and peak else "-"
        times = step.get("times", [seconds])
        of_ours = f"{seconds / ours['seconds']:.2f}x" if ours else "-"
        if ours and (algorithm, side) in SAME_LOSS:
            off = abs(ours["loss"] - step["loss"]) / abs(step["loss"])
            loss += f", ours {'' if off <= LOSS_LIMIT else 'IS NOT THE SAME STEP: '}off by {off:.1e}"
        shown = [_seconds(seconds), f"{_seconds(min(times))} to {_seconds(max(times))}", of_ours]
        shown += [f"{context / seconds:,.0f}", mfu, f"{step['mib']:,.0f}", loss, str(step["correct"])]
        yield [f"{context:,}", algorithm, side, *shown]


def _profiles(figures: Mapping[str, Any]) -> str:
    tables = []
    for algorithm in ALGORITHMS:
        found = figures.get(f"profile {algorithm}")
        if found is not None:
            wall, host, device = (_seconds(found[name]) for name in ("wall", "host", "device"))
            kernels = [[each["name"], _seconds(each["seconds"]), str(each["count"])] for each in found["kernels"]]
            title = f"{algorithm}: {wall} a step; the host starts its work in {host}, kernels take {device}."
            tables.append(f"{title}\n\n{_table([['kernel', 'time', 'times'], *_escaped(kernels)])}")
    return "\n\n".join(tables)


def _updates(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows: Rows = [["optimizer", "s an update", "least", "MiB"]]
    for name, each in found["updates"].items():
        memory = "-" if each["mib"] is None else f"{each['mib']:,.0f}"
        rows.append([name, _seconds(each["median"]), _seconds(each["least"]), memory])
    return f"Clipping and one step over {found['weights']:,} weights.\n\n{_table(rows)}"


def _capture(figures: Mapping[str, Any]) -> str:
    rows: Rows = [["by", "tokens/s", "spread", "tokens", "MiB"]]
    ours, served = figures.get("capture"), figures.get("capture by SGLang")
    if ours is not None:
        memory = "-" if ours["mib"] is None else f"{ours['mib']:,.0f}"
        place = "memory" if ours["in_memory"] else "the disk"
        rows.append([f"transformers, into {place}", *_speed(ours["tokens_per_second"]), f"{ours['tokens']:,}", memory])
    for name, speeds in (served or {}).items():
        rows.append([f"SGLang, {name}", *_speed(speeds), "", ""])
    return _table(rows) if len(rows) > 1 else ""


def _speed(speeds: Mapping[str, Any]) -> tuple[str, str]:
    return f"{speeds['median']:,.0f}", f"{speeds['least']:,.0f} to {speeds['most']:,.0f}"


def _decoding(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows: Rows = [
        ["decoding, batch", "tokens/s one by one", "tokens/s in batches", "ratio of seconds", "answers that differ"]
    ]
    for name, each in found.items():
        speeds = [f"{each['tokens'] / statistics.median(each[side]):,.0f}" for side in ("single", "batched")]
        differ = f"{len(each['margins_of_differing'])} of {each['answers']}"
        rows.append([name, *speeds, f"{each['ratio']:.2f}", differ])
    return _table(rows)


def _ranks(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows: Rows = [["collective", "right", "seconds", "MiB"]]
    for name, each in found["collectives"].items():
        rows.append([name, "yes" if each["right"] else "NO", _seconds(each["seconds"]["median"]), f"{each['mib']:.3g}"])
    steps: Rows = [
        ["step", "forward and backward", "update", "loss", "norm of the gradient", "MiB of the step", "MiB held"]
    ]
    for name, each in found["steps"].items():
        times = [_seconds(each[part]["median"]) for part in ("step", "update")]
        memory = ["-" if each[part] is None else f"{each[part]:,.0f}" for part in ("mib", "held_mib")]
        steps.append([name, *times, f"{each['loss']:.6f}", f"{each['gradient_norm']:.6f}", *memory])
    return f"Over {found['backend']}, bfloat16.\n\n{_table(rows)}\n\n{_table(steps)}"


def _attention(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows: Rows = [["attention", "dtype", "window", "error", "error of gradients", "forward", "with backward", "MiB"]]
    for each in found["attention"]:
        errors = [f"{each[name]:.1e}" for name in ("error_forward", "error_gradients")]
        times = [_seconds(each[name]["median"]) if name in each else "" for name in ("forward", "forward_backward")]
        memory = f"{each['mib']:,.0f}" if each.get("mib") is not None else ""
        rows.append([each["attention"], each["dtype"], str(each["window"] or "-"), *errors, *times, memory])
    head: Rows = [["head", "dtype", "error of the loss", "error of the gradient", "seconds", "plain", "MiB", "plain"]]
    for each in found["head"]:
        errors = [f"{each[name]:.1e}" for name in ("error_loss", "error_gradient")]
        times = [_seconds(each[name]["median"]) if name in each else "" for name in ("ours", "plain")]
        memory = [f"{each[name]:,.0f}" if each.get(name) is not None else "" for name in ("ours_mib", "plain_mib")]
        head.append([each["head"], each["dtype"], *errors, *times, *memory])
    return f"Errors against float64, times in bfloat16 at the size of the step.\n\n{_table(rows)}\n\n{_table(head)}"


def _parts(found: Mapping[str, Any]) -> str:
    rows: Rows = [["part", "status", "seconds", ""]]
    for name, entry in found["parts"].items():
        rows.append([name, entry["status"], f"{entry['seconds']:.0f}", reason(entry)])
    return _table(_escaped(rows))


def _escaped(rows: Rows) -> Rows:
    """The rows with `|` escaped, so that every text stays one cell of a table."""
    return [[cell.replace("|", "\\|") for cell in row] for row in rows]


def reason(entry: Mapping[str, Any]) -> str:
    """The reason why a part has no figures, with its last line of output; empty for one with figures."""
    last = entry.get("output", "").strip().splitlines()[-1:]
    return ": ".join(filter(None, [entry.get("why", ""), *last]))


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"
