"""What an evaluation needs, and what it lacks on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from attrs import evolve

from dsl.errors import DataError
from dsl.estimate import Amount, Estimate, Growth, PlanContext
from ops.evaluate.benchmark_rows import Benchmark, checked_rows
from ops.evaluate.op import Evaluate
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.sizes import draft_parameters
from ops.lib.forecasts import (
    DraftForecast,
    Kind,
    ReportForecast,
    TargetForecast,
    TokensForecast,
    first_counted,
    identity_of,
)
from ops.lib.target.checkpoint_check import stored_tensors
from ops.lib.target.quantised import dequantising_note
from ops.lib.target.sizes import ITEM_SIZES, PassSizes
from ops.lib.thread_table import threads_of_decoding
from ops.tokenize_chat.records import last_of_each

PROMPTS = 4  # of a trial
CATEGORIES = ("image", "text")  # of samples
UNTRAINED = "a fully trained draft needs fewer steps for an answer, and the target may end it sooner"

threads = threads_of_decoding


def smoke(config: Evaluate, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: a few prompts of each category."""
    return {"max_prompts": min(config.max_prompts or PROMPTS, PROMPTS)}


def estimate(config: Evaluate, context: PlanContext) -> Estimate:
    forecast = ReportForecast(
        max_prompts=config.max_prompts,
        max_new_tokens=config.max_new_tokens,
        dtype=config.dtype,
        inputs={edge: identity_of(given) for edge, given in context.inputs.items()},
        settings={
            "benchmark": config.benchmark,
            "temperature": config.temperature,
            "block_size": config.block_size,
            "mtp": config.mtp,
            "eagle3": config.eagle3,
        },
    )
    if context.artifact is not None:
        made = ReportForecast.of(read_json(context.artifact / "report.json"))
        forecast = evolve(forecast, inputs=made.inputs, settings=made.settings)
    target: TargetForecast | None = context.inputs["target"]
    draft: DraftForecast | None = context.inputs["draft"]
    if target is None or (draft is None and config.rival is None):
        return Estimate(growth=_growth(config, context), forecast=forecast)
    shape, item_size = None if draft is None else draft.shape, ITEM_SIZES[config.dtype]
    drafts = {"MTP head": target.sizes.mtp * item_size}
    if config.eagle3 is not None:
        drafts = {"EAGLE-3 draft": _parameters(Path(config.eagle3)) * item_size}
    if shape is not None:
        drafts = {"drafts": (1 + config.random_draft) * draft_parameters(shape) * item_size}
    return Estimate(
        memory={"target": target.sizes.parameters * item_size, **drafts},
        per_pass=_per_pass(config, target, shape, context.inputs["tokens"]),
        growth=_growth(config, context),
        forecast=forecast,
        notes=tuple(filter(None, [dequantising_note(target.config, config.dtype)])),
    )


def _per_pass(
    config: Evaluate, target: TargetForecast, draft: DraftConfig | None, tokens: TokensForecast | None
) -> dict[str, int]:
    """The bytes of a batch of the longest prompts and their answers; none for a benchmark of unknown lengths.

    draft: None for a rival.
    """
    if tokens is None or config.benchmark is not None:
        return {}
    longest = tokens.longest + config.max_new_tokens
    rows = max(config.batch_size, *config.batch_sizes, 1)
    rows = min(rows, len(CATEGORIES) * (config.max_prompts or rows))
    sizes = PassSizes(target.sizes.text, ITEM_SIZES[config.dtype])
    context, captured = 8 * int(target.sizes.text["hidden_size"]), 2 if config.mtp else 4
    if draft is not None:
        context = draft.num_hidden_layers * 2 * draft.num_key_value_heads * draft.head_dim + 4 * draft.hidden_size
        captured = len(draft.target_layer_ids)
    parts = sizes.of_batch(rows, longest, captured)
    parts["cache of chunks"] = 0
    cache = {"cache": sizes.cache(rows * longest)}
    return parts | cache | {"the draft's context": rows * longest * context * sizes.item_size}


def _parameters(folder: Path) -> int:
    """The parameters in a folder's files; 0 where they cannot be read, which is reported elsewhere."""
    with suppress(OSError, DataError):
        return sum(prod(tensor.shape) for tensor in stored_tensors(folder).values())
    return 0


def _growth(config: Evaluate, context: PlanContext) -> Growth | None:
    """The growth from trial to full run, by the number of prompts; None if that is unknown."""
    if context.trial is None:
        return None
    counted, tried = first_counted(context.inputs["tokens"]), context.trial.config
    if config.benchmark is not None:
        sizes = Counter(row.category for row in checked_rows(Benchmark.of(config)))
        small, full = (_prompts(sizes, limit) for limit in (tried.max_prompts, config.max_prompts))
    elif counted is not None:
        asked = asked_prompts(config, context.trial.inputs["tokens"])
        trial, whole = (_of_split(each, config.split) for each in (counted.samples.trial, counted.samples.full))
        small = _prompts(asked, tried.max_prompts)
        grown = {kind: count * whole.get(kind, 0) / trial[kind] for kind, count in asked.items() if trial.get(kind)}
        full = _prompts(grown, config.max_prompts)
    else:
        return None
    return Growth(series=(Amount(small, full),), output=max(1.0, full / max(small, 1)), notes=(UNTRAINED,))


def asked_prompts(config: Evaluate, tokens: Path) -> dict[str, float]:
    """The prompts that a trial's tokens give, by category: conversations, or with prompts = "each" answers."""
    records = [record for record in read_jsonl(tokens / "samples.jsonl") if record["split"] == config.split]
    asked: Counter[str] = Counter()
    for record in records if config.prompts == "each" else [records[place] for place in last_of_each(records)]:
        asked[record["category"]] += len(record.get("answers", ())) or 1 if config.prompts == "each" else 1
    return dict(asked)


def _of_split(samples: Mapping[Kind, float], split: str) -> dict[str, float]:
    return {category: count for (category, of), count in samples.items() if of == split}


def _prompts(by_category: Mapping[str, float], limit: int | None) -> float:
    return sum(min(count, limit or count) for count in by_category.values())


def missing_here(config: Evaluate) -> dict[str, str]:
    """Mistakes in the benchmark file, by field, found early; a missing file is reported elsewhere."""
    if config.benchmark is None or not Path(config.benchmark).exists():
        return {}
    try:
        checked_rows(Benchmark.of(config))
    except DataError as error:
        return {"benchmark": str(error)}
    return {}
