"""A tiny random checkpoint of each family whose images its own processor reads, saved as published ones are.

A family has one row in FAMILIES: its config, its processor's settings, and the special tokens that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from any_targets import PROSE, SIZES
from attrs import frozen
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.builtin_template import CHAT_TEMPLATE

VOCABULARY = 440
SIDE, PATCH = 16, 4  # pixels of what a vision tower reads
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
SQUARE = {"height": SIDE, "width": SIDE}
GRIDS = [[16, 16], [16, 32], [32, 16], [32, 32]]
IN_TEMPLATE = "<|vision_start|><|image_pad|><|vision_end|>"  # an image in the built-in template


@frozen
class SeeingRow:
    """config: fields beside text_config and vision_config. processor, images: settings of both. tokens: by name, as the
    tokenizer has them. placeholder: in the chat template. others: further special tokens.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    processor: Mapping[str, Any]
    images: Mapping[str, Any]
    tokens: Mapping[str, str]
    placeholder: str
    config: Mapping[str, Any] = {}
    others: tuple[str, ...] = ()


_IDEFICS3 = SeeingRow(
    text={"model_type": "llama"},
    vision=TOWER,
    config={"scale_factor": 2},
    processor={"image_seq_len": 4},
    images={"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": True},
    tokens={"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"},
    placeholder="<image>",
    others=("<global-img>", *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))),
)
FAMILIES: Mapping[str, SeeingRow] = {
    "gemma3": SeeingRow(
        text={"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
        vision={"model_type": "siglip_vision_model", **TOWER},
        config={"mm_tokens_per_image": 4},
        processor={"image_seq_length": 4},
        images={"size": SQUARE},
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        placeholder="<start_of_image>",
    ),
    "llava_onevision": SeeingRow(
        text={"model_type": "qwen2"},
        vision={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        config={"image_grid_pinpoints": GRIDS, "vision_feature_layer": -1, "vision_aspect_ratio": "anyres_max_9"},
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        images={"size": SQUARE, "image_grid_pinpoints": GRIDS},
        tokens={"image_token": "<image>", "video_token": "<video>"},
        placeholder="<image>",
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "lfm2_vl": SeeingRow(
        text={"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 3, "block_auto_adjust_ff_dim": False},
        vision={"model_type": "siglip2_vision_model", **TOWER, "num_patches": 16},
        config={"downsample_factor": 2, "projector_hidden_size": 64},
        processor={},
        images={
            "tile_size": SIDE,
            "encoder_patch_size": PATCH,
            "downsample_factor": 2,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "max_num_patches": 64,
            "min_tiles": 2,
            "max_tiles": 4,
            "do_image_splitting": True,
            "use_thumbnail": True,
        },
        tokens={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        placeholder="<image>",
        others=tuple(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)),
    ),
    "gemma4": SeeingRow(
        text={
            "model_type": "gemma4_text",
            "head_dim": 16,
            "global_head_dim": 16,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        vision={
            "model_type": "gemma4_vision",
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "position_embedding_size": 128,
        },
        processor={"image_seq_length": 70},
        images={"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        placeholder="<|image|>",
    ),
}


def seeing_checkpoint(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a tiny checkpoint, its tokenizer and its processor's settings."""
    row = FAMILIES[kind]
    tokenizer = _tokenizer(row, folder)
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(row.tokens["image_token"])}
    if kind in ("gemma3", "llava_onevision"):
        ids = {"image_token_index": ids["image_token_id"]}
    _model(kind, row, ids, seed).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(dict(row.processor)))
    name = IMAGE_PROCESSOR_MAPPING_NAMES[kind]["torchvision"]
    means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name, **means, **row.images}))
    return folder


def _tokenizer(row: SeeingRow, folder: Path) -> PreTrainedTokenizerFast:
    conversations = [[{"role": "user", "content": [{"type": "text", "text": line}]}] for line in PROSE]
    write_builtin_processor(folder, conversations, 360)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(row.tokens),
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens(
        {"additional_special_tokens": [*row.others, "<|im_start|>", "<|mask|>"]}, replace_extra_special_tokens=False
    )
    fast.chat_template = CHAT_TEMPLATE.replace(IN_TEMPLATE, row.placeholder)
    fast.save_pretrained(folder)
    return fast


def _model(kind: str, row: SeeingRow, ids: Mapping[str, int], seed: int) -> PreTrainedModel:
    """A tiny model with weights so large that every token depends on all before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            kind,
            text_config={**SIZES, "vocab_size": VOCABULARY, **row.text},
            vision_config=dict(row.vision),
            **row.config,
            **ids,
        )
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim >= 2:
                    ends = "embed" in name
                    weight.normal_(std=0.3 if ends else 2 * weight[0].numel() ** -0.5)
            for ends in (model.get_input_embeddings(), model.get_output_embeddings()):
                ends.weight[list(ids.values())] = 0  # no answer holds the placeholder of an image
    return model.eval()
