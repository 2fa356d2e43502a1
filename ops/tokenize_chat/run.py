"""Run `tokenize_chat`: chat messages into token shards, split by split.

Workers share pieces of the rows (pieces.py), and one of them writes the shards from the pieces.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, field
from torch import Tensor

from dsl.errors import DataError, StopRequested
from dsl.stage import Stage
from ops.artifacts import ImageSamples, TargetModel
from ops.ingest.sample import CONVERSATION
from ops.lib.data.files import json_line, read_json, read_jsonl, write_json
from ops.lib.data.ordered_threads import available_cores, in_order
from ops.lib.data.reasoning_keys import engines_without
from ops.lib.data.sample_account import SPLITS, Tally, Unusable
from ops.lib.data.shared_shards import SharedShards, published_rows, waited
from ops.lib.data.token_shards import TokenSample, write_token_shard
from ops.lib.data.tool_forms import GIVEN, ToolsUnlike
from ops.lib.forecasts import SamplesForecast, TargetStated, refuse_conflicts
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.fetch import find_processor
from ops.lib.target.token_ids import Vocabulary
from ops.lib.vision.chat_template import read_chat_template
from ops.lib.vision.images import strict_pillow
from ops.lib.vision.processor import Processor, load_processor
from ops.lib.vision.template_kinds import DAY, writes_today
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.conflicts import SERVED, conflicts, tools_warning
from ops.tokenize_chat.encode import TOO_FEW_LOSS_TOKENS, TOO_LONG, ChatEncoder, tokenize_rows
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.pieces import SUFFIX, Outcome, Row, Tokenized, all_pieces, portions, split_rows
from ops.tokenize_chat.preview import Preview
from ops.tokenize_chat.template import (
    ANSWER_NOT_FOUND,
    DOCUMENTS_NOT_SHOWN,
    IMAGES_NOT_SHOWN,
    MISFITS,
    NO_ANSWER,
    NOT_CLOSED,
    OTHER_ORDER,
    OTHER_THOUGHT,
    RESULTS_NOT_SHOWN,
    SPECIAL_IN_TEXT,
    TOOLS_NOT_SHOWN,
    texts_of,
    thinks,
)

REMEDIES = {
    TOO_LONG: "raise max_length, or lower max_pixels",
    NO_ANSWER: 'let regenerate_answers answer them before, with answers = "target" and their split in `splits`; '
    "prompts_only = true is for prompts of evaluate, without a training",
    OTHER_THOUGHT: 'let regenerate_answers answer them (answers = "target"); or set enable_thinking as most answers of '
    "the data are: dropped.csv says of each what it needs",
    TOOLS_NOT_SHOWN: "use a template with tools (chat_template, that of load_target with a target), or remove them",
    RESULTS_NOT_SHOWN: "use a template with results of tools (chat_template), or remove these conversations",
    DOCUMENTS_NOT_SHOWN: "use a template with documents (chat_template), or write them into the user's turn",
    IMAGES_NOT_SHOWN: "use a template that shows them (chat_template), or remove these images",
    OTHER_ORDER: "list results in the order of their calls",
    SPECIAL_IN_TEXT: "remove the tokenizer's special tokens from the texts",
}
REMEDIES_OF_WHOLE = {ANSWER_NOT_FOUND: SERVED, NOT_CLOSED: SERVED}
AS_GENERATED = 'contexts = "served", with the tokenizer of the target that answered, learns them as they were generated'
OF_CONTEXTS = ("empty_thoughts", "without_reasoning", "left_out", "shortened")  # of Figures
OTHER_MASKS = 16  # ids that are looked for in the samples
REPEATED = 3  # times that tokens of a conversation are in its samples without a warning
FIRST_SAMPLES = 100  # misfits before any sample is kept; more than odd samples in a row


def tokenize_chat(config: TokenizeChat, stage: Stage) -> None:
    """Write the token shards, tokens.json, samples.jsonl, preview.html, the processor's files and summary.json.

    Rows are read three times, once for each split, and never kept: only one shard and the threads' rows are in memory,
    or one piece.
    Drop reasons: "no answer", "special token in the text", "refused by the chat template", "answer begins inside a
    token", "reasoning does not fit the generation prompt", "tools not shown by the chat template", "tool results
    not shown by the chat template", "documents not shown by the chat template",
    "images of tool results not shown by the chat template",
    "images of tool results in another order than their calls", "image undecodable", "image refused by the processor",
    "longer than max_length" (never cut inside an answer), "fewer than min_loss_tokens", and the MISFITS of template.py.
    Raises DataError for a processor that does not fit the samples, for a template that fits none of them, for more
    drops than max_dropped, and for a train split that is empty after filtering, unless only prompts are kept;
    ConfigError for an enable_thinking that the template does not read.
    """
    samples: ImageSamples = stage.inputs["samples"]
    target: TargetModel | None = stage.inputs.get("target")
    statements = {
        "samples": SamplesForecast.read(samples.path, samples.digest),
        "target": None if target is None else TargetStated(config={}, identity=target.digest),
    }
    refuse_conflicts(conflicts(config, statements))
    file, threads = samples.path / "samples.jsonl", config.workers or max(1, available_cores() // stage.workers)
    shares = stage.workers > 1
    folder = stage.shared_dir / f"processor-{stage.worker}" if shares else stage.out_dir / "processor"
    processor = prepare_processor(config, target, file, folder)
    mask = processor.mask_token_id if target is None else read_json(target.path / "target.json")["mask_token_id"]
    encoder = ChatEncoder(processor, config.enable_thinking, config.train_on, config.render_seconds, config.tools_as)
    total = check_images(file, processor)
    if encoder.template.has_marks and config.contexts == "served":
        stage.info("the {% generation %} marks of the chat template are not used: they are not what a server renders")
    encoder.template.wait_until_started()  # before the first progress, from which a trial is scaled

    def tokenized(rows: Iterator[Row]) -> Iterator[tuple[Row, Outcome]]:
        """Each row with its outcome, in order, computed by `threads` threads."""

        def tokenize(portion: list[Row]) -> list[tuple[Row, Outcome]]:
            return list(zip(portion, tokenize_rows(portion, samples.path, encoder, config), strict=True))

        return chain.from_iterable(in_order(tokenize, portions(rows), threads))

    with strict_pillow():
        if not shares:
            outcomes = chain.from_iterable(tokenized(split_rows(file, split)) for split in SPLITS)
            write_tokens(config, stage, encoder, mask, with_progress(outcomes, total, stage))
            return
        shared = SharedShards(stage)
        work = shared.claimed(lambda: all_pieces(file, stage.work_dir), lambda piece: piece.path)
        stage.progress(published_rows(stage.work_dir, SUFFIX), total)
        for piece in waited(work, stage.stop_requested):
            if stage.stop_requested():
                raise StopRequested(f"tokenising stopped before {piece.path.name}; finished pieces are kept")
            made = [outcome for _, outcome in tokenized(iter(piece.rows))]
            piece.write(made, processor.patch_dim, stage.worker)
            stage.progress(published_rows(stage.work_dir, SUFFIX), total)

        def write() -> None:
            shutil.copytree(folder, stage.out_dir / "processor")
            pieces = all_pieces(file, stage.work_dir)
            write_tokens(config, stage, encoder, mask, chain.from_iterable(piece.read() for piece in pieces))

        shared.write_artifact(write)


def with_progress(outcomes: Iterable[tuple[Row, Outcome]], total: int, stage: Stage) -> Iterator[tuple[Row, Outcome]]:
    """The outcomes unchanged, with progress reported as they pass."""
    stage.progress(0, total)
    for done, outcome in enumerate(outcomes, 1):
        yield outcome
        if done % 50 == 0 or done == total:
            stage.progress(done, total)


def write_tokens(
    config: TokenizeChat, stage: Stage, encoder: ChatEncoder, mask: int | None, outcomes: Iterable[tuple[Row, Outcome]]
) -> None:
    """Write the artifact except the processor's files. mask: the id of the mask token. outcomes: of all rows, one split
    after another.
    """
    processor = encoder.processor
    too_few = f"lower min_loss_tokens from {config.min_loss_tokens}"
    of_contexts = {} if config.contexts == "served" else REMEDIES_OF_WHOLE
    tally = Tally(stage, "tokenize", {**REMEDIES, **of_contexts, TOO_FEW_LOSS_TOKENS: too_few})
    writer = ShardWriter(stage.out_dir, config.shard_samples, processor.patch_dim)
    trial = TemplateTrial(processor.source)
    preview = Preview(config.preview_samples, processor)
    masked, first, with_tools, contexts, reasons = 0, None, 0, ContextCounts(), False
    free = other_masks(processor, mask)
    unlike = ToolsUnlike(config.tools_as)
    outcomes = long_enough(outcomes, 0 if config.prompts_only else config.min_loss_tokens)
    for split, of_split in groupby(outcomes, key=lambda pair: pair[0]["split"]):
        for row, outcome in of_split:
            account(row, outcome, tally, trial, writer, preview)
            with_tools += "tools" in row
            if isinstance(outcome, Unusable):
                continue
            contexts.add(outcome)
            unlike.add(row.get("tools", ()))
            reasons |= any(thinks(each) for each in row["messages"][:-1] if each["role"] == "assistant")
            found = [
                sample for sample in outcome.samples if mask is not None and bool((sample.input_ids == mask).any())
            ]
            masked, first = masked + len(found), first or next((sample.id for sample in found), None)
            for sample in outcome.samples:
                free = free[~torch.isin(free, sample.input_ids)]
        writer.flush(split)
    trial.finish()
    contexts.report_generated(stage, tally)
    tally.finish(config.max_dropped)
    if with_tools and (warning := tools_warning(config)):
        stage.warn(f"{with_tools} samples have tools, and {warning}")
    if masked:
        such = f", such as {int(free[0])}, which no sample has" if len(free) else ""
        stage.warn(
            f'{masked} sample{"s hold" if masked > 1 else " holds"} the mask token, {mask} (first: sample "{first}"): '
            "a draft takes it for a token to predict; set mask_token_id of train_dflash to one that no text and no "
            f"chat template gives{such}"
        )
    if not (tally.splits["train"] or config.prompts_only):
        raise DataError(f"no sample is left in the train split:\n{tally.reasons() or '  the input is empty'}")
    day = written_day(processor, stage.inputs.get("target"))
    key = shown_key(config, encoder) if reasons else None
    write_json(stage.out_dir / "tokens.json", tokens_info(config, processor, writer.shards, unlike, day, key))
    preview.write(stage.out_dir / "preview.html")
    stage.log({"tokenize/tokens": writer.tokens, "tokenize/loss_tokens": writer.loss_tokens}, step=0)
    if config.contexts == "served":
        contexts.report(stage)


def long_enough(outcomes: Iterable[tuple[Row, Outcome]], least: int) -> Iterator[tuple[Row, Outcome]]:
    """The outcomes, with those of conversations in several rows dropped that have fewer answer tokens in all of them.

    Rows of a conversation follow each other; they are in memory until there are `least` tokens.
    """
    for conversation, rows in groupby(outcomes, key=lambda pair: pair[0].get(CONVERSATION)):
        waiting: list[tuple[Row, Outcome]] = []
        tokens = 0 if conversation is not None else least
        for row, outcome in rows:
            waiting.append((row, outcome))
            if isinstance(outcome, Tokenized):
                tokens += sum(int(sample.loss_mask.sum()) for sample in outcome.samples)
            if tokens >= least:
                yield from waiting
                waiting.clear()
        for row, outcome in waiting:
            too_few = Unusable(TOO_FEW_LOSS_TOKENS, f"{tokens} of {least} in the conversation {conversation}")
            yield row, outcome if isinstance(outcome, Unusable) else too_few


def other_masks(processor: Processor, mask: int | None) -> Tensor:
    """A few ids besides the mask token that may be one, int64 [C]; empty without a directory of the tokenizer."""
    vocabulary = None if mask is None else Vocabulary.of(Path(processor.source))
    ids = (number for number, _ in vocabulary.possible_mask_ids() if number != mask) if vocabulary else ()
    return torch.tensor(list(islice(ids, OTHER_MASKS)), dtype=torch.int64)


def account(
    row: Row,
    outcome: Outcome,
    tally: Tally,
    trial: TemplateTrial,
    writer: ShardWriter,
    preview: Preview,
) -> None:
    """Keep or drop a row, in the order of the rows. Raises DataError for a template that suits no sample."""
    if isinstance(outcome, Unusable):
        tally.drop(outcome.reason, row["id"], outcome.detail)
        trial.dropped(outcome.reason, row["id"], outcome.detail)
        return
    trial.kept(bool(row.get("tools")))
    tally.keep(row["split"], samples=len(outcome.samples))
    for sample, turn in zip(outcome.samples, outcome.turns, strict=True):
        topic = {"topic": row["topic"]} if "topic" in row else {}
        writer.add(sample, row["split"], {"label": label(row, turn)} | topic)
        if row["split"] == "train":
            preview.add(sample)


@define
class ContextCounts:
    """Counts over all conversations kept. tokens: of all samples; distinct: of the longest of each conversation."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    distinct: int = 0
    figures: Counter[str] = field(factory=Counter)

    def add(self, conversation: Tokenized) -> None:
        lengths = [len(sample.input_ids) for sample in conversation.samples]
        self.conversations += 1
        self.samples += len(lengths)
        self.tokens += sum(lengths)
        self.distinct += max(lengths)
        self.figures.update(asdict(conversation.figures))

    def report_generated(self, stage: Stage, tally: Tally) -> None:
        """Log how many answers are not learnt as their target generated them, and count them as lost."""
        generated, others = self.figures["generated"], self.figures["retokenised"]
        if generated:
            stage.log({"tokenize/generated": generated, "tokenize/retokenised": others}, step=0)
        tally.spoilt(others, generated, "are learnt in other tokens than the target generated", AS_GENERATED)

    def report(self, stage: Stage) -> None:
        """Log the counts, and warn of what costs or teaches something that nobody may want."""
        repeated = self.tokens / self.distinct
        figures = {name: self.figures[name] for name in OF_CONTEXTS}
        shares = {"samples_per_conversation": self.samples / self.conversations, "repeated_tokens": repeated}
        stage.log({f"tokenize/{name}": value for name, value in (shares | figures).items()}, step=0)
        stage.info(
            f"{self.samples} samples of {self.conversations} conversations, {repeated:.2f} times the tokens of the "
            "longest sample of each"
        )
        if repeated >= REPEATED:
            stage.warn(
                f"the samples have {repeated:.1f} times the tokens of the conversations: the chat template shows "
                'earlier answers otherwise than it prompted for them. contexts = "whole" gives one sample each, '
                "whose answers stand after a history that is never served"
            )
        if figures["empty_thoughts"]:
            stage.warn(
                f"{figures['empty_thoughts']} answers begin with an empty thought, which the draft learns: regenerate "
                "the answers, or set enable_thinking = false, with which answers of the data that have reasoning are "
                "dropped; for data with both, see docs/data.md#answers-with-and-without-reasoning"
            )
        if figures["without_reasoning"]:
            stage.info(f"{figures['without_reasoning']} answers lost their reasoning: the chat template shows none")
        if figures["shortened"] or figures["left_out"]:
            stage.info(
                f"longer than max_length: {figures['shortened']} samples end behind an earlier answer, and "
                f"{figures['left_out']} are left out"
            )


