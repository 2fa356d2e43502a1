"""What an evaluation needs of its draft, target and tokens, as promised and as they are. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ops.evaluate.lengths import Decoding, no_prompt_mistake, stored_lengths_mistake
from ops.evaluate.op import Evaluate
from ops.lib.drafts.backbone.config import draft_misfit
from ops.lib.drafts.decoding.decode_options import ChainUse, block_size_mistake
from ops.lib.drafts.decoding.eagle3_files import eagle3_mistake
from ops.lib.forecasts import DraftForecast, TargetStated, TokensForecast, by_field, of_another_target, tokens_misfit

WITHOUT = (
    "leave out this node and those that read its report (check_export), and have a server report accepted lengths "
    "(`dflow serve`)"
)


def conflicts(config: Evaluate, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: a draft or tokens of another target, larger blocks than the draft's, missing prompts, and a
    target that transformers cannot run or verify.
    """
    draft, target, tokens = forecast["draft"], forecast["target"], forecast["tokens"]
    return by_field(
        (
            *_of_draft(config, draft, target),
            *_of_target(config, target),
            *_of_eagle3(config, target),
            *_of_tokens(config, tokens, target),
            *_lengths(config, tokens, target, draft),
        )
    )


def _of_draft(config: Evaluate, draft: DraftForecast | None, target: TargetStated | None) -> Iterator[tuple[str, str]]:
    if draft is None:
        return
    if target is not None and (misfit := draft_misfit(draft.shape, target.info)):
        yield "draft", misfit
    elif wrong := of_another_target(draft, target):
        yield "draft", f"{wrong}; give train_dflash, export_draft and evaluate the same target"
    for name, sizes in (("block_size", (config.block_size,)), ("block_sizes", config.block_sizes)):
        mistakes = (block_size_mistake(draft.shape, size, name) for size in sizes if size is not None)
        if mistake := next(filter(None, mistakes), ""):
            yield name, mistake


def _of_target(config: Evaluate, target: TargetStated | None) -> Iterator[tuple[str, str]]:
    if target is None:
        return
    if mistake := target.running_mistake(WITHOUT) or target.verifying_mistake:
        yield "target", mistake
    if config.mtp and (mistake := target.mtp_mistake()):
        yield "mtp", mistake


def _of_eagle3(config: Evaluate, target: TargetStated | None) -> Iterator[tuple[str, str]]:
    if config.eagle3 is None or not Path(config.eagle3).exists():
        return
    if mistake := eagle3_mistake(Path(config.eagle3), None if target is None else target.info):
        yield "eagle3", mistake


def _of_tokens(
    config: Evaluate, tokens: TokensForecast | None, target: TargetStated | None
) -> Iterator[tuple[str, str]]:
    if misfit := tokens_misfit(tokens, target):
        yield "tokens", misfit
    if tokens is not None and config.benchmark is None and config.split in tokens.empty:
        yield (
            "split",
            f'the split "{config.split}" has no samples to evaluate; set "split" of samples in the JSONL file, or '
            "raise test_fraction or val_fraction of ingest",
        )


def _lengths(
    config: Evaluate, tokens: TokensForecast | None, target: TargetStated | None, draft: DraftForecast | None
) -> Iterator[tuple[str, str]]:
    """Conflicts if prompts and answers exceed the positions; the lengths of a benchmark are known to the stage only."""
    if target is None:
        return
    proposes: Decoding = None if draft is None else draft.shape
    if config.rival is not None:
        proposes = ChainUse() if config.block_size is None else ChainUse(config.block_size)
    if config.benchmark is not None:
        mistake = no_prompt_mistake(target.text, proposes, config.max_new_tokens)
    else:
        mistake = stored_lengths_mistake(
            tokens, config.split, config.prompts, config.max_prompts, target.text, proposes, config.max_new_tokens
        )
    if mistake:
        yield "max_new_tokens", mistake
