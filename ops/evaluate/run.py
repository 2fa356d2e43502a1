"""Decode prompts by real speculative decoding, and measure tau.

Every prompt is also decoded plainly, to check that answers are equal and to measure the speed-up (turns.py).
Everything is written before a loss is raised as an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from dsl.errors import DataError
from dsl.stage import Stage
from ops.evaluate.conflicts import conflicts
from ops.evaluate.figures import figures
from ops.evaluate.intervals import ALL, missing_kinds
from ops.evaluate.lengths import check_lengths
from ops.evaluate.load import load_text
from ops.evaluate.lossless import difference_text, lossless_message
from ops.evaluate.op import Evaluate
from ops.evaluate.page import token_text, write_page
from ops.evaluate.prompts import choose_prompts, encoder_of
from ops.evaluate.statistics import is_repetition
from ops.evaluate.summary import Summary, metrics
from ops.evaluate.turns import JOURNAL, Decoder, decode_conversations
from ops.lib.data.files import read_json, write_json, write_jsonl
from ops.lib.data.token_shards import KINDS, TokenReader
from ops.lib.drafts.backbone.load import import_record, load_draft, random_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.chain import ChainHead
from ops.lib.drafts.decoding.decode_batch import DecodeSettings
from ops.lib.drafts.decoding.decode_options import ChainUse, DraftUse
from ops.lib.drafts.decoding.eagle3 import Eagle3Head
from ops.lib.drafts.decoding.mtp import MtpHead
from ops.lib.forecasts import DraftForecast, TargetStated, TokensForecast, refuse_conflicts
from ops.lib.report_sections import NOT_KNOWN, interval_text, is_known
from ops.lib.target.model import Target, read_config
from ops.lib.target.quantised import dequantising_note
from ops.lib.vision.processor import Processor

LOST = "report"  # in the work folder: the artifact of an evaluation with a loss


def evaluate(config: Evaluate, stage: Stage) -> None:
    """Write the Report artifact.

    Raises DataError if draft or tokens do not fit the target, and if speculative decoding changed an answer
    beyond a tie; the report is then in the work folder.
    """
    dtype = getattr(torch, config.dtype)
    statements = _statements(stage)
    refuse_conflicts(conflicts(config, statements))
    if reason := statements["target"].unbatched_reason:
        config = evolve(config, batch_size=1, batch_sizes=())
        stage.info(reason)
    if note := dequantising_note(read_config(stage.inputs["target"].path / "model"), config.dtype):
        stage.warn(note)
    target = Target.load(stage.inputs["target"], stage.device, dtype)
    encoder = encoder_of(stage.inputs["tokens"], target)
    draft, untrained, use = _draft(config, stage, target)
    decoder = Decoder(
        target=target,
        draft=draft,
        untrained=untrained,
        use=use,
        settings=_settings(config, config.temperature),
        block_sizes=[size for size in dict.fromkeys(config.block_sizes) if size != use.block_size],
    )
    prompts = choose_prompts(config, stage, target, encoder)
    trained = draft.config if isinstance(draft, DraftModel) else ChainUse(use.block_size)
    check_lengths(prompts, target.family.text_config, trained, config.max_new_tokens)
    answered = decode_conversations(decoder, prompts, config.batch_size, stage)
    further = [answered.in_blocks(size) for size in decoder.block_sizes]
    for temperature, size in config.further_passes:
        stage.info(f"the same prompts at temperature {temperature:g} in batches of {size}")
        blocks = decoder.block_sizes if temperature == config.temperature else ()
        other = evolve(decoder, untrained=None, settings=_settings(config, temperature), block_sizes=blocks)
        journal = f"{JOURNAL}-{temperature:g}-{size}-"
        found = decode_conversations(other, prompts, size, stage, journal)
        further += [found, *(found.in_blocks(block) for block in blocks)]
    summary = Summary(
        config=config,
        use=use,
        trained_block_size=trained.block_size,
        answered=answered,
        further=further,
        kinds=[
            encoder.kinds.of(result.speculative.tokens, prompt.ids()).tolist()
            for prompt, result in zip(answered.prompts, answered.results, strict=True)
        ],
        enable_thinking=read_json(stage.inputs["tokens"].path / "tokens.json").get("enable_thinking"),
        inputs={name: given.digest for name, given in sorted(stage.inputs.items()) if given is not None},
        imported=None if config.rival else import_record(stage.inputs["draft"].path),
        data_kinds=data_kinds(TokenReader(stage.inputs["tokens"], config.split)) if config.benchmark is None else {},
    )
    finish(summary, encoder.processor, stage)


def _draft(
    config: Evaluate, stage: Stage, target: Target
) -> tuple[DraftModel | ChainHead, DraftModel | None, DraftUse | ChainUse]:
    """What proposes, the random draft beside it, and how both are used."""
    if config.rival is not None:
        use = ChainUse() if config.block_size is None else ChainUse(config.block_size)
        if config.eagle3 is not None:
            return Eagle3Head.load(target, Path(config.eagle3)), None, use
        return MtpHead.load(target, stage.inputs["target"].path / "model"), None, use
    dtype = target.model.dtype
    draft = load_draft(stage.inputs["draft"].path, stage.device, dtype)
    untrained = random_draft(draft.config, config.seed or 0, stage.device, dtype) if config.random_draft else None
    return draft, untrained, DraftUse.of(draft.config, config.block_size)


def data_kinds(reader: TokenReader) -> dict[str, int]:
    """The samples of a split under "all", and of each kind of token those that learn some; empty if not known."""
    found = [reader.kinds(place) for place in range(len(reader))]
    known = [kinds for kinds in found if kinds is not None]
    counts = Counter(KINDS[kind] for kinds in known for kind in kinds.unique().tolist())
    return {ALL: len(found), **counts} if known else {}


def _settings(config: Evaluate, temperature: float) -> DecodeSettings:
    within = config.largest_tie if temperature == 0 else 0.0
    return DecodeSettings(config.max_new_tokens, temperature, config.seed or 0, within)


def _statements(stage: Stage) -> dict[str, Any]:
    """The forecasts that describe the stage's real inputs, by edge."""
    target, tokens = stage.inputs["target"], stage.inputs["tokens"]
    draft = stage.inputs.get("draft")
    return {
        "draft": None if draft is None else DraftForecast.read(draft.path, draft.digest),
        "target": TargetStated.read(target.path, target.digest),
        "tokens": TokensForecast.read(tokens.path, tokens.digest),
    }


