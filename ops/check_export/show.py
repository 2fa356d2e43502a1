"""Report sections of `check_export`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import NO_SERVER, plain
from ops.lib.report_sections import Section, Table, facts, verdict


def report(folder: Path) -> Sequence[Section]:
    """The report sections of a checked draft: checks passed, tau as evaluated and as served, and verdicts."""
    check = read_json(folder / "check.json")
    live = {f"live: {name}": value for name, value in check["live"].items()}
    sections = [Section("gate", facts({"static": check["static"], **live}))]
    of = f" of the {check['evaluated']} that evaluate asked" if "evaluated" in check else ""
    which = f"the gate's {check['prompts']} prompts{of} (live_prompts)"
    note = f"Of {which}, so tau is another than that of the evaluation."
    if check["prompts"] == check.get("evaluated"):
        note = f"Of the {check['prompts']} prompts of the evaluation."
    if check.get("engine", plain().engine):
        served = check["tau"].get("served") or {}
        rows = [(category, tau, served.get(category)) for category, tau in check["tau"]["evaluate"].items()]
        sections.append(Section("tau", Table(("category", "evaluate", "served by SGLang"), rows), note))
    else:
        sections.append(Section("tau", Table(("category", "evaluate"), list(check["tau"]["evaluate"].items())), note))
    if check["warnings"]:
        sections.append(Section("warnings of the gate", Table(("warning",), [(text,) for text in check["warnings"]])))
    return [*sections, *_verdicts(check)]


def _verdicts(check: Mapping[str, Any]) -> Iterator[Section]:
    """The verdict sections of a checked draft. check: check.json, which only a draft that passed has."""
    live, tau = check["live"], check["tau"]
    engine = check.get("engine", plain().engine)
    contract = f"the contract of SGLang's {engine} worker" if engine else f"the contract, and {NO_SERVER}"
    yield Section("gate", verdict("safe", f"the serving directory meets {contract}", "good"))
    if live["status"] == "passed":
        figures = [of["all"] for of in (tau["served"], tau["evaluate"])]
        served, evaluated = ("-" if figure is None else f"{figure:.2f}" for figure in figures)
        text = f"SGLang {live['sglang']} served {check['prompts']} prompts: tau {served}, by evaluate {evaluated}"
        yield Section("served", verdict("safe", f"{text}; {live['ties']} answers or steps differ at a tie", "good"))
    else:
        why = "SGLang has not served it" if engine else NO_SERVER
        yield Section("served", verdict("safe", f"not measured: {why}", "warning", live["remedy"]))
