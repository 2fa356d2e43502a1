"""What tokenising needs, and what it lacks on this machine."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import evolve

from dsl.estimate import Estimate, Growth, PlanContext
from dsl.op import is_builtin
from ops.lib.data.files import artifact_file, read_json, read_jsonl
from ops.lib.forecasts import (
    SamplesForecast,
    TargetForecast,
    TokensCounted,
    TokensForecast,
    amount,
    counted_tokens,
    kept_samples,
)
from ops.lib.missing_libraries import missing_torchvision
from ops.lib.target.checkpoint_check import (
    chat_template_mistakes,
    pixel_mistakes,
    processor_folder_mistakes,
    stored_bytes,
    thinking_mistakes,
)
from ops.lib.target.token_ids import Vocabulary
from ops.tokenize_chat.builtin_template import CHAT_TEMPLATE
from ops.tokenize_chat.conflicts import tools_warning
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.records import conversation_of_record

BUILTIN_IDS: dict[str, Any] = {"eos_token_ids": (2,), "pad_token_id": 0}  # by SPECIAL_TOKENS of builtin.py
TOKEN_BYTES = 5  # input_ids int32 and loss_mask uint8
ENCODED_BYTES = 1536  # of a token while its sample is rendered and tokenised, as measured (benchmarks/long_sample.py)
MOST_OFFSETS = 64 << 20  # bytes of a shard's offsets


def mean_length(tokens: TokensForecast, splits: Collection[str]) -> tuple[float, bool]:
    """The mean number of tokens of a sample, and whether it is counted: else it is that of the longest."""
    shards = [] if tokens.folder is None else read_json(tokens.folder / "tokens.json")["shards"]
    counted = [shard for shard in shards if shard["split"] in splits]
    samples = sum(shard["samples"] for shard in counted)
    return (sum(shard["tokens"] for shard in counted) / samples, True) if samples else (float(tokens.longest), False)


def smoke(config: TokenizeChat, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: no expected tokens, since that number is for all samples."""
    return {"expected_tokens": None}


def estimate(config: TokenizeChat, context: PlanContext) -> Estimate:
    """Estimate the tokens: counted if they exist, else expected_tokens, else a million."""
    source: SamplesForecast | None = context.inputs["samples"]
    target: TargetForecast | None = context.inputs.get("target")
    forecast = _promised(config, source, target)
    if context.artifact is not None:
        shards = read_json(context.artifact / "tokens.json")["shards"]
        longest = max(
            (_longest(artifact_file(context.artifact, shard["file"])) for shard in shards), default=config.max_length
        )
        forecast = evolve(
            TokensForecast.read(context.artifact, context.identity, longest),
            expected=config.expected_tokens,
            prompts_only=config.prompts_only,
        )
    counted = growth = None
    if context.trial is not None and source is not None and source.samples is not None:
        samples = kept_samples(context.trial.artifact, source.samples)
        counted = TokensCounted(samples=samples, tokens=counted_tokens(context.trial.artifact, samples))
        growth = Growth(
            series=(source.samples.amount(),),
            output=counted.tokens.amount().growth,
            notes=_of_contexts(config, context.trial.artifact),
        )
    forecast = evolve(forecast, counted=counted, identity=context.identity)
    notes: tuple[str, ...] = ()
    if context.artifact is not None:
        notes = _of_contexts(config, context.artifact)
    elif source is not None and source.has_tools and (warning := tools_warning(config)):
        notes = (f"warning: samples have tools, and {warning}",)
    is_asked = source is not None and source.answered is not None  # regenerate_answers warns of its prompts
    if source is not None and source.has_tools and not is_asked and target is not None and target.tools_warning:
        notes = (f"warning: {target.tools_warning}", *notes)
    count, per = amount(config.expected_tokens)
    return Estimate(
        per_pass={"texts and their tokens": config.max_length * ENCODED_BYTES},
        disk={"tokens": count * TOKEN_BYTES},
        disk_per=per,
        notes=notes,
        growth=growth,
        forecast=forecast,
    )


def _promised(config: TokenizeChat, source: SamplesForecast | None, target: TargetForecast | None) -> TokensForecast:
    """A forecast of the tokens before they are made, from the files of the processor or of the target that has it."""
    promised = TokensForecast(
        by_split=None,
        expected=config.expected_tokens,
        longest=config.max_length,
        vocab_size=None,
        empty=source.empty if source is not None else frozenset(),
        is_found=source is not None and source.is_found,
        prompts_only=config.prompts_only,
    )
    if target is not None:
        return evolve(promised, eos_token_ids=target.eos_token_ids, pad_token_id=target.pad_token_id)
    if is_builtin(config.processor):
        return evolve(promised, vocab_size=config.vocab_size, is_bound=True, **BUILTIN_IDS)
    vocabulary = None if processor_folder_mistakes(config.processor) else Vocabulary.of(Path(config.processor))
    if vocabulary is None:
        return promised
    return evolve(
        promised,
        vocab_size=max(vocabulary.size, len(vocabulary.ordinary) + len(vocabulary.special)),
        eos_token_ids=vocabulary.eos_token_ids,
        pad_token_id=vocabulary.pad_token_id,
    )


def _of_contexts(config: TokenizeChat, artifact: Path) -> tuple[str, ...]:
    """A note on how many samples the conversations of an artifact make, and what that costs; none if each makes one."""
    if config.contexts != "served":
        return ()
    summary = read_json(artifact / "summary.json")
    conversations, samples = summary["kept"], sum(summary["splits"].values())
    if samples == conversations:
        return ()
    longest: dict[str, int] = {}
    tokens = 0
    for record in read_jsonl(artifact / "samples.jsonl"):
        conversation = conversation_of_record(record)
        longest[conversation] = max(longest.get(conversation, 0), record["tokens"])
        tokens += record["tokens"]
    return (
        f"{conversations:,} conversations make {samples:,} samples, {samples / conversations:.1f} each, since later "
        f"prompts do not extend earlier ones: {tokens / sum(longest.values()):.1f} times the tokens of the longest "
        "sample of each, and about as many times the features, steps and time",
    )


def _longest(shard: Path) -> int:
    """The tokens of a shard's longest sample; only the header and offsets of the file are read."""
    offsets = array("q", stored_bytes(shard, "token_offsets", MOST_OFFSETS))  # int64, as token_shards writes them
    return max((after - before for before, after in pairwise(offsets)), default=0)


def missing_here(config: TokenizeChat) -> dict[str, str]:
    """Things that are missing on this machine or in the processor's files, by field.

    They are: torchvision, if it resizes images; a valid chat template that reads enable_thinking, if set; files of the
    processor; and fitting pixel limits.
    """
    missing = {**missing_torchvision(config.image_backend), **chat_template_mistakes(config.chat_template)}
    if not is_builtin(config.processor) and (
        mistakes := processor_folder_mistakes(config.processor, config.trust_remote_code)
    ):
        missing["processor"] = "\n".join(mistakes)
    elif not is_builtin(config.processor):
        missing |= pixel_mistakes(config.processor, config.min_pixels, config.max_pixels)
    if not missing and config.target is None:
        builtin = CHAT_TEMPLATE if is_builtin(config.processor) else ""
        missing |= thinking_mistakes(config.enable_thinking, config.chat_template, config.processor, builtin)
    return missing