@define
class TemplateTrial:
    """Decides whether the chat template is usable: a faulty sample is dropped, a faulty template ends the run.

    The template is at fault if the first FIRST_SAMPLES samples (or all, if fewer) are misfits and none is kept. Samples
    dropped for other reasons do not count. The same of samples with tools, if it shows the tools of none. Samples come
    in the order of the rows, so that workers have no influence.
    """

    source: str
    _misfits: int = field(default=0, init=False)
    _served: bool = field(default=False, init=False)
    _first: str = field(default="", init=False)
    _without_tools: int = field(default=0, init=False)  # samples whose tools it does not show
    _served_tools: bool = field(default=False, init=False)

    def kept(self, has_tools: bool) -> None:
        self._served = True
        self._served_tools |= has_tools

    def dropped(self, reason: str, sample_id: str, detail: str) -> None:
        """Note a dropped sample. Raises DataError once the template is at fault."""
        self._without_tools += reason == TOOLS_NOT_SHOWN
        if self._without_tools == FIRST_SAMPLES:
            self.finish()
        if self._served or reason not in MISFITS:
            return
        self._first = self._first or f'sample "{sample_id}": {reason}: {detail}'
        self._misfits += 1
        if self._misfits == FIRST_SAMPLES:
            self.finish()

    def finish(self) -> None:
        """Judge the template after the last sample. Raises DataError if it is at fault."""
        if self._without_tools and not self._served_tools:
            raise DataError(
                f"the chat template of {self.source} shows no tools: none of {self._without_tools} samples with tools "
                f"can be used; {REMEDIES[TOOLS_NOT_SHOWN]}"
            )
        if self._misfits and not self._served:
            raise DataError(
                f"the chat template of {self.source} suits none of {self._misfits} samples, the first of which is "
                f"{self._first}; check that template, tokenizer and samples belong together"
            )


