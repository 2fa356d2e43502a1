"""Run `regenerate_answers`: the target's own answers in place of the data set's, shard by shard.

A shard is a run of consecutive samples; what the target answered to each is one line of a file in the work folder,
which appears whole or not at all. Of the shards under way the answers are kept as they come (journal.py), so a stage
that was stopped or killed loses one batch, or the requests in flight, at most. Filters are applied when the samples are
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from dsl.errors import DataError
from dsl.stage import Stage
from ops.artifacts import ImageSamples, TargetModel
from ops.lib.data.files import json_line, link_or_copy, read_jsonl, write_json
from ops.lib.data.sample_account import Tally
from ops.lib.target.model import Target
from ops.regenerate_answers.client import ChatClient
from ops.regenerate_answers.conversations import SPECIAL_IN_ANSWER
from ops.regenerate_answers.endpoint import EndpointAnswerer
from ops.regenerate_answers.filters import UNTRAINED, refusal, regenerated_row, remedies
from ops.regenerate_answers.local import Answerer
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.prompts import Prompts
from ops.regenerate_answers.shards import Shard, shards


def regenerate_answers(config: RegenerateAnswers, stage: Stage) -> None:
    """Write the ImageSamples artifact with new answers; the samples of other splits pass unchanged.

    Drop reasons: those of filters.py, conversations.py and client.py, and those for which tokenize_chat drops a prompt.
    Raises DataError for images that the target cannot see, for a server that refuses all, for more drops than
    max_dropped, and where no answer is left; TransientError for a server that answers no more.
    """
    samples: ImageSamples = stage.inputs["samples"]
    target: TargetModel | None = stage.inputs.get("target")
    prompts = Prompts.load(config, target, samples.path)
    total = check_rows(samples.path, config, prompts)
    work = shards(samples.path, config, stage.work_dir)
    answer = answer_by_server if config.backend == "endpoint" else answer_here
    answer(config, stage, prompts, work, lambda done: stage.progress(done, total))
    for pack in sorted(samples.path.glob("images-*.bin")):
        link_or_copy(pack, stage.out_dir / pack.name)
    write_samples(config, stage, samples.path)


def answer_here(
    config: RegenerateAnswers, stage: Stage, prompts: Prompts, work: Iterable[Shard], progress: Callable[[int], None]
) -> None:
    """Load the target and let it answer."""
    target = Target.load(stage.inputs["target"], stage.device, getattr(torch, config.dtype))
    Answerer(config, target, prompts, stage.stop_requested).answer_all(work, progress)


def answer_by_server(
    config: RegenerateAnswers, stage: Stage, prompts: Prompts, work: Iterable[Shard], progress: Callable[[int], None]
) -> None:
    """Let a server answer, and write what this attempt took to measurements.json."""
    client = ChatClient.of(config, stage.info)
    answerer = EndpointAnswerer(config, prompts, client, stage.stop_requested)
    answerer.answer_all(work, progress)
    figures = answerer.figures()
    stage.log({f"regenerate/{name}": value for name, value in figures.items()}, step=0)
    served = {"model": config.model, "owned_by": client.models.get(str(config.model))}
    write_json(stage.out_dir / "measurements.json", {**figures, "seconds": answerer.seconds, "server": served})


def check_rows(folder: Path, config: RegenerateAnswers, prompts: Prompts) -> int:
    """How many samples are to be answered. Raises DataError where there is none, or the target sees no images."""
    count = 0
    for row in read_jsonl(folder / "samples.jsonl"):
        if row["split"] in config.splits:
            count += 1
            if row["images"]:
                prompts.check_sees_images(row["id"])
    if not count:
        raise DataError(f"no samples in the splits {', '.join(config.splits)}: nothing to answer")
    return count


def write_samples(config: RegenerateAnswers, stage: Stage, folder: Path) -> None:
    """Write samples.jsonl, summary.json and dropped.csv from the finished shards, and log the counts."""
    outcomes = (outcome for shard in shards(folder, config, stage.work_dir) for outcome in read_jsonl(shard.path))
    answers = tokens = retokenised = prompted = left = 0
    tally = Tally(stage, "regenerate")
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for row in read_jsonl(folder / "samples.jsonl"):
            if row["split"] in config.splits:
                outcome = next(outcomes)
                answers += len(outcome["answers"])
                tokens += sum(answer["tokens"] for answer in outcome["answers"])
                prompted += sum(answer["prompted_differently"] for answer in outcome["answers"])
                if (fault := refusal(config, outcome)) is not None:
                    tally.drop(fault[0], row["id"], fault[1])
                    continue
                row = regenerated_row(row, outcome)
                retokenised += sum(answer["retokenised_differently"] for answer in outcome["answers"])
                left += 1
            file.write(json_line(row))
            tally.keep(row["split"])
    if not left:
        raise DataError(f"no answer of the target is left:\n{tally.reasons()}\n{remedies(tally.dropped)}")
    tally.finish(config.max_dropped)
    if SPECIAL_IN_ANSWER in tally.dropped:
        stage.warn(f"{tally.dropped[SPECIAL_IN_ANSWER]} answers hold special tokens: {UNTRAINED}")
    counts = {"answers": answers, "tokens": tokens, "retokenised_differently": retokenised}
    if config.backend == "endpoint":
        counts["prompted_differently"] = prompted
    stage.log({f"regenerate/{name}": count for name, count in counts.items()}, step=0)
