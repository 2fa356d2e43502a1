"""Measures the usual causes of a low tau. A separate process:

    python -m ops.tools.diagnose.run REQUEST RESULT

REQUEST is {"graph", "node", "artifacts": {node: [path, digest]}, "prompts", "split": as for Chain.of, "loss": [[step,
train/loss], ...], "again": the command that writes the draft again, "budget": seconds, "begun": when they began, by
time.monotonic()}. RESULT gets what `diagnose` describes, or {"error"}. Before each measurement a line with NOW and its
name is printed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict

from dsl.errors import DataError, DflowError
from dsl.finding import Finding
from dsl.graph import graph_from_json
from dsl.stage import NOW
from ops.artifacts import TokenShards
from ops.evaluate.prompts import Prompt, encoder_of, with_turns
from ops.evaluate.statistics import acceptance_length
from ops.evaluate.summary import speculative_answers
from ops.evaluate.verdicts import CEILING
from ops.lib.data.batching import spread
from ops.lib.data.files import read_json
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_batch import DecodeSettings
from ops.lib.forecasts import TargetStated
from ops.lib.target.model import Target, check_images_fit, check_tokens_fit
from ops.tools.diagnose.bench import Bench, Setting, spread_samples, tau_of
from ops.tools.diagnose.chain import Chain
from ops.tools.diagnose.curve import curve_finding, flat_finding, skipped_finding
from ops.tools.diagnose.export import loadable, of_import, put_first, target_finding, trained_of
from ops.tools.diagnose.features import features_finding
from ops.tools.diagnose.feeding import Correction, correct, reading_finding, unless_open
from ops.tools.diagnose.judgement import (
    AMOUNT,
    CAUSE,
    DECODING,
    HELD_OUT_GAP,
    LEAST_PROMPTS,
    OWN_ANSWERS,
    more_time,
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
from ops.tools.diagnose.parts import Part, learnt_tokens, part_findings, tables_of_tau
from ops.tools.diagnose.training_data import anchors_by_category, kept_findings, mask_findings, own_finding

WAYS = 12  # in which prompts are decoded: 7 to 9 settings, random weights, the training's prompts
LEARNT = "train"  # the split that a draft is trained on
RESAMPLINGS = 2000  # for the interval of tau
TARGET, EXPORT, FED, RANDOM, FEATURES, TRAINING = STEPS = (
    "loading the target",
    "the draft as exported",
    "the draft's inputs",
    "random weights",
    "the stored features",
    "the samples of the training",
)


def main(arguments: Sequence[str]) -> int:
    request_file, result_file = map(Path, arguments)
    request = read_json(request_file)
    try:
        made = {name: (Path(place), digest) for name, (place, digest) in request["artifacts"].items()}
        chain = Chain.of(graph_from_json(request["graph"]), made, request["node"], request["split"])
        rest = (request["loss"], request["again"], _report, request["budget"])
        result = diagnose(chain, request["prompts"], *rest, begun=request["begun"])
    except DflowError as error:
        result = {"error": str(error)}
    result_file.write_text(json.dumps(result, allow_nan=False), "utf-8")  # not atomic: its folder may not be writable
    return 0


def _report(what: str) -> None:
    print(f"{NOW}{what}", flush=True)


class Steps:
    """The progress of a diagnosis. report: called with each step that begins, and with each part of it."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._now = ""

    def begin(self, step: str) -> None:
        """Begin one of STEPS, and report it."""
        self._now = f"{STEPS.index(step) + 1} of {len(STEPS)}, {step}"
        self._report(self._now)

    def part(self, what: str) -> None:
        self._report(f"{self._now}: {what}")


def affordable(bench: Bench, setting: Setting, prompts: Sequence[TokenSample], seconds: float) -> tuple[int, float]:
    """The number of prompts that can be decoded in all ways within `seconds`, and the seconds that these take at most.

    LEAST_PROMPTS of them are decoded to find out. Other inputs may have a tau of 1, and so take tau times as long.
    """
    trial = prompts if len(prompts) <= LEAST_PROMPTS else spread(prompts, LEAST_PROMPTS)
    started = time.monotonic()
    answers = bench.decode(setting, trial, "to see how long that takes")
    taken = time.monotonic() - started
    tau = tau_of(answers) if any(answer.steps for answer in answers) else 1.0
    each = WAYS * taken * tau / len(trial)
    count = min(len(prompts), max(LEAST_PROMPTS, int(seconds / each)))
    return count, count * each