def prepare_processor(config: TokenizeChat, target: TargetModel | None, file: Path, folder: Path) -> Processor:
    """The processor of the target or the config, whose files are saved in `folder`.

    The built-in processor is trained on the train split.
    """
    source, trusted = config.processor, config.trust_remote_code
    if target is not None:
        source = str(target.path / "model")
        trusted = trusted or trusts_own_code(Path(source), read_json(target.path / "target.json"))
    elif source == "builtin":
        source = str(folder)
        conversations = (row["messages"] for row in read_jsonl(file) if row["split"] == "train")
        write_builtin_processor(folder, conversations, config.vocab_size)
    else:
        source = find_processor(source, config.revision, trusted)
    template = read_chat_template(config.chat_template)
    processor = load_processor(source, config.min_pixels, config.max_pixels, trusted, config.image_backend, template)
    processor.save(folder)
    return processor


def check_images(file: Path, processor: Processor) -> int:
    """Count the rows, and check that images have an image processor. Raises DataError."""
    total = 0
    for row in read_jsonl(file):
        total += 1
        if row["images"] and not processor.sees:
            reason = processor.blind or (
                f'there is no image processor (preprocessor_config.json) or no token "{processor.image_token}"; take '
                "that of a vision-language model"
            )
            raise DataError(f'processor {processor.source}: sample "{row["id"]}" has an image, but {reason}')
    return total


