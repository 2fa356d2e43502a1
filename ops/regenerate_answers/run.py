"""Run `regenerate_answers`: the target's own answers in place of the data set's, shard by shard.

A shard is a run of consecutive samples; the target's answers to each are one line of a file in the work folder,
which appears whole or not at all. Answers of unfinished shards are kept as they end (shards.py), so a stage
that was stopped or killed loses only those that were being generated. Filters are applied when the samples are
written. Workers share the shards as ops/lib/data/shared_shards.py says.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve

from dsl.errors import DataError
from dsl.stage import Stage
from ops.artifacts import ImageSamples, TargetModel
from ops.evaluate.statistics import is_repetition
from ops.ingest.sample import LAST
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import json_line, link_or_copy, read_jsonl, write_json
from ops.lib.data.image_packs import link_packs
from ops.lib.data.sample_account import Tally
from ops.lib.data.shared_shards import SharedShards
from ops.lib.data.tool_forms import GIVEN
from ops.lib.forecasts import ANSWERED, SamplesForecast, TargetStated, refuse_conflicts
from ops.lib.target.model import Target
from ops.lib.target.token_ids import GENERATION
from ops.lib.vision.template_kinds import WITH_TOOLS
from ops.regenerate_answers.client import ChatClient
from ops.regenerate_answers.conflicts import conflicts
from ops.regenerate_answers.conversations import SPECIAL_IN_ANSWER, Conversation, Prompts
from ops.regenerate_answers.endpoint import EndpointAnswerer, ServerUse
from ops.regenerate_answers.local import Answerer
from ops.regenerate_answers.op import JUDGEMENT, RegenerateAnswers
from ops.regenerate_answers.sampling import Sampling, unused_settings
from ops.regenerate_answers.shards import Answer, Progress, Shard, asked_rows, shards, turns_of
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.template import TOOLS_NOT_SHOWN

FINISHED = "finish reason {}"
TOO_SHORT, TOO_LONG = "fewer than min_answer_tokens", "more than max_answer_tokens"
REPETITION = "repetition"
RETOKENISED = "tokenised otherwise than generated"
KEPT = 'answers = "data": those of the data set stay, and nothing was generated'
UNTRAINED = "a target that writes the tokens of turns or images is probably not trained, or has another chat template"
OTHER_CHANNELS = f"{UNTRAINED}; or it wrote other channels than analysis, final and calls (docs/targets.md)"
USUAL_CAUSES = (
    "the usual causes are answers that were cut (max_new_tokens), and a chat template that changes answers, such as "
    "their thoughts (enable_thinking)"
)
# How to keep answers that were dropped for a reason.
REMEDIES = {
    FINISHED.format(
        "length"
    ): 'raise max_new_tokens, or keep answers that were cut: finish_reasons = ["stop", "length"]',
    TOO_SHORT: "lower min_answer_tokens",
    TOO_LONG: "raise max_answer_tokens",
    REPETITION: 'set sampling = "checkpoint", since many targets repeat themselves under greedy decoding, or '
    'drop_repetitions = false, with finish_reasons = ["stop", "length"] for answers that do not end',
    RETOKENISED: "set drop_retokenised = false, which trains on tokens that the target did not generate",
    SPECIAL_IN_ANSWER: UNTRAINED,
    TOOLS_NOT_SHOWN: f"{WITH_TOOLS}; of a server, set chat_template beside processor",
}
ENDLESS = {FINISHED.format("length"), TOO_LONG, REPETITION}
JUDGED = 8  # prompts of a trial that are answered as the full run does

Rounds = Sequence[tuple[Sampling, Iterable[Shard | None]]]  # shards to answer one after the other, and how


def regenerate_answers(config: RegenerateAnswers, stage: Stage) -> None:
    """Write the ImageSamples artifact with new answers; the samples of other splits stay unchanged, and with
    answers = "data" all of them. A trial also judges a few answers as the full run gives them.

    Drop reasons: those of `refusal`, conversations.py and client.py, and those for which tokenize_chat drops a prompt.
    Raises DataError for images without a vision target, for a server that refuses all, for more drops than
    max_dropped, and if no answer is left; TransientError for a server that is down.
    """
    samples: ImageSamples = stage.inputs["samples"]
    if config.answers == "data":
        write_once(stage, lambda: write_given(config, stage, samples.path))
        return
    target: TargetModel | None = stage.inputs.get("target")
    statements = _statements(samples, target)
    refuse_conflicts(conflicts(config, statements))
    if target is not None and config.backend == "huggingface" and (reason := statements["target"].unbatched_reason):
        config = evolve(config, batch_tokens=1)
        if stage.worker == 0:
            stage.info(reason)
    prompts = Prompts.load(config, target, samples.path)
    for warning in prompts.warnings if stage.worker == 0 and target is None else ():  # else load_target warned
        stage.warn(warning)
    rounds = judged_rounds(config, stage, prompts, samples.path) if config.trial and stage.worker == 0 else []
    full, config = config, drawn(config) if config.trial else config
    sampling = chosen_sampling(config, stage, prompts)
    progress = Progress(stage, check_rows(samples.path, config, prompts))
    progress.report()
    work = partial(shards, samples.path, config, stage.work_dir, stage.worker)
    answer = answer_by_server if config.backend == "endpoint" else answer_here
    if stage.workers == 1:
        served = answer(config, stage, prompts, [(sampling, work()), *rounds], progress)
        progress.report()
        write_artifact(config, full, stage, samples.path, prompts, served)
        return
    shared = SharedShards(stage)
    mine = shared.claimed(work, lambda shard: shard.path)
    served = answer(config, stage, prompts, [(sampling, mine), *rounds], progress)
    progress.report()
    shared.give("served", [asdict(each) for each in served])

    def write() -> None:
        of_all = [ServerUse(**each) for given in shared.given("served") for each in given]
        write_artifact(config, full, stage, samples.path, prompts, of_all)

    shared.write_artifact(write)


def _statements(samples: ImageSamples, target: TargetModel | None) -> dict[str, Any]:
    """The forecasts that describe the stage's real inputs, by edge."""
    return {
        "samples": SamplesForecast.read(samples.path, samples.digest),
        "target": None if target is None else TargetStated.read(target.path, target.digest),
    }


