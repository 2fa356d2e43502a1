"""What a training starts with: the target, the parts of it that are trained, and the optimizer over them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from dsl.errors import DataError
from dsl.op import is_builtin
from dsl.stage import Stage
from ops.finetune_vlm.op import FinetuneVlm, Part, check_parts
from ops.lib.data.token_shards import TokenReader
from ops.lib.sequence_parallel.degree import check_target_degree
from ops.lib.target.embedding_and_head import stored_dtype
from ops.lib.target.fetch import find_checkpoint
from ops.lib.target.model import Target, check_images_fit, check_tokens_fit, describe_target, read_config
from ops.lib.target.quantised import training_mistake
from ops.lib.target.tiny_config import check_builtin, tiny_config
from ops.lib.training.muon import Muon
from ops.lib.training.optimizer import MuonAdamW, Optimizer, adamw_options
from ops.lib.vision.families import AnyVision
from ops.lib.vision.processor import load_processor

BETAS = (0.9, 0.95)


def start_target(config: FinetuneVlm, reader: TokenReader, stage: Stage) -> tuple[Target, Path | None]:
    """The target with float32 weights, and the directory of its checkpoint.

    For several ranks it stays on the CPU in its stored dtype: all ranks of a machine share the files' pages until each
    has its part of the masters (see ParallelTarget). Raises DataError for an unknown name, an unsuitable checkpoint,
    and tokens that do not fit it. Raises ConfigError, before weights are read, for ranks that cannot share its
    sequences.
    """
    device = stage.device if stage.world_size == 1 else "cpu"
    if is_builtin(config.init):
        return _builtin(config, reader, device), None
    trust = config.trust_remote_code
    directory = find_checkpoint(config.init, config.revision, trust)
    content = read_config(directory)
    if mistake := training_mistake(content):
        raise DataError(f"{directory}: {mistake}")
    check_target_degree(content, world_size=stage.world_size, sp_degree=stage.sp_degree)
    processor = load_processor(str(directory), trust_remote_code=trust)
    info = describe_target(directory, mask_of(config, reader), processor.eos_token_ids, trust_remote_code=trust)
    check_tokens_fit(reader.info, info)
    stored = stored_dtype(directory) if stage.world_size > 1 else None
    target = Target.from_directory(directory, info, device, stored or torch.float32)
    check_images_fit(reader, target.family)
    if isinstance(target.family, AnyVision) and any(record["category"] == "image" for record in reader.records):
        raise DataError(
            f"finetune_vlm trains on images only with Qwen's families, and the target's model_type is "
            f"{info['model_type']}: take load_target, which reads its images, or remove the image samples"
        )
    return target, directory


def mask_of(config: FinetuneVlm, reader: TokenReader) -> int | None:
    """The id of the mask token: the given one, else that of the tokens, None where they have none."""
    return reader.info["mask_token_id"] if config.mask_token_id is None else config.mask_token_id


def _builtin(config: FinetuneVlm, reader: TokenReader, device: str) -> Target:
    """A Qwen3-VL with random weights, small enough to be trained on two CPU cores."""
    check_builtin(config.init)
    tokenizer = AutoTokenizer.from_pretrained(reader.tokens.path / "processor", trust_remote_code=False)
    special_ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    tiny = Qwen3VLConfig(**tiny_config(reader.info, special_ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed or 0)
        model = Qwen3VLForConditionalGeneration(tiny)
    return Target(model.to(device), {"eos_token_ids": reader.info["eos_token_ids"]}, torch.device(device))


def parts_of(target: Target) -> dict[str, Part]:
    """The part to which each parameter belongs, by the parameter's name. An untied head belongs to the embeddings."""
    ends = {id(target.embed_weight), id(target.head_weight)}
    return {
        name: "embeddings" if id(parameter) in ends else target.family.part_of(name)
        for name, parameter in target.model.named_parameters()
    }


def freeze(config: FinetuneVlm, target: Target, stage: Stage) -> None:
    """Freeze the parameters that the config names; call it before sharding. Raises ConfigError as `check_parts`."""
    parts = parts_of(target)
    check_parts(config, {*parts.values()}, target.family.config["model_type"])
    sizes: Counter[str] = Counter()
    for name, parameter in target.model.named_parameters():
        trained = parts[name] not in config.freeze
        parameter.requires_grad_(trained)
        sizes["trained" if trained else "frozen"] += parameter.numel()
    stage.info(f"{sizes['trained']:,} parameters are trained, {sizes['frozen']:,} are frozen")


def make_optimizer(config: FinetuneVlm, model: nn.Module, parts: dict[str, Part]) -> Optimizer:
    """An optimizer over the trained parameters, at rate 0. A group's "peak" is the highest rate of its part.

    Matrices have weight decay; norms and biases have none. Muon, if chosen, is used for hidden matrices. AdamW gets the
    `adamw_options` of the parameters' device.
    """
    peaks = {"vision": config.lr_vision, "projector": config.lr_projector}
    groups: dict[tuple[Part, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part, decayed = parts[name], parameter.ndim >= 2
        by_muon = config.optimizer == "muon" and parameter.ndim == 2 and part != "embeddings"
        group = groups.setdefault(
            (part, decayed, by_muon),
            {
                "params": [],
                "weight_decay": config.weight_decay if decayed else 0.0,
                "peak": peaks.get(part) or config.lr,
            },
        )
        group["params"].append(parameter)
    hidden = [group for (_, _, by_muon), group in groups.items() if by_muon]
    others = [group for (_, _, by_muon), group in groups.items() if not by_muon]
    options = adamw_options(next(model.parameters()).device)
    if hidden and others:
        return MuonAdamW(Muon(hidden), torch.optim.AdamW(others, lr=0.0, betas=BETAS, **options))
    return Muon(hidden) if hidden else torch.optim.AdamW(others, lr=0.0, betas=BETAS, **options)


def set_rates(optimizer: Optimizer, share: float) -> None:
    """Set the rate of every group to this share of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
