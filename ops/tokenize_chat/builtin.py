"""The built-in processor: a byte-level BPE trained on the samples, and the image processor of a tiny Qwen VLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.tokenize_chat.builtin_template import CHAT_TEMPLATE, SYSTEM_PROMPT

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|mask|>",
)

# How Qwen's tokenizers split text into words: digits one by one, a letter run with one character before it.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PATCH_SIZE, MERGE_SIZE = 4, 2
MIN_PIXELS, MAX_PIXELS = 16 * 16, 64 * 64  # 4 to 64 image tokens


def write_builtin_processor(folder: Path, conversations: Iterable[list[dict[str, Any]]], vocab_size: int) -> None:
    """Train a tokenizer on chat messages, and save it with its template and image processor.

    vocab_size includes the special tokens; a small text gives fewer tokens. Equal messages give equal files.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|endoftext|>", "<|im_end|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=131072,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE,
        temporal_patch_size=2,
        merge_size=MERGE_SIZE,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    image_processor.save_pretrained(folder)


def _texts(conversations: Iterable[list[dict[str, Any]]]) -> Iterator[str]:
    """The text of each conversation as the template shows it, without special tokens."""
    for messages in conversations:
        yield f"system\n{SYSTEM_PROMPT}"
        for message in messages:
            yield f"{message['role']}\n"
            for part in message["content"]:
                if part["type"] == "text":
                    yield part["text"]