def chosen_sampling(config: RegenerateAnswers, stage: Stage, prompts: Prompts) -> Sampling:
    """How tokens are drawn; what is taken from the checkpoint, and what is not used, is shown to the user."""
    generation = read_settings(Path(prompts.encoder.processor.source) / GENERATION)
    sampling = Sampling.of(config, generation)
    if config.sampling == "checkpoint" and stage.worker == 0:
        stage.info(f"sampling by {GENERATION} of the target: {sampling}")
        if unused := unused_settings(generation):
            advice = ", and a server can get it by extra_body" if config.backend == "endpoint" else ""
            stage.warn(f"{', '.join(unused)} of {GENERATION} is not used{advice}")
    return sampling


def drawn(config: RegenerateAnswers) -> RegenerateAnswers:
    """The config of a trial's samples: answers are drawn at random, and all of them are kept.

    A target trained for a few steps may repeat one token without text, and its answers do not end.
    """
    return evolve(
        config,
        sampling="greedy",
        temperature=max(config.temperature, 1.0),
        top_p=min(config.top_p, 0.5),
        finish_reasons=("stop", "length"),
        min_answer_tokens=1,
        max_answer_tokens=None,
        drop_repetitions=False,
        drop_retokenised=False,
    )


def judged_rounds(config: RegenerateAnswers, stage: Stage, prompts: Prompts, folder: Path) -> Rounds:
    """The few prompts of a trial that are answered as the full run does, if there are any. folder: of the samples."""
    shard = judged_shard(config, stage, folder)
    if not shard.rows:
        return []
    shard.work_dir.mkdir(exist_ok=True)
    return [(chosen_sampling(config, stage, prompts), [shard])]


def judged_shard(config: RegenerateAnswers, stage: Stage, folder: Path) -> Shard:
    """The first samples of the chosen splits, as a shard of their own."""
    rows = (row for row in asked_rows(folder, config) if row["split"] in config.splits)
    return Shard(0, list(islice(rows, JUDGED)), stage.work_dir / "judged")


def write_judgement(config: RegenerateAnswers, stage: Stage, folder: Path, encoder: ChatEncoder) -> None:
    """Write how many of a trial's judged samples the full run would drop, by reason, and how to keep them."""
    shard = judged_shard(config, stage, folder)
    if not shard.rows:
        return
    outcomes = list(read_jsonl(shard.path))
    dropped = Counter(fault[0] for outcome in outcomes if (fault := refusal(config, outcome)) is not None)
    advice = remedies(dropped, remedies_by_reason(encoder))
    judgement = {"samples": len(outcomes), "dropped": dict(dropped), "remedies": advice}
    write_json(stage.out_dir / JUDGEMENT, judgement)


def answer_here(
    config: RegenerateAnswers, stage: Stage, prompts: Prompts, rounds: Rounds, progress: Progress
) -> list[ServerUse]:
    """Answer with the target, loaded in this process; returns no use of a server."""
    target = Target.load(stage.inputs["target"], stage.device, getattr(torch, config.dtype))
    for sampling, work in rounds:
        Answerer(config, target, prompts, sampling, stage.stop_requested, progress).answer_all(work)
    return []


