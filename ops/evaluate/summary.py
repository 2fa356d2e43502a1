"""Results of an evaluation: report.json, prompts.jsonl, measurements.json, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from ops.evaluate.comparison import tokens_with_draft
from ops.evaluate.intervals import ALL, REST, group_names, part_names, tau_names
from ops.evaluate.load import LoadPoint, load_curve, load_metrics
from ops.evaluate.lossless import Losses, compare, rounding
from ops.evaluate.op import Evaluate
from ops.evaluate.prompts import Prompt
from ops.evaluate.statistics import (
    acceptance_by_slot,
    acceptance_length,
    accepted_lengths,
    by_category,
    calibration,
    context_part,
    mean_of_prompts,
    reported_groups,
    speedup,
    tau_by,
    tau_by_position,
)
from ops.evaluate.turns import WAYS, Answered, PromptResult
from ops.lib.data.files import read_jsonl
from ops.lib.data.token_shards import KINDS
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_options import ChainUse, DraftUse

ORIGIN = ("publisher", "trained_for")
PARTS = ("reasoning", "text", "call")  # kinds at which a step may begin
# The tables whose parts have fixed names.
NAMED_PARTS = ("tau_by_context", "tau_by_turn", "tau_by_kind", "tau_by_temperature", "tau_by_block")


@frozen(kw_only=True)
class Summary:
    """All results of an evaluation. further: those of the same prompts at other temperatures, batch sizes and block
    sizes. kinds: of the tokens of each answer, as `TokenKinds` gives them. data_kinds: conversations of the split, and
    for each kind those that have learnt tokens of it; empty where that is not known.

    enable_thinking: as the chat template got it. imported: see `import_record`.
    """

    config: Evaluate
    use: DraftUse | ChainUse
    trained_block_size: int
    answered: Answered
    further: Sequence[Answered]
    kinds: Sequence[Sequence[int]]
    inputs: Mapping[str, str]
    enable_thinking: bool | None
    imported: Mapping[str, Any] | None = None
    data_kinds: Mapping[str, int] = {}

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.answered.prompts

    @property
    def results(self) -> Sequence[PromptResult]:
        return self.answered.results

    @cached_property
    def losses(self) -> Losses | None:
        """The comparison of the answers with the plain ones; None if they were sampled, which cannot be compared."""
        return _losses(self.answered)

    @cached_property
    def every_loss(self) -> Sequence[Losses]:
        """The comparisons of all passes at temperature 0."""
        found = [self.losses, *map(_losses, self.further)]
        return [losses for losses in found if losses is not None]

    def report(self) -> dict[str, Any]:
        """The content of report.json."""
        config, size = self.config, self.use.block_size
        trained = [result.speculative for result in self.results]
        untrained = [result.random for result in self.results if result.random is not None]
        report: dict[str, Any] = {
            "split": config.split if config.benchmark is None else None,
            "benchmark": None if config.benchmark is None else Path(config.benchmark).name,
            "benchmark_form": config.benchmark_form,
            "benchmark_prompt": config.benchmark_prompt,
            "turns": self._turns(),
            "unasked": [{"id": id_, "reason": reason} for id_, reason in self.answered.unasked],
            "enable_thinking": self.enable_thinking,
            "dtype": config.dtype,
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "tie_margin": config.largest_tie,
            "block_size": size,
            "block_size_trained": self.trained_block_size,
            "prompts": len(self.results),
            "lossless": None,
            "differences": [],
            "tau": self._by_category(trained),
            "tau_by_position": self._by_position(trained),
            "mean_of_prompts": asdict(mean_of_prompts(trained, *self._drawing)),
            **self._tables(trained),
            "acceptance_by_slot": acceptance_by_slot(trained, size),
            "accepted_lengths": accepted_lengths(trained, size),
            "inputs": dict(self.inputs),
        }
        unmeasured = {kind: self.data_kinds.get(kind, 0) for kind in PARTS if kind not in report["tau_by_kind"]}
        if any(unmeasured.values()):
            report["kinds_without_steps"] = {kind: count for kind, count in unmeasured.items() if count}
            report["samples_of_split"] = self.data_kinds[ALL]
        if self.losses is not None:
            report["lossless"] = _counts(self.losses)
            report["differences"] = self.losses.rows()
        if len(temperatures := self._passes(batch_size=config.batch_size, block_size=size)) > 1:
            report["tau_by_temperature"] = {f"{each.temperature:g}": self._tau(each) for each in temperatures}
        if len(blocks := self._passes(batch_size=config.batch_size, temperature=config.temperature)) > 1:
            report["tau_by_block"] = {str(each.block_size): self._tau(each) for each in blocks}
        if config.mtp:
            report["mtp"] = True
        if config.eagle3 is not None:
            report["eagle3"] = Path(config.eagle3).name
        if self.imported is not None:
            report["imported"] = {name: self.imported[name] for name in ORIGIN if name in self.imported}
        if untrained:
            report["tau_random"] = self._by_category(untrained)
            report["acceptance_by_slot_random"] = acceptance_by_slot(untrained, size)
        return report

    def _turns(self) -> str:
        """Which turns were asked: the "last" or "every" one of a split, or of a benchmark's turns "each" or "first"."""
        if self.config.benchmark is None:
            return "every" if self.config.prompts == "each" else "last"
        if self.config.first_turn:
            return "first"
        return "each" if any(prompt.follow is not None for prompt in self.prompts) else "last"

    def _by_category(self, answers: Sequence[Decoded]) -> dict[str, dict[str, float | None]]:
        """tau over all prompts under "all", and for each category under its name."""
        groups = by_category(zip((result.category for result in self.results), answers, strict=True))
        return {name: asdict(acceptance_length(group, *self._drawing)) for name, group in groups.items()}

    def _by_position(self, answers: Sequence[Decoded]) -> list[dict[str, float | None]]:
        return [asdict(part) for part in tau_by_position(answers, self.config.max_new_tokens, *self._drawing)]

    def _tables(self, answers: Sequence[Decoded]) -> dict[str, dict[str, dict[str, float | None]]]:
        """The tables of tau by part, each a sum over all steps; a table that is not known of every prompt is missing.

        A key gives a part by the place of a prompt and that of an anchor in its answer.
        """
        lengths = [prompt.length for prompt in self.prompts]
        turns = [str(prompt.turn) for prompt in self.prompts if prompt.turn is not None]
        is_set = self.config.benchmark is not None
        groups = reported_groups([prompt.category if is_set else prompt.topic for prompt in self.prompts])
        keys: dict[str, Callable[[int, int], str]] = {
            "tau_by_context": lambda place, anchor: context_part(lengths[place] + anchor),
            "tau_by_kind": lambda place, anchor: KINDS[self.kinds[place][anchor]],
        }
        if len(turns) == len(lengths):
            keys["tau_by_turn"] = lambda place, _: turns[place]
        if set(groups) != {REST}:
            keys["tau_by_group"] = lambda place, _: groups[place]
        return {
            name: {part: asdict(tau) for part, tau in tau_by(answers, key, *self._drawing).items()}
            for name, key in keys.items()
        }

    @property
    def _drawing(self) -> tuple[int, int, int]:
        """Resamplings and seed of the intervals, and the most tokens of a step."""
        return self.config.bootstrap, self.config.seed or 0, self.use.block_size

    def rows(self) -> list[dict[str, Any]]:
        """The lines of prompts.jsonl."""
        return [
            prompt_row(result, prompt.length) | ({} if prompt.topic is None else {"topic": prompt.topic})
            for result, prompt in zip(self.results, self.prompts, strict=True)
        ]

    def measured(self) -> dict[str, Any]:
        """The content of measurements.json."""
        times = [batch.time for batch in self.answered.batches]
        measured: dict[str, Any] = {
            "plain_seconds": sum(time.plain_seconds for time in times),
            "plain_tokens": sum(time.plain_tokens for time in times),
            "speculative_seconds": sum(time.speculative_seconds for time in times),
            "speculative_tokens": sum(time.speculative_tokens for time in times),
            "batches": len(times),
            "times": [
                {"prompts": [result.id for result in batch.results], **asdict(batch.time)}
                for batch in self.answered.batches
            ],
            "batch_size": self.config.batch_size,
            **self._speedup(self.answered),
            "parts": {way: self._parts(way) for way in WAYS},
        }
        if len(loads := self._passes(temperature=self.config.temperature)) > 1:
            measured["load"] = load_curve([self._load_point(each) for each in loads])
        confidence = calibration([result.speculative for result in self.results])
        if confidence is not None:  # its last digits depend on the size of the batches
            measured["confidence"] = confidence
        if self.losses is not None:
            measured["rounding"] = rounding(self.results)
        return measured

    def _passes(
        self, batch_size: int | None = None, temperature: float | None = None, block_size: int | None = None
    ) -> list[Answered]:
        """The passes of a batch size, at a temperature, in blocks of a size, in order of what is not given."""
        found = [
            each
            for each in (self.answered, *self.further)
            if batch_size in (None, each.batch_size)
            and temperature in (None, each.temperature)
            and block_size in (None, each.block_size)
        ]
        return sorted(found, key=lambda each: (each.temperature, each.batch_size, each.block_size))

    def _tau(self, answered: Answered) -> dict[str, Any]:
        """tau of a pass, and whether its answers are the target's own."""
        decoded, losses = [result.speculative for result in answered.results], _losses(answered)
        resamplings, seed, _ = self._drawing
        tau = acceptance_length(decoded, resamplings, seed, answered.block_size)
        return asdict(tau) | {"lossless": _counts(losses)}

    def _load_point(self, answered: Answered) -> LoadPoint:
        times = [batch.time for batch in answered.batches]
        steps = sum(result.speculative.steps for result in answered.results)
        generated = sum(result.speculative.generated for result in answered.results)
        return LoadPoint(
            batch_size=answered.batch_size,
            block_size=answered.block_size,
            tau=generated / steps if steps else None,
            plain_tokens_per_second=sum(time.plain_tokens for time in times)
            / sum(time.plain_seconds for time in times),
            tokens_per_second=sum(time.speculative_tokens for time in times)
            / sum(time.speculative_seconds for time in times),
            **self._speedup(answered),
        )

    def _speedup(self, answered: Answered) -> dict[str, Any]:
        return speedup([batch.time for batch in answered.batches], self.config.bootstrap, self.config.seed or 0)

    def _parts(self, way: str) -> dict[str, float]:
        """The seconds of all batches by part of the work. way: "plain" or "speculative"."""
        parts: dict[str, float] = {}
        for batch in self.answered.batches:
            for name, seconds in batch.parts[way].items():
                parts[name] = parts.get(name, 0.0) + seconds
        return parts