def diagnose(
    chain: Chain,
    prompts: int,
    curve: Sequence[Sequence[float]],
    again: str,
    report: Callable[[str], None],
    budget: float,
    *,
    begun: float | None = None,
) -> dict[str, Any]:
    """Measure the usual causes of a low tau of a draft, and return the result as JSON values.

    It holds {"node", "split", "instead_of": the requested split if it has no prompt, or null, "prompts", "budget": the
    one that allowed no more prompts, or null, "dtype", "device", "max_new_tokens", "tau": {"exported", "low", "high",
    "corrected"}, "block_size", "evaluation": the fields of the run's own, or null, "parts": {table of tau: the figures
    of each part}, "findings": Finding.to_json() of each, causes first, "gains": {name of a cause: the measured rise of
    tau if it is fixed}}. Causes that only another training could show have no gain.
    "exported", "low" and "high" are null if the export cannot be used, the last two also for one prompt with a step.
    "corrected": with everything fixed that needs no training; if that is close to block_size, nothing that only
    explains a low tau is a cause: its level is then "info". What is wrong at any tau remains a cause.

    prompts: the number of held-out prompts to decode, and of training prompts. Fewer are decoded if they would take
    more than `budget` seconds since `begun` (default: now), but at least LEAST_PROMPTS. A target whose results padding
    changes decodes them one by one. Raises DataError if nothing of the draft can be loaded or fits the target, the
    target does not verify drafts, logits are not finite, or no split has a prompt.
    """
    device = "cuda" if torch.cuda.is_available() and chain.device != "cpu" else "cpu"
    steps, begun = Steps(report), time.monotonic() if begun is None else begun
    steps.begin(TARGET)
    stated = TargetStated.read(chain.target.path, chain.target.digest)
    if stated.verifying_mistake:
        raise DataError(f"{chain.node}: {stated.verifying_mistake}")
    if stated.unbatched_reason:
        steps.part(stated.unbatched_reason)
    at_once = 1 if stated.unbatched_reason else chain.batch_size
    target = Target.load(chain.target, device, getattr(torch, chain.dtype))
    split, held_out = _held_out(chain, target, prompts)
    trained, weights = trained_of(chain.draft, chain.training, chain.target)
    exported, of_export = loadable(chain.draft, target.info, trained, weights, again)
    bench = Bench(target, weights, DecodeSettings(chain.max_new_tokens), at_once, steps.part)
    steps.begin(EXPORT)
    loading = time.monotonic() - begun
    count, seconds = affordable(bench, exported, held_out, budget - loading)
    forecast = f"{max(1, round(seconds)):,} s at most, after {max(1, round(loading)):,} s for loading"
    steps.part(f"{count} of {len(held_out)} prompts, {forecast}")
    is_cut = count < len(held_out)
    if is_cut:
        prompts, held_out = count, spread(held_out, count)
    as_exported = bench.decode(exported, held_out, "as exported")
    if not any(answer.steps for answer in as_exported):
        raise DataError(f"{chain.node}: every answer is one token long, which needs no draft")
    steps.begin(FED)
    correction = correct(bench, exported, trained, held_out, again)
    answers = bench.decode(correction.setting, held_out, "with corrected inputs")
    steps.begin(RANDOM)
    untrained = random_draft(correction.setting.config, 0, device, getattr(torch, chain.dtype))
    by_chance = bench.decode_with(untrained, correction.setting.use, held_out)
    steps.begin(FEATURES)
    of_features = features_finding(target, chain.features, chain.learnt, is_online=chain.is_online)
    of_target = target_finding(chain.draft, chain.training, chain.target)
    wrong_at_any_tau = [*put_first(of_export, correction.findings), of_target, of_features]
    steps.begin(TRAINING)
    is_corrected = correction.setting != exported
    own = dict(zip((prompt.id for prompt in held_out), answers, strict=True))
    tables, of_parts = _by_part(chain, target, split, own, is_corrected, correction.setting.config.block_size)
    known = trained.config or correction.setting.config  # an export may have values that no training used
    others = [
        unless_open(random_finding(answers, by_chance), correction.findings),
        unless_open(reading_finding(bench, correction.setting, held_out), correction.findings),
        category_finding(held_out, answers),
        repetition_finding(answers),
        *of_parts,
        *kept_findings(chain.losses),
        *_against_training(chain, bench, correction, answers, split, prompts),
        *mask_findings(chain.learnt, chain.target, known.mask_token_id, known.block_size),
        flat_finding(curve),
        curve_finding(curve, _recorded(chain)),
        skipped_finding(_recorded(chain)),
    ]
    if tau_of(answers) >= CEILING * correction.setting.config.block_size:
        others = [unjudged(finding) for finding in others]
    found = [*wrong_at_any_tau, *others]
    findings = [
        with_next_step(finding, prompts, {split: len(held_out)})
        for finding in (map(of_import, found) if trained.is_imported else found)
    ]
    if is_cut:
        findings = [more_time(finding) for finding in findings]
    replaced = {finding.code for finding in of_export}
    gains = {name: gain for name, gain in correction.gains.items() if name not in replaced}
    return {
        "node": chain.node,
        "split": split,
        "instead_of": None if split == chain.split else chain.split,
        "prompts": len(held_out),
        "budget": budget if is_cut else None,
        "dtype": chain.dtype,
        "device": device,
        "max_new_tokens": chain.max_new_tokens,
        "block_size": correction.setting.config.block_size,
        "evaluation": None if chain.evaluation is None else asdict(chain.evaluation),
        "tau": {**_as_exported(as_exported, of_export, exported.config.block_size), "corrected": tau_of(answers)},
        "parts": {table: [asdict(part.figures) for part in parts] for table, parts in tables.items()},
        "findings": [finding.to_json() for finding in sorted_findings(findings, gains)],
        "gains": gains,
    }