def answer_by_server(
    config: RegenerateAnswers, stage: Stage, prompts: Prompts, rounds: Rounds, progress: Progress
) -> list[ServerUse]:
    """Answer with a server; returns its use by this worker, for each round."""
    served = []
    for sampling, work in rounds:
        client = ChatClient.of(config, sampling, stage.info if stage.worker == 0 else print)
        answerer = EndpointAnswerer(config, prompts, client, stage.stop_requested, progress)
        answerer.answer_all(work)
        served.append(answerer.served())
    return served


def write_artifact(
    config: RegenerateAnswers,
    full: RegenerateAnswers,
    stage: Stage,
    folder: Path,
    prompts: Prompts,
    served: Sequence[ServerUse],
) -> None:
    """Write the samples, their images and, with a server, its speed in this attempt. folder: of the samples read.

    full: the config by which a trial's answers are judged.
    """
    if full.trial:
        write_judgement(full, stage, folder, prompts.encoder)
    if served:
        together = ServerUse.together(served)
        figures = together.figures()
        stage.log({f"regenerate/{name}": value for name, value in figures.items()}, step=0)
        server = {"model": config.model, "owned_by": together.owner}
        write_json(stage.out_dir / "measurements.json", {**figures, "seconds": together.seconds, "server": server})
    link_packs(folder, stage.out_dir)
    settings = {"enable_thinking": config.enable_thinking, "history_reasoning": config.history_reasoning}
    tools_as = {} if config.tools_as == GIVEN else {"tools_as": config.tools_as}
    write_json(stage.out_dir / ANSWERED, settings | tools_as)
    write_samples(config, stage, folder, prompts.encoder)


def write_once(stage: Stage, write: Callable[[], None]) -> None:
    """Call `write` in only one of the workers."""
    if stage.workers == 1:
        write()
    else:
        SharedShards(stage).write_artifact(write)


def write_given(config: RegenerateAnswers, stage: Stage, folder: Path) -> None:
    """Write the samples unchanged. Raises DataError if none of them has an answer to train on."""
    link_packs(folder, stage.out_dir)
    link_or_copy(folder / "samples.jsonl", stage.out_dir / "samples.jsonl")
    tally = Tally(stage, "regenerate")
    total = unanswered = 0
    for row in read_jsonl(folder / "samples.jsonl"):
        tally.keep(row["split"])
        total += 1
        unanswered += row["messages"][-1]["role"] != "assistant"
    if unanswered == total:
        raise DataError(f'answers = "data": none of the {total} samples has an answer; set answers = "target"')
    tally.finish(config.max_dropped)
    stage.info(KEPT)
    if unanswered:
        stage.warn(f"{unanswered} of {total} samples end with the user's turn, and tokenize_chat drops those")
    stage.progress(total, total)


def check_rows(folder: Path, config: RegenerateAnswers, prompts: Prompts) -> Sequence[int]:
    """The answers wanted before each sample, and then of all. Raises DataError for images without a vision target."""
    before = array("q", [0])
    for row in asked_rows(folder, config):
        if row["split"] in config.splits:
            wanted = sum(turn["role"] == "assistant" for turn in turns_of(row))
            before.append(before[-1] + (min(wanted, 1) if row.get("learnt") == LAST else wanted))
            if row["images"]:
                prompts.check_sees_images(row["id"])
    return before


