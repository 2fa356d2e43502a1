"""A tiny random checkpoint of every supported family, saved as a real one is: weights, config and processor.

A family has one row in FAMILIES; `make_checkpoint("qwen3_vl", folder)` writes the directory that load_target,
finetune_vlm and tokenize_chat take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from PIL import Image
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from ops.lib.data.token_shards import TokenSample
from ops.lib.vision.chunks import ImageChunk, TextChunk, concatenate
from ops.lib.vision.families import family_of
from ops.lib.vision.processor import Processor
from ops.tokenize_chat.builtin import SPECIAL_TOKENS, write_builtin_processor

HIDDEN, LAYERS, VOCABULARY = 32, 8, 400
TOKENIZER_VOCABULARY = 360  # real checkpoints have more embedding rows than their tokenizer has tokens
PROSE = (
    "The picture shows a red square beside a green circle, and the line below it is blue.",
    "What is it? Describe the image in a few words, then count what can be seen on it.",
    "There are three of them: one is large, two are small, and all of them are yellow.",
)
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
}
# No size of an expert's matrices equals another, or transformers could not tell which way round they are stored.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
IDS = {
    "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>"),
    "video_token_id": SPECIAL_TOKENS.index("<|video_pad|>"),
    "vision_start_token_id": SPECIAL_TOKENS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIAL_TOKENS.index("<|vision_end|>"),
}


@frozen
class FamilyRow:
    """A family of targets. make(text, vision, tied) creates the model; text, vision: changes of the tiny sizes."""

    make: Callable[[dict[str, Any], dict[str, Any], bool], PreTrainedModel]
    vision: bool


def _qwen3(text: dict[str, Any], _vision: dict[str, Any], tied: bool) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**TEXT, "head_dim": 16, **text}, tie_word_embeddings=tied))


def _qwen3_moe(text: dict[str, Any], _vision: dict[str, Any], tied: bool) -> PreTrainedModel:
    sizes = {**TEXT, **EXPERTS, "norm_topk_prob": True, "head_dim": 16, **text}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, tie_word_embeddings=tied))


def _qwen2_5_vl(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope, **text},
        vision_config={**VISION, **windows, **vision},
        tie_word_embeddings=tied,
        **IDS,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> PreTrainedModel:
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**_qwen3_vl_sizes(text, vision, tied)))


def _qwen3_vl_moe(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> PreTrainedModel:
    tower = {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], **vision}  # SGLang counts on three
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**_qwen3_vl_sizes({**EXPERTS, **text}, tower, tied)))


def _qwen3_vl_sizes(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    tower = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return {
        "text_config": {**TEXT, "head_dim": 16, "rope_parameters": rope, **text},
        "vision_config": {**VISION, **tower, **vision},
        "tie_word_embeddings": tied,
        **IDS,
    }


def _qwen3_5(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> PreTrainedModel:
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(**_qwen3_5_sizes(text, vision, tied)))


def _qwen3_5_moe(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> PreTrainedModel:
    experts = {**EXPERTS, "shared_expert_intermediate_size": 40}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**_qwen3_5_sizes({**experts, **text}, vision, tied)))


def _qwen3_5_sizes(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "full_attention_interval": 4,
    }
    layers = text.get("num_hidden_layers", LAYERS)
    kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(layers)]
    tower = {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
    return {
        "text_config": {**TEXT, **linear, "layer_types": kinds, "head_dim": 32, "rope_parameters": rope, **text},
        "vision_config": {**VISION, **tower, **vision},
        "tie_word_embeddings": tied,
        **IDS,
    }


FAMILIES: dict[str, FamilyRow] = {
    "qwen3": FamilyRow(_qwen3, vision=False),
    "qwen3_moe": FamilyRow(_qwen3_moe, vision=False),
    "qwen2_5_vl": FamilyRow(_qwen2_5_vl, vision=True),
    "qwen3_vl": FamilyRow(_qwen3_vl, vision=True),
    "qwen3_vl_moe": FamilyRow(_qwen3_vl_moe, vision=True),
    "qwen3_5": FamilyRow(_qwen3_5, vision=True),
    "qwen3_5_moe": FamilyRow(_qwen3_5_moe, vision=True),
}


def make_checkpoint(
    family_name: str,
    folder: Path,
    *,
    seed: int = 0,
    lively: bool = True,
    tie_word_embeddings: bool = True,
    vision: dict[str, Any] | None = None,
    **text: Any,
) -> Path:
    """Write a random checkpoint and its processor; the same seed gives the same weights.

    lively: weights so large that every greedy token depends on all tokens before it. vision, text: fields of
    vision_config and text_config that differ, such as num_hidden_layers = 4.
    """
    row = FAMILIES[family_name]
    conversations = [[{"role": "user", "content": [{"type": "text", "text": line}]}] for line in PROSE]
    write_builtin_processor(folder, conversations, TOKENIZER_VOCABULARY)
    if not row.vision:
        (folder / "preprocessor_config.json").unlink()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = {"out_hidden_size": text.get("hidden_size", HIDDEN), **(vision or {})}
        model = row.make(text, tower, tie_word_embeddings)
        if lively:
            _make_lively(model)
    weights, convert = family_of(model.config.to_dict()).for_saving(model.state_dict())
    model.save_pretrained(folder, state_dict=weights, save_original_format=convert)
    return folder


def token_sample(
    processor: Processor, question: str, answer: str = "It is red.", images: Sequence[Image.Image] = (), name: str = "s"
) -> TokenSample:
    """A sample of one turn, made from chunks, with its images before the question."""
    tokenizer = processor.tokenizer

    def text(content: str, learnt: bool = False) -> TextChunk:
        ids = torch.tensor(tokenizer(content, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        return TextChunk(ids, torch.full(ids.shape, learnt))

    chunks: list[TextChunk | ImageChunk] = [text("<|im_start|>user\n")]
    for image in images:
        chunks += [text("<|vision_start|>"), ImageChunk.from_image(processor, image), text("<|vision_end|>")]
    chunks.append(text(f"{question}<|im_end|>\n<|im_start|>assistant\n"))
    prompt = concatenate(chunks, processor.patch_dim)
    whole = concatenate([*chunks, text(f"{answer}<|im_end|>", learnt=True)], processor.patch_dim)
    return TokenSample(
        id=name,
        category="image" if images else "text",
        input_ids=whole.input_ids,
        loss_mask=whole.loss_mask,
        pixel_values=whole.pixel_values,
        image_grid_thw=whole.image_grid_thw,
        prompt_tokens=len(prompt.input_ids),
    )


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


@torch.no_grad()
def _make_lively(model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            embedding = "embed_tokens" in name
            weight.normal_(std=0.3 if embedding else 2 * weight.shape[1] ** -0.5)
        if ".experts." in name:  # a matrix for each
            weight.normal_(std=2 * weight.shape[2] ** -0.5)
        if "embed_tokens" in name or "lm_head" in name:
            weight[list(IDS.values())] *= 0.01  # no answer holds the placeholder of an image