def _as_exported(answers: Sequence[Decoded], of_export: Sequence[Finding], block_size: int) -> dict[str, float | None]:
    """The tau before any correction, with its interval."""
    if any(finding.level == CAUSE for finding in of_export):
        return {"exported": None, "low": None, "high": None}
    tau = acceptance_length(answers, RESAMPLINGS, 0, block_size)
    return {"exported": tau.tau, "low": tau.low, "high": tau.high}


def _by_part(
    chain: Chain, target: Target, split: str, own: Mapping[str, Decoded], is_corrected: bool, block_size: int
) -> tuple[dict[str, list[Part]], list[Finding]]:
    """The tables of tau by part, and a finding on each.

    own: the answers of this diagnosis, by the ids of their prompts. Where nothing of the draft was corrected, those of
    the run's evaluation are counted in their place: they are of the same draft, and of all its prompts.
    """
    has_processor = (chain.judged.path / "processor").is_dir()
    kinds = encoder_of(chain.judged, target).kinds if has_processor else None
    judged = TokenReader(chain.judged, split)
    answers, asks_each = own, False
    if chain.answered is not None and split == chain.split and not is_corrected:
        answers, asks_each = speculative_answers(chain.answered.path), chain.asks_each
    every = Prompt.of_each_answer(judged) if asks_each else Prompt.held_out(judged)
    prompts = with_turns([prompt for prompt in every if prompt.id in answers], judged)
    reader = None if chain.learnt is None else TokenReader(chain.learnt, LEARNT)
    learnt = None if reader is None else learnt_tokens(reader, kinds)
    tables = tables_of_tau(prompts, [answers[prompt.id] for prompt in prompts], kinds, learnt, block_size)
    return tables, part_findings(tables, learnt)


def _held_out(chain: Chain, target: Target, count: int) -> tuple[str, list[TokenSample]]:
    """The first split that has prompts, and its samples. Raises DataError if none has."""
    tried = (chain.split, *chain.other_splits)
    for split in tried:
        if samples := _samples(chain.judged, split, target, count):
            return split, samples
    other = "" if chain.other_splits else "leave --split out, or "
    raise DataError(
        f"no prompts to decode in the split {' or '.join(tried)}: {other}raise test_fraction or val_fraction of "
        'ingest, or give samples "split": "test" in the JSONL file, and run the pipeline again'
    )


def _samples(tokens: TokenShards, split: str, target: Target, count: int) -> list[TokenSample]:
    """The samples of a split, spread over it. Raises DataError if the target cannot read these tokens."""
    reader = TokenReader(tokens, split)
    check_tokens_fit(reader.info, target.info)
    check_images_fit(reader, target.family)
    return spread_samples(reader, count)


def _against_training(
    chain: Chain, bench: Bench, correction: Correction, held_out: Sequence[Decoded], split: str, prompts: int
) -> list[Finding]:
    """The findings that compare with training samples. split: that of the held-out answers."""
    samples = [] if chain.learnt is None else _samples(chain.learnt, LEARNT, bench.target, prompts)
    if chain.learnt is None or not samples:
        why = "the store no longer has the training samples"
        names = (OWN_ANSWERS, HELD_OUT_GAP, AMOUNT, DECODING)
        return [unmeasured(name, why) for name in names]
    training = _recorded(chain)
    num_anchors = training.get("recipe", {}).get("num_anchors")
    learnt = anchors_by_category(TokenReader(chain.learnt, LEARNT), num_anchors)
    seen = bench.decode(correction.setting, samples, "of the training")
    bench.report("the target's own choices along the training answers")
    own = own_finding(bench.target, samples, chain.regenerated_at, chain.kept_by)
    block_size = correction.setting.config.block_size
    decoding = decoding_finding(samples, seen, training, learnt, block_size, is_own=own.level != CAUSE)
    both = {split: len(held_out), LEARNT: len(samples)}
    return [
        own,
        with_next_step(gap_finding(seen, held_out, training), prompts, both),
        with_next_step(amount_finding(seen, held_out, training), prompts, both),
        with_next_step(unless_open(decoding, correction.findings), prompts, {LEARNT: len(samples)}),
    ]


def _recorded(chain: Chain) -> dict[str, Any]:
    """The training's record; empty if that is gone."""
    found: dict[str, Any] = {} if chain.training is None else read_json(chain.training.path / "training.json")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