def write_samples(config: RegenerateAnswers, stage: Stage, folder: Path, encoder: ChatEncoder) -> None:
    """Write samples.jsonl, summary.json and dropped.csv from the finished shards, and log the counts.

    encoder: the target's, with the digest of the tokens that generated ids mean.
    """
    known = remedies_by_reason(encoder)
    outcomes = (outcome for shard in shards(folder, config, stage.work_dir) for outcome in read_jsonl(shard.path))
    answers = tokens = retokenised = trained_on = prompted = kept = spoilt = called = cut = skipped = repeated = 0
    tally = Tally(stage, "regenerate", known)
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for row in asked_rows(folder, config):
            if row["split"] in config.splits:
                outcome = next(outcomes)
                answers += len(outcome["answers"])
                tokens += sum(answer["tokens"] for answer in outcome["answers"])
                prompted += sum(answer["prompted_differently"] for answer in outcome["answers"])
                repeated += sum(map(repeats, outcome["answers"]))
                if (fault := refusal(config, outcome)) is not None:
                    tally.drop(fault[0], row["id"], fault[1])
                    continue
                told = [Answer(**answer) for answer in outcome["answers"]]
                conversation = Conversation.told(row, config.tool_results, told)
                row = regenerated_row(conversation, encoder.vocabulary)
                called, cut = called + ("tools" in row), cut + conversation.is_cut
                skipped += conversation.skipped
                differently = sum(answer["retokenised_differently"] for answer in outcome["answers"])
                retokenised += differently
                spoilt += differently > 0
                trained_on += len(outcome["answers"])
                kept += 1
            file.write(json_line(row))
            tally.keep(row["split"], is_read=row["split"] in config.splits)
    if not kept:
        raise DataError(f"no answer of the target is left:\n{tally.reasons()}\n{remedies(tally.dropped, known)}")
    why = f"are {RETOKENISED}: the draft is trained on tokens that the target did not generate"
    tally.spoilt(retokenised, trained_on, why, other_tokens(spoilt, kept))
    losses = tally.finish(config.max_dropped)
    untrained = known[SPECIAL_IN_ANSWER]
    if SPECIAL_IN_ANSWER in tally.dropped and not any(untrained in loss.remedy for loss in losses):
        stage.warn(f"{tally.dropped[SPECIAL_IN_ANSWER]} answers contain special tokens: {untrained}")
    counts = {
        "answers": answers,
        "tokens": tokens,
        "retokenised_differently": retokenised,
        "repetitions": repeated,
    }
    if config.backend == "endpoint":
        counts["prompted_differently"] = prompted
    if called:
        counts |= {"cut_at_call": cut, "calls_skipped": skipped}
    stage.log({f"regenerate/{name}": count for name, count in counts.items()}, step=0)


def refusal(config: RegenerateAnswers, outcome: Mapping[str, Any]) -> tuple[str, str] | None:
    """The reason and a detail for dropping a sample, from its first faulty answer; None if it is kept.

    outcome: a line of a shard in the work folder, see `Conversation.outcome`.
    """
    for answer in outcome["answers"]:
        tokens = answer["tokens"]
        if config.drop_repetitions and repeats(answer):
            return REPETITION, f"{tokens} tokens"
        if answer["finish_reason"] not in config.finish_reasons:
            return FINISHED.format(answer["finish_reason"]), ""
        if tokens < config.min_answer_tokens:
            return TOO_SHORT, f"{tokens} tokens"
        if config.max_answer_tokens is not None and tokens > config.max_answer_tokens:
            return TOO_LONG, f"{tokens} tokens"
        if config.drop_retokenised and answer["retokenised_differently"]:
            return RETOKENISED, ""
    return (outcome["reason"], outcome["detail"]) if outcome["reason"] else None


def repeats(answer: Mapping[str, Any]) -> bool:
    """Whether an answer repeats itself; unknown, and so False, where a server reports no ids."""
    return is_repetition(answer["ids"] or ())


def other_tokens(spoilt: int, samples: int) -> str:
    """Advice about answered samples whose text is tokenised otherwise than it was generated. spoilt: their number."""
    if 2 * spoilt > samples:
        return (
            f"remove the cause, since drop_retokenised = true would drop {spoilt:,} of {samples:,} samples; "
            f"{USUAL_CAUSES}, or a tokenizer that is not the target's"
        )
    return f"set drop_retokenised = true, which drops their samples; {USUAL_CAUSES}"


def regenerated_row(conversation: Conversation, vocabulary: str) -> dict[str, Any]:
    """The sample of an answered conversation, with the ids of its answers, their finish reasons and lengths."""
    answers = conversation.answers
    places = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    messages = list(conversation.messages)
    for place, answer in zip(places[-len(answers) :], answers, strict=True):
        if answer.ids:
            messages[place] = {**messages[place], "generated_ids": answer.ids, "tokenizer": vocabulary}
    return {
        **conversation.asked,
        "messages": messages,
        "finish_reasons": [answer.finish_reason for answer in answers],
        "answer_tokens": [answer.tokens for answer in answers],
    }


def remedies_by_reason(encoder: ChatEncoder) -> dict[str, str]:
    """REMEDIES, with what special tokens in an answer mean of the target's chat template."""
    return {**REMEDIES, SPECIAL_IN_ANSWER: OTHER_CHANNELS} if encoder.template.has_channels else REMEDIES


def remedies(reasons: Iterable[str], known: Mapping[str, str]) -> str:
    """Advice on how to keep samples that were dropped for these reasons. known: the advice by reason."""
    named = {*reasons}
    found = [remedy for reason, remedy in known.items() if reason in named]
    if named & ENDLESS:
        found.append("an untrained target does not end its answers")
    return "; ".join(found) or "change the data or the chat template, as the reasons say"
