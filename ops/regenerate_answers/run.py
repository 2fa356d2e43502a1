"""Run `regenerate_answers`: the target's own answers in place of the data set's, shard by shard.

A shard is a run of consecutive samples; what the target answered to each is one line of a file in the work folder,
which appears whole or not at all. Of the shard under way the answers are kept batch by batch (journal.py), so a stage
that was stopped or killed loses one batch at most. Filters are applied when the samples are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from dsl.errors import DataError
from dsl.stage import Stage
from ops.artifacts import ImageSamples
from ops.files import finish_file, json_line, link_or_copy, read_jsonl, write_jsonl
from ops.load_target.model import Target
from ops.regenerate_answers.conversations import Answerer
from ops.regenerate_answers.filters import answered, refusal
from ops.regenerate_answers.journal import Journal
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.prompts import Prompts
from ops.tally import Tally


def regenerate_answers(config: RegenerateAnswers, stage: Stage) -> None:
    """Write the ImageSamples artifact with new answers; the samples of other splits pass unchanged.

    Drop reasons: those of filters.py and conversations.py, and those for which tokenize_chat drops a prompt. Raises
    DataError for images that the target cannot see, for more drops than max_dropped, and where no answer is left.
    """
    samples: ImageSamples = stage.inputs["samples"]
    prompts = Prompts.load(config, stage.inputs["target"], samples.path)
    total = check_rows(samples.path, config, prompts)
    target = Target.load(stage.inputs["target"], stage.device, getattr(torch, config.dtype))
    answerer = Answerer(config, target, prompts, stage.stop_requested)
    done, files = 0, []
    for shard in shards(samples.path, config):
        files.append(stage.work_dir / shard.file)
        if not files[-1].exists():
            journal = Journal(files[-1].with_suffix(".answers"))
            outcomes = answerer.answer(
                shard.rows, journal, lambda finished, before=done: stage.progress(before + finished, total)
            )
            partial = files[-1].with_suffix(".partial")
            write_jsonl(partial, outcomes)
            finish_file(partial, files[-1])
            journal.path.unlink(missing_ok=True)
        done += len(shard.rows)
        stage.progress(done, total)
    for pack in sorted(samples.path.glob("images-*.bin")):
        link_or_copy(pack, stage.out_dir / pack.name)
    write_samples(config, stage, samples.path, files)


@frozen
class Shard:
    """Consecutive samples to answer. The name tells which, so that another shard_samples takes no wrong file."""

    start: int
    rows: list[dict[str, Any]]

    @property
    def file(self) -> str:
        return f"{self.start:08d}-{self.start + len(self.rows):08d}.jsonl"


def shards(folder: Path, config: RegenerateAnswers) -> Iterator[Shard]:
    """The samples of the chosen splits, in the order of the file, `shard_samples` at a time."""
    start, rows = 0, []
    for row in read_jsonl(folder / "samples.jsonl"):
        if row["split"] in config.splits:
            rows.append(row)
        if len(rows) == config.shard_samples:
            yield Shard(start, rows)
            start, rows = start + len(rows), []
    if rows:
        yield Shard(start, rows)


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


def write_samples(config: RegenerateAnswers, stage: Stage, folder: Path, files: Sequence[Path]) -> None:
    """Write samples.jsonl, summary.json and dropped.csv from the finished shards, and log the counts."""
    outcomes = (outcome for file in files for outcome in read_jsonl(file))
    answers = tokens = retokenised = left = 0
    tally = Tally(stage, "regenerate")
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for row in read_jsonl(folder / "samples.jsonl"):
            if row["split"] in config.splits:
                outcome = next(outcomes)
                answers += len(outcome["answers"])
                tokens += sum(answer["tokens"] for answer in outcome["answers"])
                if (fault := refusal(config, outcome)) is not None:
                    tally.drop(fault[0], row["id"], fault[1])
                    continue
                row = answered(row, outcome)
                retokenised += sum(answer["retokenised_differently"] for answer in outcome["answers"])
                left += 1
            file.write(json_line(row))
            tally.keep(row["split"])
    if not left:
        raise DataError(
            f"no answer of the target is left:\n{tally.reasons()}\nIs the target trained, and max_new_tokens enough?"
        )
    tally.finish(config.max_dropped)
    counts = {"answers": answers, "tokens": tokens, "retokenised_differently": retokenised}
    stage.log({f"regenerate/{name}": count for name, count in counts.items()}, step=0)
