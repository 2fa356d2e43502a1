"""Train a target on the tokenised samples: AdamW on the answers' tokens, warm-up and cosine decay.

The order of the samples is a function of the seed and the epoch, so a resumed training needs only the step, the
weights and the optimizer's moments to go on exactly where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer

from dsl.errors import DataError, StopRequested
from dsl.op import is_builtin
from dsl.stage import Stage
from ops.finetune_vlm.accuracy import answer_loss, greedy_starts, mean_loss
from ops.finetune_vlm.checkpoint import load_progress, save_progress
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.tiny import tiny_qwen3_vl
from ops.ingest.digits import digit_named
from ops.load_target.model import Target, check_tokens_fit, describe_target
from ops.load_target.run import find_checkpoint
from ops.load_target.save import PROCESSOR, copy_files, write_target_json
from ops.optimizer import learning_rate, make_optimizer
from ops.tokenize_chat.shards import TokenReader, TokenSample
from ops.vision.processor import load_processor

# The digit is named in the first words of an answer.
ANSWER_START = 24


def finetune_vlm(config: FinetuneVlm, stage: Stage) -> None:
    """Write the TargetModel artifact. A loss that is not finite raises DataError with the step and the samples."""
    tokens = stage.inputs["tokens"]
    reader = TokenReader(tokens, "train")
    if not len(reader):
        raise DataError("the train split holds no samples: nothing to train the target on")
    processor = tokens.path / "processor"
    target = start_target(config, reader, processor, stage.device)
    train(config, stage, target, reader)
    target.model.eval()
    metrics = held_out_metrics(config, stage, target)
    stage.log(metrics, step=config.steps)
    target.model.save_pretrained(stage.out_dir / "model")
    copy_files(processor, stage.out_dir / "model", PROCESSOR)
    figures = {name.removeprefix("target/"): value for name, value in metrics.items()}
    info = describe_target(stage.out_dir / "model", reader.info["mask_token_id"], reader.info["eos_token_ids"])
    write_target_json(stage.out_dir, info, figures)


def start_target(config: FinetuneVlm, reader: TokenReader, processor: Path, device: str) -> Target:
    """The target before the first step: random weights, or those of a checkpoint."""
    if is_builtin(config.init):
        if config.init != "builtin:tiny-qwen3-vl":
            raise DataError(f'init = "{config.init}": the only built-in target is "builtin:tiny-qwen3-vl"')
        tokenizer = AutoTokenizer.from_pretrained(processor)
        special_ids = {
            "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
            "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        }
        model = tiny_qwen3_vl(reader.info, special_ids, config.seed or 0).to(device)
        return Target(model, {"eos_token_ids": reader.info["eos_token_ids"]}, torch.device(device))
    directory = find_checkpoint(config.init, None)
    info = describe_target(directory, reader.info["mask_token_id"], load_processor(str(directory)).eos_token_ids)
    check_tokens_fit(reader.info, info)
    target = Target.from_directory(directory, info, device)
    target.model.requires_grad_(True)
    return target


def train(config: FinetuneVlm, stage: Stage, target: Target, reader: TokenReader) -> None:
    """Run the steps that are not done yet."""
    model = target.model.train()
    optimizer = make_optimizer(model, config.weight_decay, betas=(0.9, 0.95))
    progress_file = stage.work_dir / "progress.safetensors"
    done = load_progress(progress_file, model, optimizer)
    for step in range(done + 1, config.steps + 1):
        samples = [reader.sample(index) for index in batch_indices(config, len(reader), step)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, config.steps, config.lr, config.warmup_ratio)
        loss, gradient_norm = training_step(target, samples, optimizer, config.grad_clip)
        if not math.isfinite(loss):
            raise DataError(
                f"step {step}: the loss is {loss}; samples {', '.join(sample.id for sample in samples)}. "
                f"Lower lr, or look at these samples; the progress up to the last checkpoint is kept"
            )
        if step % config.log_every == 0 or step == config.steps:
            stage.log({"target/loss": loss, "target/grad_norm": gradient_norm}, step=step)
        stage.progress(step, config.steps)
        stop = stage.stop_requested() and step < config.steps
        if stop or (step % config.checkpoint_every == 0 and step < config.steps):
            save_progress(progress_file, step, model, optimizer)
        if stop:
            raise StopRequested(f"fine-tuning stopped after step {step} of {config.steps}; its progress is saved")


def training_step(
    target: Target, samples: Sequence[TokenSample], optimizer: torch.optim.AdamW, grad_clip: float
) -> tuple[float, float]:
    """One optimizer step; loss per answer token, and gradient norm before clipping.

    The weights stay as they are where the gradient is not finite; the loss is nan then.
    """
    loss_sum, count = answer_loss(target, samples)
    loss = loss_sum / count
    loss.backward()
    norm = nn.utils.clip_grad_norm_(target.model.parameters(), grad_clip)
    finite = bool(torch.isfinite(loss) and torch.isfinite(norm))
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()) if finite else math.nan, float(norm)


def batch_indices(config: FinetuneVlm, samples: int, step: int) -> list[int]:
    """The samples of a step, 1-based: each epoch is one permutation, drawn from the seed and the epoch's number."""
    batch_size = min(config.batch_size, samples)
    per_epoch = samples // batch_size
    epoch, place = divmod(step - 1, per_epoch)
    generator = torch.Generator().manual_seed((config.seed or 0) * 1_000_003 + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    return order[place * batch_size : (place + 1) * batch_size]


def held_out_metrics(config: FinetuneVlm, stage: Stage, target: Target) -> dict[str, float]:
    """Loss on val, and the share of test images whose greedy answer names the right digit, where labels name one."""
    metrics = {}
    val = TokenReader(stage.inputs["tokens"], "val")
    if len(val):
        metrics["target/val_loss"] = mean_loss(target, [val.sample(index) for index in range(len(val))])
    test = TokenReader(stage.inputs["tokens"], "test")
    named = [(index, digit_named(record["label"])) for index, record in enumerate(test.records)]
    labelled = [(index, digit) for index, digit in named if digit is not None][: config.eval_samples]
    if labelled:
        samples = [test.sample(index) for index, _ in labelled]
        answers = greedy_starts(target, samples, ANSWER_START, lambda done: stage.progress(done, len(samples)))
        tokenizer = AutoTokenizer.from_pretrained(stage.inputs["tokens"].path / "processor")
        right = [
            digit_named(tokenizer.decode(answer)) == digit for answer, (_, digit) in zip(answers, labelled, strict=True)
        ]
        metrics["target/digit_accuracy"] = sum(right) / len(right)
    return metrics
