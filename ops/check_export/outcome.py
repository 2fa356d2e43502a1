"""The gate's results: check.json, the metrics, the rows of served.jsonl, and the model card's accepted lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from dsl.stage import Stage
from ops.check_export.op import WORKERS
from ops.check_export.served_prompts import LiveResult, Prompt, largest, served_tau
from ops.evaluate.intervals import ALL
from ops.evaluate.statistics import by_category
from ops.export_draft.card import table
from ops.lib.drafts.algorithms import NO_SERVER
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.report_sections import interval_text

SKIPPED = "the live stage was SKIPPED, so SGLang has not checked this draft"
REPEAT = (
    "on a machine with a GPU and SGLang, check it with `dflow resume RUN --from check`: until then the result is kept"
)
UNSERVED = f"{NO_SERVER}: the tau of the evaluation is all that can be measured"
COMPARE = "compare the accepted lengths of a server (`dflow serve`) with the tau of the evaluation"


@frozen(kw_only=True)
class Outcome:
    """The results of checking an export.

    report: the evaluation's report.json. prompts: those that SGLang decoded, or would have decoded. engine: the
    algorithm that serves the draft in SGLang. skipped: why SGLang was not used, if served is None. of_target: a
    sentence on whether the installed SGLang serves the target, None where that needs no saying.
    """

    report: Mapping[str, Any]
    prompts: Sequence[Prompt]
    engine: str
    served: LiveResult | None
    skipped: str | None
    warnings: tuple[str, ...] = ()
    of_target: str | None = None

    @property
    def shown_warnings(self) -> tuple[str, ...]:
        """All warnings for the user; the field `warnings` holds only those about the draft."""
        if not self.engine:
            return (f"the live stage was SKIPPED: {UNSERVED}", *self.warnings)
        short = "dflow resume RUN --from check (docs/serving.md)" if self.engine in WORKERS else COMPARE
        return (*(() if self.served is not None else (f"{SKIPPED}: {short}",)), *self.warnings)

    @property
    def remedy(self) -> str:
        """Advice for a skipped live stage."""
        if not self.engine:
            return UNSERVED
        return REPEAT if self.engine in WORKERS else COMPARE

    @property
    def tau_evaluate(self) -> dict[str, float | None]:
        """tau as evaluate measured it on the gate's prompts, under "all" and by category."""
        return taus((prompt.sample.category, Decoded(prompt.tokens, prompt.accepted)) for prompt in self.prompts)

    @property
    def tau_served(self) -> dict[str, float | None] | None:
        """tau as SGLang served the gate's prompts, counted as by evaluate; None if it served none."""
        if self.served is None:
            return None
        return taus((prompt.sample.category, answer) for prompt, answer in self._served)

    @property
    def _served(self) -> list[tuple[Prompt, Decoded]]:
        """The prompts with SGLang's answers, if there are any."""
        return [] if self.served is None else list(zip(self.prompts, self.served.answers, strict=False))

    def to_json(self) -> dict[str, Any]:
        """The content of check.json, written only for drafts that passed."""
        live: dict[str, Any] = {"status": "skipped", "reason": self.skipped, "remedy": self.remedy}
        if self.served is not None:
            live = {
                "status": "passed",
                "sglang": self.served.version,
                "forward": dict(self.served.forward),
                "ties": self.served.ties,
                **self.served.details,
            }
        return {
            "static": "passed",
            "engine": self.engine,
            "live": live,
            "prompts": len(self.prompts),
            "evaluated": self.report["prompts"],
            "tau": {"evaluate": self.tau_evaluate, "served": self.tau_served},
            "warnings": list(self.warnings),
        }

    def metrics(self) -> dict[str, float]:
        """The results by their names in MLflow."""
        flat = {
            "check/static_passed": 1.0,
            "check/live_skipped": float(self.served is None),
            "check/prompts": float(len(self.prompts)),
            "check/warnings": float(len(self.shown_warnings)),
        }
        # Without served figures, the tau of these prompts would be mistaken for that of the evaluation.
        taus_by_kind = () if self.tau_served is None else (("evaluate", self.tau_evaluate), ("served", self.tau_served))
        for kind, of_kind in taus_by_kind:
            for category, tau in of_kind.items():
                if tau is not None:
                    flat[f"check/tau_{kind}" + ("" if category == ALL else f"_{category}")] = tau
        if self.served is not None:
            flat["check/live_mistakes"] = float(len(self.served.mistakes))
            flat["check/ties"] = float(self.served.ties)
            if self.served.forward:
                flat["check/forward_difference"] = largest(self.served.forward.values())
            for name in ("replayed_steps", "feature_distance"):
                if name in self.served.details:
                    flat[f"check/{name}"] = self.served.details[name]
        return flat

    def served_rows(self) -> list[dict[str, Any]]:
        """The lines of served.jsonl."""
        return [
            {
                "id": prompt.sample.id,
                "category": prompt.sample.category,
                "tokens": list(answer.tokens),
                "accepted": list(answer.accepted),
                "accepted_evaluate": list(prompt.accepted),
            }
            for prompt, answer in self._served
        ]

    def show(self, stage: Stage) -> None:
        """Show the result to the user in a few lines."""
        stage.info("the serving directory meets the contract")
        if self.served is None or self.tau_served is None:
            stage.info(f"the live stage was skipped: {' '.join(str(self.skipped).split())}")
        else:
            stage.info(
                f"SGLang {self.served.version} served {len(self.prompts)} prompts, tau "
                f"{number(self.tau_served[ALL])}; evaluate measured {number(self.tau_evaluate[ALL])} on them"
            )
        for warning in self.shown_warnings:
            stage.warn(warning)


