"""The target before the first step: random weights, or those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from dsl.errors import DataError
from dsl.op import is_builtin
from dsl.stage import Stage
from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.data.token_shards import TokenReader
from ops.lib.sequence_parallel.degree import check_target_degree
from ops.lib.target.ends import stored_dtype
from ops.lib.target.fetch import find_checkpoint
from ops.lib.target.model import Target, check_images_fit, check_tokens_fit, describe_target, read_config
from ops.lib.target.tiny_config import tiny_config
from ops.lib.vision.processor import load_processor

BUILTIN = "builtin:tiny-qwen3-vl"


def start_target(config: FinetuneVlm, reader: TokenReader, stage: Stage) -> tuple[Target, Path | None]:
    """The target with float32 weights, and the directory that it comes from.

    For several ranks it is on the CPU, and as it is stored: all ranks of a machine share the files' pages until each
    has its part of the masters (see ParallelTarget).

    Raises DataError for an unknown name, a checkpoint that cannot be a target, and tokens that do not fit it; and
    ConfigError, before weights are read, for ranks that cannot share its sequences.
    """
    device = stage.device if stage.world_size == 1 else "cpu"
    if is_builtin(config.init):
        return _builtin(config, reader, device), None
    trust = config.trust_remote_code
    directory = find_checkpoint(config.init, config.revision, trust)
    check_target_degree(read_config(directory), world_size=stage.world_size, sp_degree=stage.sp_degree)
    processor = load_processor(str(directory), trust_remote_code=trust)
    info = describe_target(directory, reader.info["mask_token_id"], processor.eos_token_ids, trust_remote_code=trust)
    check_tokens_fit(reader.info, info)
    stored = stored_dtype(directory) if stage.world_size > 1 else None
    target = Target.from_directory(directory, info, device, stored or torch.float32)
    check_images_fit(reader, target.family)
    return target, directory


def _builtin(config: FinetuneVlm, reader: TokenReader, device: str) -> Target:
    """A Qwen3-VL of random weights, small enough to be trained on two CPU cores."""
    if config.init != BUILTIN:
        raise DataError(f'init = "{config.init}": the only built-in target is "{BUILTIN}"')
    tokenizer = AutoTokenizer.from_pretrained(reader.tokens.path / "processor")
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
