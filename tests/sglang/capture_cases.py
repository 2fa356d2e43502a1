"""Tiny targets that SGLang loads on a CPU, one row a family, and samples with none, one and two images.

A family is a row of FAMILIES: what of the tiny checkpoint (tests/support/data/family_checkpoints.py) SGLang does not
take as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint, picture, token_sample
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import TokenSample, write_token_shard
from ops.lib.target.checkpoint_files import PROCESSOR, copy_files
from ops.lib.target.model import Target, complete_config
from ops.lib.vision.families import VisionFamily, family_of
from ops.lib.vision.processor import Processor, load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target


def no_change(_folder: Path) -> None:
    """The checkpoint is right as it was saved."""


@frozen(kw_only=True)
class Case:
    """One family: changes of the tiny sizes, of the processor, and of the files once they are written."""

    vision: Mapping[str, Any] = field(factory=dict)
    text: Mapping[str, Any] = field(factory=dict)
    processor: Mapping[str, Any] = field(factory=dict)
    finish: Callable[[Path], None] = no_change
    side: int = 24  # pixels of a small image
    tolerance: float = 5e-5
    has_vision: bool = True


# SGLang rounds sizes up to multiples of 32 on a CPU (configs/update_config.py), and then cannot load other weights.
TOWER = {"intermediate_size": 64}
FAMILIES: dict[str, Case] = {
    "qwen3": Case(has_vision=False),
    # Its image path takes pixel rows of 1176 numbers only, those of patches of 14 pixels.
    "qwen2_5_vl": Case(
        vision={**TOWER, "patch_size": 14, "window_size": 56},
        processor={"patch_size": 14, "size": {"shortest_edge": 28**2, "longest_edge": 28**2 * 64}},
        side=84,
    ),
    "qwen3_vl": Case(vision=TOWER),
    # A recurrence carries rounding on; test_sglang_qwen35.py measures by how much.
    "qwen3_5": Case(vision=TOWER, tolerance=2.5e-4),
    "qwen3_5_moe": Case(vision=TOWER, tolerance=2.5e-4),
    "qwen3_moe": Case(has_vision=False, text={"tie_word_embeddings": False}),  # SGLang's has no tied head
    "qwen3_vl_moe": Case(vision=TOWER),
}


def make_target(name: str, folder: Path, **text: Any) -> TargetModel:
    """The TargetModel artifact of a family's tiny checkpoint."""
    case = FAMILIES[name]
    checkpoint = make_checkpoint(name, folder / "checkpoint", vision=dict(case.vision) or None, **{**case.text, **text})
    if case.processor:
        file = checkpoint / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(case.processor)))
    calm(checkpoint)
    case.finish(checkpoint)
    stage = FakeStage(folder / "load")
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    return stage.artifact(TargetModel)


def text_alone(target: TargetModel, folder: Path) -> Path:
    """The language model of a Qwen3.5 as a checkpoint of its own, which SGLang loads with another class."""
    whole = Target.load(target).model
    kind = Qwen3_5MoeForCausalLM if hasattr(whole.config.text_config, "num_experts") else Qwen3_5ForCausalLM
    text = kind(whole.config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    text.save_pretrained(folder)
    copy_files(target.path / "model", folder, [name for name in PROCESSOR if "processor" not in name])
    complete_config(folder)
    return folder


def calm(checkpoint: Path) -> None:
    """Halve all weights but the embeddings, so that states are about as large as a trained model's.

    The tiny checkpoints are so lively that they magnify float32's rounding: two right results differ by up to 3e-3, and
    transformers' own from float64's by as much.
    """
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if (weight.ndim == 2 or ".experts." in name) and "embed_tokens" not in name and "lm_head" not in name:
            weight *= 0.5
    save_file(tensors, file, metadata={"format": "pt"})


def make_samples(processor: Processor, case: Case) -> dict[str, TokenSample]:
    """Texts of two lengths and, where the family sees, samples of one and two images of different shapes."""
    side = case.side
    samples = {
        "text": token_sample(processor, "What is it?", name="text"),
        "long text": token_sample(
            processor, "And now, what is it that one can see there?", "A circle.", name="long text"
        ),
    }
    if case.has_vision:
        one, two, three = picture(side, side * 2, 1), picture(side * 2, side * 2, 2), picture(side * 3, side, 3)
        samples |= {
            "one image": token_sample(processor, "What is on it?", images=[one], name="one image"),
            "two images": token_sample(processor, "Which is larger?", images=[two, three], name="two images"),
        }
    return samples


def write_tokens(
    folder: Path, target: TargetModel, processor: Processor, samples: list[TokenSample], split: str = "train"
) -> TokenShards:
    """A TokenShards artifact of these samples for this target."""
    folder.mkdir(parents=True)
    family = family_of(json.loads((target.path / "model" / "config.json").read_text()))
    vision = isinstance(family, VisionFamily) and family.has_vision
    patch_dim = family.patch_dim if vision else processor.patch_dim
    shard = f"{split}-00000.safetensors"
    write_token_shard(folder / shard, samples, patch_dim)
    info = json.loads((target.path / "target.json").read_text())
    write_json(
        folder / "tokens.json",
        {
            "vocab_size": len(processor.tokenizer),
            "eos_token_ids": info["eos_token_ids"],
            "mask_token_id": info["mask_token_id"],
            "pad_token_id": processor.pad_token_id,
            "patch_dim": patch_dim,
            "merge_size": family.merge_size if vision else 2,
            "image_token_id": family.image_token_id if vision else -1,
            "image_backend": "pillow",
            "pixel_limits": None,
            "shards": [
                {
                    "file": shard,
                    "split": split,
                    "samples": len(samples),
                    "tokens": sum(len(sample.input_ids) for sample in samples),
                }
            ],
        },
    )
    rows = [
        {
            "id": sample.id,
            "split": split,
            "category": sample.category,
            "shard": shard,
            "row": row,
            "tokens": len(sample.input_ids),
            "prompt_tokens": sample.prompt_tokens,
        }
        for row, sample in enumerate(samples)
    ]
    write_jsonl(folder / "samples.jsonl", rows)
    return TokenShards(folder, "tokens")


def processor_of(target: TargetModel) -> Processor:
    return load_processor(str(target.path / "model"))


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference between two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