def label(row: Row, turn: int | None) -> str:
    """The right answer of a row: its own label, else the text of the answer at `turn`, or of its last answer.

    It is "" if a prompt has none.
    """
    if "label" in row:
        return str(row["label"])
    if turn is not None:
        return "".join(texts_of(row["messages"][turn]))
    answers = (message for message in reversed(row["messages"]) if message["role"] == "assistant")
    return "".join(next(map(texts_of, answers), ()))


def written_day(processor: Processor, target: TargetModel | None) -> str | None:
    """The day that the chat template writes in the place of today's, YYYY-MM-DD; None if it writes none."""
    if writes_today(processor.tokenizer.get_chat_template()):
        return str(DAY)
    return None if target is None else read_json(target.path / "target.json").get("template_date")


def shown_key(config: TokenizeChat, encoder: ChatEncoder) -> str | None:
    """The key under which prompts show the reasoning of earlier answers, where not all engines give it; else None."""
    key = encoder.reasoning_key if config.contexts == "served" and config.history_reasoning == "kept" else None
    return key if key is not None and engines_without(key) else None


def tokens_info(
    config: TokenizeChat,
    processor: Processor,
    shards: list[dict[str, Any]],
    unlike: ToolsUnlike,
    day: str | None,
    reasoning_key: str | None,
) -> dict[str, Any]:
    """The content of tokens.json. day: as `written_day` gives it. reasoning_key: as `shown_key` does."""
    return {
        "format": 1,
        "mask_token_id": processor.mask_token_id,
        "image_token_id": processor.image_token_id,
        "pad_token_id": processor.pad_token_id,
        "eos_token_ids": list(processor.eos_token_ids),
        "vocab_size": processor.vocab_size,
        "patch_dim": processor.patch_dim,
        "merge_size": processor.merge_size,
        "image_backend": processor.image_backend,
        **({"images_of": processor.images_of} if processor.images_of else {}),
        "pixel_limits": processor.pixel_limits,
        "enable_thinking": config.enable_thinking,
        **({} if day is None else {"template_date": day}),
        **({} if config.tools_as == GIVEN else {"tools_as": config.tools_as}),
        **({"tools_unlike": unlike.by_engine} if unlike.by_engine else {}),
        **({} if reasoning_key is None else {"reasoning_key": reasoning_key}),
        "shards": shards,
    }