def _losses(answered: Answered) -> Losses | None:
    return compare(answered.results) if answered.temperature == 0 else None


def _counts(losses: Losses | None) -> dict[str, int] | None:
    return None if losses is None else {"errors": len(losses.errors), "ties": len(losses.ties)}


def prompt_row(result: PromptResult, prompt_tokens: int) -> dict[str, Any]:
    """The line of prompts.jsonl for one prompt."""
    speculative, identical = result.speculative, result.speculative.tokens == result.plain.tokens
    return {
        "id": result.id,
        "category": result.category,
        "prompt_tokens": prompt_tokens,
        "tokens": list(result.plain.tokens),
        "speculative": None if identical else list(speculative.tokens),
        "accepted": list(speculative.accepted),
        "tau": speculative.generated / speculative.steps if speculative.steps else None,
        "accepted_random": None if result.random is None else list(result.random.accepted),
        "identical": identical,
    }


def speculative_answers(folder: Path) -> dict[str, Decoded]:
    """The answers with the draft of an evaluation, by the ids of their prompts. folder: of its report."""
    return {
        row["id"]: Decoded(tuple(tokens_with_draft(row)), accepted=tuple(row["accepted"]))
        for row in read_jsonl(folder / "prompts.jsonl")
    }


def metrics(report: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """The measured metrics under their names in MLflow."""
    flat: dict[str, float | None] = {"eval/prompts": report["prompts"]}
    if report["lossless"] is not None:
        flat |= {"eval/lossless_errors": report["lossless"]["errors"], "eval/ties": report["lossless"]["ties"]}
        flat["eval/rounding_largest"] = measured["rounding"]["largest"]
    for kind in ("tau", "tau_random"):
        for category, tau in report.get(kind, {}).items():
            flat |= zip(tau_names(f"eval/{kind}", category), (tau["tau"], tau["low"], tau["high"]), strict=True)
    named = {part_names(name, part): tau for name in NAMED_PARTS for part, tau in report.get(name, {}).items()}
    named |= {group_names(group): tau for group, tau in report.get("tau_by_group", {}).items() if group != REST}
    mean = "eval/mean_of_prompts"
    named[mean, f"{mean}_low", f"{mean}_high"] = report["mean_of_prompts"]
    for names, tau in named.items():
        flat |= zip(names, (tau["tau"], tau["low"], tau["high"]), strict=True)
    flat["eval/tau_unclipped"] = report["tau"][ALL]["unclipped"]
    for slot, share in enumerate(report["acceptance_by_slot"], start=1):
        flat[f"eval/acceptance_slot_{slot:02d}"] = share
    for name in ("ece", "brier") if "confidence" in measured else ():
        flat[f"eval/confidence_{name}"] = measured["confidence"][name]
    for name in ("plain_seconds", "speculative_seconds", "speedup", "speedup_low", "speedup_high"):
        flat[f"eval/{name}"] = measured[name]
    if "load" in measured:
        flat |= load_metrics(measured["load"], report["block_size"])
    for way in WAYS:
        flat[f"eval/{way}_tokens_per_second"] = measured[f"{way}_tokens"] / measured[f"{way}_seconds"]
    for part, seconds in measured["parts"]["speculative"].items():
        flat[f"eval/{part}_share"] = seconds / measured["speculative_seconds"]
    return {name: value for name, value in flat.items() if value is not None}