def taus(answers: Iterable[tuple[str, Decoded]]) -> dict[str, float | None]:
    """tau = generated tokens / verification steps, under "all" and by category; None without a step."""
    return {name: served_tau(group) for name, group in by_category(answers).items()}


def card_text(outcome: Outcome) -> str:
    """The text of the model card's section on accepted lengths."""
    report = outcome.report
    rows = [
        (name, measured["prompts"], number(measured["tau"]), interval_text(measured, "-"))
        for name, measured in report["tau"].items()
    ]
    parts = [
        f"tau, the tokens per verification step, of at most {report['block_size']}: greedy speculative decoding of "
        f"held-out prompts (split `{report['split']}`, at most {report['max_new_tokens']} tokens each, "
        f"{report['dtype']}), with 95 % bootstrap intervals over the prompts.",
        table(("prompts", "number", "tau", "interval"), rows),
        f"The answers are the target's own: {report['lossless']['errors']} differ, {report['lossless']['ties']} at a "
        "tie of two logits.",
    ]
    if "tau_by_block" in report:
        taus = report["tau_by_block"].items()
        text = ", ".join(f"{number(tau['tau'])} ({interval_text(tau, '-')}) in blocks of {size}" for size, tau in taus)
        parts.append(
            f"By block size, tau is {text}. Shorter blocks cost less per step, which counts with many concurrent "
            "requests (`dflow serve --block-size N`); the speed-up of each depends on the machine: see `dflow report`."
        )
    if not outcome.engine:
        parts.append(f"{UNSERVED[0].upper()}{UNSERVED[1:]}.")
    elif outcome.served is None or outcome.tau_served is None:
        parts.append(f"Not served by SGLang yet ({outcome.skipped}); {outcome.remedy}.")
    else:
        compared = [
            (name, number(outcome.tau_evaluate.get(name)), number(served))
            for name, served in outcome.tau_served.items()
        ]
        parts.append(f"{len(outcome.prompts)} of these prompts, served by SGLang {outcome.served.version}:")
        parts.append(table(("prompts", "tau as above", "tau served"), compared))
    if outcome.engine and outcome.of_target is not None:
        parts.append(f"{outcome.of_target[0].upper()}{outcome.of_target[1:]}.")
    return "\n\n".join(parts)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