SHARD_BYTES = 256 * 1024 * 1024  # of pixels kept in memory until a shard is written


class ShardWriter:
    """Collects samples, one split after another, and writes a shard whenever there are enough.

    shards: their entries in tokens.json. tokens, loss_tokens: of all samples.
    """

    def __init__(self, folder: Path, shard_samples: int, patch_dim: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.shards: list[dict[str, Any]] = []
        self.tokens = 0
        self.loss_tokens = 0
        self._folder = folder
        self._shard_samples = shard_samples
        self._shard_bytes = shard_bytes
        self._patch_dim = patch_dim
        self._samples: list[TokenSample] = []
        self._named: list[dict[str, str]] = []
        self._bytes = 0
        (folder / "samples.jsonl").touch()

    def add(self, sample: TokenSample, split: str, named: dict[str, str]) -> None:
        """Add a sample to its split's current shard; splits must come one after the other.

        named: further values of the sample's record.
        """
        self._samples.append(sample)
        self._named.append(named)
        self._bytes += sample.image_bytes
        if len(self._samples) == self._shard_samples or self._bytes >= self._shard_bytes:
            self.flush(split)

    def flush(self, split: str) -> None:
        """Write the collected samples as a shard of the split."""
        if not self._samples:
            return
        name = f"{split}-{sum(shard['split'] == split for shard in self.shards):05d}.safetensors"
        write_token_shard(self._folder / name, self._samples, self._patch_dim)
        with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json_line({**record, "split": split, "shard": name}) for record in self._records())
        tokens = sum(len(sample.input_ids) for sample in self._samples)
        self.shards.append({"file": name, "split": split, "samples": len(self._samples), "tokens": tokens})
        self.tokens += tokens
        self._samples, self._named, self._bytes = [], [], 0

    def _records(self) -> list[dict[str, Any]]:
        records = []
        for row, (sample, named) in enumerate(zip(self._samples, self._named, strict=True)):
            loss_tokens = int(sample.loss_mask.sum())
            self.loss_tokens += loss_tokens
            records.append(
                {
                    "id": sample.id,
                    "category": sample.category,
                    "row": row,
                    "tokens": len(sample.input_ids),
                    "prompt_tokens": sample.prompt_tokens,
                    "loss_tokens": loss_tokens,
                    **({"answers": sample.answers} if sample.answers else {}),
                    **named,
                }
            )
        return records