def finish(summary: Summary, processor: Processor, stage: Stage) -> None:
    """Write and log all results; if answers are not lossless, write to the work folder and raise the error."""
    lost = next((losses for losses in summary.every_loss if losses.errors), None)
    folder = stage.work_dir / LOST if lost is not None else stage.out_dir
    folder.mkdir(exist_ok=True)
    report, measured = summary.report(), summary.measured()
    write_json(folder / "report.json", report)
    write_jsonl(folder / "prompts.jsonl", summary.rows())
    write_json(folder / "measurements.json", measured)
    write_page(folder / "prompts.html", summary, processor)
    stage.log(metrics(report, measured), step=0)
    for name, figure in figures(report, measured):
        stage.figure(name, figure)
    text = partial(token_text, processor)
    report_result(stage, summary, report["tau"]["all"], measured, text)
    for sentence in missing_kinds(report):
        stage.warn(sentence)
    if lost is not None:
        # Answers decoded with the bug must not be reused once it is fixed.
        for journal in stage.work_dir.glob(f"{JOURNAL}*.jsonl"):
            journal.unlink()
        raise DataError(
            lossless_message(lost, summary.config.largest_tie, measured["rounding"], text, str(folder.resolve()))
        )


def report_result(
    stage: Stage, summary: Summary, tau: Mapping[str, Any], measured: Mapping[str, Any], text: Callable[[int], str]
) -> None:
    """Show the result to the user in a few lines. text: gives a token's text."""
    config, losses = summary.config, summary.losses
    low, high, batches = measured["speedup_low"], measured["speedup_high"], f"in batches of {config.batch_size}"
    if is_known(low, high):
        faster = f"{measured['speedup']:.2f} times as fast as plain decoding {batches}"
    else:
        faster = f"its speed-up {batches} is {NOT_KNOWN}, somewhere in {low:.2f} to {high:.2f}: evaluate more prompts"
    if tau["steps"]:
        stage.info(
            f"tau {tau['tau']:.2f} ({interval_text(tau, 'no interval of one prompt')}) over {tau['prompts']} prompts, "
            f"of at most {summary.use.block_size}; {faster}"
        )
    else:
        stage.info(f"no tau: the target's answer to each of the {tau['prompts']} prompts is one token; {faster}")
    if "load" in measured:
        stage.info(load_text(measured["load"]))
    for prompt, reason in summary.answered.unasked:
        stage.warn(
            f'the turns behind prompt "{prompt}" are not asked, since the answer cannot be shown again: {reason}'
        )
    repeated = sum(is_repetition(result.plain.tokens) for result in summary.results)
    if 2 * repeated > len(summary.results):
        stage.warn(
            f"{repeated} of {len(summary.results)} answers of the target repeat the same few tokens: any draft "
            "predicts those, so tau says nothing about a real target"
        )
    if losses is None:
        stage.info(
            "answers were sampled (temperature above 0), so they cannot be checked token by token; an "
            "evaluation at temperature 0 checks them"
        )
        return
    for tie in losses.ties:
        stage.info(f"tie: {difference_text(tie, text)}")
    if losses.has_many_ties:
        stage.warn(
            f"{len(losses.ties)} of {losses.answers} answers differ at a tie, more than one in ten, which may hide a "
            'bug as small as the rounding; repeat it with dtype = "float32", where ties vanish and bugs remain'
        )
    rounded = measured["rounding"]
    if rounded["tokens"] and rounded["p99"] > config.largest_tie:
        stage.warn(
            "if both ways chose the same token, the margins of the two best logits differ by "
            f"{rounded['median']:.1e} in the median and up to {rounded['largest']:.1e}, which is more than "
            f"tie_margin = {config.largest_tie:g}: the passes differ by more than rounding, or the margin is too "
            "small for this target (docs/evaluation.md)"
        )
