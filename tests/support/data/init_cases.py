"""Data and checkpoints that `dflow init` looks at, and what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli
from jsonschema import Draft7Validator
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from dsl.read_toml import read_graph

TEXT = {
    "model_type": "qwen3",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "torch_dtype": "float32",
}
SMALL_RUN = {  # for a target of eight tiny layers and a test of seconds
    "regenerate.max_new_tokens": "24",
    "regenerate.temperature": "1.0",  # random weights never end an answer, and repeat one token without sampling
    "regenerate.finish_reasons": '["stop", "length"]',
    "tokenize.min_loss_tokens": "8",
    "capture.num_layers": "2",
    "shard.epochs": "1",
    "train.block_size": "4",
    "train.num_layers": "1",
    "eval.max_prompts": "2",
    "eval.max_new_tokens": "12",
}
VISION = {"patch_size": 16, "spatial_merge_size": 2, "depth": 2, "hidden_size": 32, "intermediate_size": 48}
VISION |= {"out_hidden_size": 32, "num_position_embeddings": 64, "num_heads": 2, "deepstack_visual_indexes": []}


def checkpoint(folder: Path, sees: bool) -> str:
    """Write a checkpoint as far as `dflow init` reads it: embedding and head, and a tokenizer of one token per word."""
    folder.mkdir()
    seeing = {"model_type": "qwen3_vl", "image_token_id": 2, "text_config": TEXT, "vision_config": VISION}
    config = seeing if sees else TEXT
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "<|mask|>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    ends = np.zeros((TEXT["vocab_size"], TEXT["hidden_size"]), np.float16)
    save_file({"model.embed_tokens.weight": ends, "lm_head.weight": ends}, folder / "model.safetensors")
    if sees:
        limits = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 16_777_216},
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    return str(folder)


def chat(path: Path, count: int, answer: str | None = "one two three four", image: str | None = None) -> Path:
    with path.open("w") as file:
        for place in range(count):
            turns = [{"role": "user", "content": f"Count to {place}"}]
            turns += [] if answer is None else [{"role": "assistant", "content": answer}]
            row = {"messages": turns} if image is None else {"messages": turns, "image": image}
            file.write(json.dumps(row) + "\n")
    return path


def nodes(path: Path) -> dict[str, Any]:
    """The nodes of a pipeline file, after checking that it compiles and fits the schema beside it."""
    read_graph(path, [], [])
    values = tomli.loads(path.read_text())
    schema = json.loads((path.parent / "dflow.schema.json").read_text())
    assert [] == [error.message for error in Draft7Validator(schema).iter_errors(values)]
    assert path.read_text().startswith("#:schema ./dflow.schema.json\n")
    found: dict[str, Any] = values["node"]
    return found


def write_photos(folder: Path) -> Path:
    """Write ten images of one class into a class folder."""
    (folder / "photos" / "cat").mkdir(parents=True)
    for place in range(10):
        Image.new("RGB", (64, 48 + place)).save(folder / "photos" / "cat" / f"{place}.png")
    return folder / "photos"


def write_flat_photos(folder: Path) -> Path:
    """Write three images directly into a folder."""
    (folder / "photos").mkdir()
    for place in range(3):
        Image.new("RGB", (64, 48 + place)).save(folder / "photos" / f"{place}.png")
    return folder / "photos"
