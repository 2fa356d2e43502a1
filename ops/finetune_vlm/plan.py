"""What a fine-tuning needs, and mistakes of the checkpoint to start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from dsl.estimate import CHECKPOINTS, Amount, Estimate, Growth, PlanContext
from dsl.op import is_builtin
from dsl.shown import shown_bytes
from ops.finetune_vlm.op import FinetuneVlm, check_parts, parts_in
from ops.lib.drafts.backbone.sizes import MASTER
from ops.lib.forecasts import TargetForecast, TokensCounted, TokensForecast, first_counted, read_target_config
from ops.lib.sequence_parallel.degree import check_target_degree
from ops.lib.target.checkpoint_check import loading_mistakes
from ops.lib.target.quantised import training_mistake
from ops.lib.target.sizes import ITEM_SIZES, TargetSizes
from ops.lib.target.tiny_config import check_builtin, tiny_config
from ops.lib.target.token_ids import Vocabulary, mask_mistakes
from ops.lib.thread_table import threads_of_finetuning
from ops.load_target.plan import find_config

MERGE_SIZE = 2  # of the built-in processor
STEPS = 8  # of a trial

threads = threads_of_finetuning


def smoke(config: FinetuneVlm, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: a few steps of full size with a checkpoint between them, measured only at the end."""
    return {
        "steps": min(config.steps, STEPS),
        "checkpoint_every": min(config.checkpoint_every, STEPS // 2),
        "eval_every": None,
    }


def estimate(config: FinetuneVlm, context: PlanContext) -> Estimate:
    """Estimate memory and disk. Masters and moments are sharded over ranks; gradients are whole until a step's end.

    Raises DataError without a config.json that has the sizes, and ConfigError for parts that it lacks, and for ranks
    that cannot share its sequences.
    """
    growth, is_tried = _growth(config, context), context.trial is not None
    if context.artifact is not None:
        made = TargetForecast.made(context.artifact, context.identity, is_tried=is_tried)
        return Estimate(growth=growth, forecast=made)
    tokens = context.inputs["tokens"]
    target = TargetForecast.of(
        _start(config, tokens, context),
        is_tried=is_tried,
        identity=context.identity,
        **_ids(config, tokens),
    )
    check_parts(config, parts_in(target.config), str(target.config.get("model_type")))
    check_target_degree(target.config, world_size=context.launch.world_size, sp_degree=context.launch.sp_degree)
    sizes, ranks, item_size = target.sizes, context.launch.world_size, ITEM_SIZES[config.dtype]
    trained = _trained(config, sizes)
    memory = {
        "weights": sizes.parameters * MASTER // ranks,
        "weights cast": sizes.parameters * item_size if item_size < MASTER else 0,
        "gradients": trained * MASTER,
        "optimizer": trained * 2 * MASTER // ranks,
    }
    states = sizes.parameters + 2 * trained
    disk = {
        "target": sizes.parameters * item_size,
        CHECKPOINTS: min(config.keep_checkpoints + 1, -(-config.steps // config.checkpoint_every)) * states * MASTER,
    }
    kept = shown_bytes(states * MASTER)
    notes = (f"rank 0 keeps {kept} of weights and moments in host memory while a checkpoint is written",)
    less = "lower keep_checkpoints" if config.keep_checkpoints > 1 else ""
    return Estimate(memory=memory, disk=disk, less_disk=less, notes=notes, growth=growth, forecast=target)


def _ids(config: FinetuneVlm, tokens: TokensForecast | None) -> dict[str, Any]:
    """The token ids for target.json, from the tokens, or from the checkpoint's files."""
    known: TokensForecast | Vocabulary | None = tokens
    if not is_builtin(config.init):
        is_there = Path(config.init).is_dir() and not loading_mistakes(config.init, config.trust_remote_code)
        known = Vocabulary.of(Path(config.init)) if is_there else None
    return {} if known is None else {"eos_token_ids": known.eos_token_ids, "pad_token_id": known.pad_token_id}


def _growth(config: FinetuneVlm, context: PlanContext) -> Growth | None:
    """The growth from trial to full run: steps, and compared answers of val and test; val repeats after eval_every
    steps.
    """
    if context.trial is None:
        return None
    counted = first_counted(context.inputs["tokens"])
    series = [Amount(context.trial.config.steps, config.steps)]
    if config.metric != "none" and counted is not None:
        measured = 1 if config.eval_every is None else 1 + (config.steps - 1) // config.eval_every
        series += [_answers(config, counted, "val", measured), _answers(config, counted, "test", 1)]
    return Growth(series=tuple(amount for amount in series if amount.trial))


def _answers(config: FinetuneVlm, counted: TokensCounted, split: str, times: int) -> Amount:
    trial, full = counted.samples.of((split,))
    if config.eval_samples is not None:
        trial, full = min(trial, config.eval_samples), min(full, config.eval_samples)
    return Amount(trial, full * times)


def _start(config: FinetuneVlm, tokens: TokensForecast | None, context: PlanContext) -> Mapping[str, Any]:
    """The config.json that the training starts from."""
    if not is_builtin(config.init):
        return find_config(config.init, config.revision, context.root)
    vocab_size = tokens.vocab_size if tokens is not None else None
    info = {"vocab_size": vocab_size or 0, "merge_size": MERGE_SIZE, "pad_token_id": 0, "eos_token_ids": [0]}
    return tiny_config(info, {})


def _trained(config: FinetuneVlm, sizes: TargetSizes) -> int:
    """The number of parameters that get a gradient; the mergers count with the vision tower."""
    parts = {"vision": sizes.vision, "text": sizes.layers, "embeddings": sizes.embedding + sizes.head}
    return sum(count for part, count in parts.items() if part not in config.freeze)


def missing_here(config: FinetuneVlm) -> dict[str, str]:
    """Mistakes by which the checkpoint directory cannot be trained, by field. A model id is not looked up."""
    if is_builtin(config.init):
        try:
            check_builtin(config.init)
        except DataError as error:
            return {"init": str(error)}
        return {}
    mistakes = loading_mistakes(config.init, config.trust_remote_code)
    if (
        not mistakes
        and Path(config.init).is_dir()
        and (mistake := training_mistake(read_target_config(Path(config.init))))
    ):
        mistakes = [f"{config.init}: {mistake}"]
    if mistakes:
        return {"init": "\n".join(mistakes)}
    directory = Path(config.init)
    wrong = mask_mistakes(directory, config.mask_token_id) if directory.is_dir() else []
    return {"mask_token_id": "\n".join(wrong)} if wrong else {}
