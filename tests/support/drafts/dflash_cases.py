"""Tiny targets with drafts of every quality: one that knows the answers by heart, one blurred by noise, one by chance.

A good draft alone would hide much: where it knows the answer from the anchor's token, wrong features do not show.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from fake_stage import FakeStage
from family_checkpoints import PROSE, make_checkpoint, picture, token_sample
from overfit import overfit, with_answers
from safetensors.torch import load_file, save_file

from ops.artifacts import Draft, TargetModel, TokenShards
from ops.lib.data.files import read_json, write_json
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.backbone.load import load_draft, random_draft, tensors_digest
from ops.lib.drafts.decoding.decode import Decoded, decode_plain, decode_speculative
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target

BLOCK = 6
NEW_TOKENS = 29  # behind the first token of an answer
LAYERS = (0, 1, 3, 4)  # with images: the first two lie within Qwen3-VL's deepstack
NOISE = 0.2  # of a matrix's standard deviation, where tau is then within BLURRED
BLURRED = (2.5, 3.8)  # tau of the draft with noise
QUESTIONS = ("What is it?", "How many?", *PROSE)


@frozen(eq=False)
class Case:
    """A target, its drafts, and prompts.

    tokens: the prompts with the target's own answers, as both splits "train" and "test".
    """

    target: TargetModel
    loaded: Target
    tokens: TokenShards
    prompts: list[TokenSample]
    plain: list[Decoded]
    drafts: dict[str, Draft]

    @property
    def checkpoint(self) -> Path:
        return self.target.path / "model"

    @property
    def eos(self) -> frozenset[int]:
        return self.loaded.eos_token_ids

    def reference(self, draft: Path) -> list[Decoded]:
        """Decode all prompts with dflow's own speculative decoding."""
        model = load_draft(draft)
        return [decode_speculative(self.loaded, model, prompt, NEW_TOKENS) for prompt in self.prompts]


def make_case(
    family: str,
    folder: Path,
    *,
    images: bool,
    scale: float = 1,
    processor: dict[str, Any] | None = None,
    also: Callable[[Path], Sequence[TokenSample]] = lambda _checkpoint: (),
    make: Callable[..., Path] = make_checkpoint,
    noise: float = NOISE,
    **sizes: Any,
) -> Case:
    """Make a target of a family, the prompts that it answers, and its drafts.

    scale: of the pictures. processor: fields of preprocessor_config.json. also: further prompts for this checkpoint,
    whose answers the drafts learn too. make: writes the checkpoint of a family. noise: the
    first that is tried. sizes: fields of the model's config.
    """
    checkpoint = make(family, folder / "checkpoint", **sizes)
    if processor:
        file = checkpoint / "preprocessor_config.json"
        write_json(file, read_json(file) | processor)
    stage = FakeStage(folder / "target")
    load_target(LoadTarget(checkpoint=str(folder / "checkpoint")), stage)
    target = stage.artifact(TargetModel)
    prompts = _prompts(checkpoint, images, scale)
    loaded = _ending_early(target, prompts)
    plain = [decode_plain(loaded, prompt, NEW_TOKENS) for prompt in prompts]
    info = _tokens_info(loaded, prompts)
    tokens = with_answers(folder / "tokens", info, prompts, plain, ("train", "test"))
    load_processor(str(checkpoint)).save(tokens.path / "processor")
    more = also(checkpoint)
    answers = [*plain, *(decode_plain(loaded, prompt, NEW_TOKENS) for prompt in more)]
    trained = overfit(
        folder / "draft",
        target,
        with_answers(folder / "learnt", info, [*prompts, *more], answers) if more else tokens,
        capture={"target_layer_ids": LAYERS},
        epochs=100 if more else 200,  # of two steps each, or of one
        block_size=BLOCK,
        num_anchors=NEW_TOKENS + 1,
    )
    drafts = {
        "trained": trained,
        "noisy": blurred(trained, folder, loaded, prompts, noise),
        "random": by_chance(trained, folder / "random"),
    }
    return Case(target, loaded, tokens, prompts, plain, drafts)


def _ending_early(target: TargetModel, prompts: list[TokenSample]) -> Target:
    """The target with one more EOS: a token in the middle of the second prompt's answer."""
    answer = decode_plain(Target.load(target), prompts[1], NEW_TOKENS).tokens
    end = next(token for place, token in enumerate(answer) if place > NEW_TOKENS // 2 and token not in answer[:place])
    info = read_json(target.path / "target.json")
    write_json(target.path / "target.json", info | {"eos_token_ids": sorted([*info["eos_token_ids"], end])})
    return Target.load(target)


def blurred(draft: Draft, folder: Path, target: Target, prompts: Sequence[TokenSample], noise: float = NOISE) -> Draft:
    """The draft with so much noise that it is neither good nor bad; how much that is hangs on how training rounded."""
    least, most = 0.0, 2 * noise
    for _ in range(6):
        found = noisy(draft, folder / f"noisy-{noise:g}", noise)
        model = load_draft(found.path)
        answers = [decode_speculative(target, model, prompt, NEW_TOKENS) for prompt in prompts]
        tau = sum(answer.generated for answer in answers) / sum(answer.steps for answer in answers)
        if BLURRED[0] <= tau <= BLURRED[1]:
            return found
        least, most = (noise, most) if tau > BLURRED[1] else (least, noise)
        noise = (least + most) / 2
    raise AssertionError(f"no noise up to {noise} gives a tau within {BLURRED}; the last one gave {tau:.2f}")


def noisy(draft: Draft, folder: Path, noise: float) -> Draft:
    """A copy of the draft with noise added to every matrix."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(draft.path / "model.safetensors")
    for weight in weights.values():
        if weight.ndim == 2:
            weight += torch.randn(weight.shape, generator=generator) * weight.std() * noise
    return written(draft, weights, folder)


def by_chance(draft: Draft, folder: Path) -> Draft:
    """A draft of the same shape with random weights."""
    return written(draft, random_draft(load_draft(draft.path).config, seed=1).state_dict(), folder)


def changed(draft: Draft, folder: Path, without: str | None = None, **fields: Any) -> Path:
    """A copy of a serving directory with other fields in config.json or its dflash_config, or without one tensor."""
    weights = load_file(draft.path / "model.safetensors")
    weights.pop(without, None)
    copy = written(draft, weights, folder).path
    config = read_json(copy / "config.json")
    for name, value in fields.items():
        (config["dflash_config"] if name in config["dflash_config"] else config)[name] = value
    write_json(copy / "config.json", config)
    return copy


def written(draft: Draft, weights: dict[str, torch.Tensor], folder: Path) -> Draft:
    """A copy of the serving directory with other weights."""
    shutil.copytree(draft.path, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = read_json(folder / "config.json")
    config["dflow"]["digest"]["tensors"] = tensors_digest(folder / "model.safetensors")
    write_json(folder / "config.json", config)
    return Draft(folder, folder.name)


def _prompts(checkpoint: Path, images: bool, scale: float) -> list[TokenSample]:
    """Prompts, one per question; with images every question except one has one or two pictures."""
    processor = load_processor(str(checkpoint))
    sizes = ((24, 16), (16, 32), (24, 24))
    pictures = [picture(int(width * scale), int(height * scale), seed) for seed, (width, height) in enumerate(sizes)]
    counts = (0, 1, 2, 1, 1) if images else (0,) * len(QUESTIONS)
    return [
        token_sample(processor, question, images=pictures[index % 2 :][:count], name=f"prompt-{index}")
        for index, (question, count) in enumerate(zip(QUESTIONS, counts, strict=True))
    ]


def _tokens_info(target: Target, prompts: list[TokenSample]) -> dict[str, Any]:
    """The content of tokens.json for the prompts, without its shards."""
    family = target.family
    vision = family.has_vision
    return {
        "format": 1,
        "mask_token_id": target.info["mask_token_id"],
        "image_token_id": family.image_token_id if vision else None,
        "pad_token_id": 0,
        "eos_token_ids": target.info["eos_token_ids"],
        "vocab_size": target.info["vocab_size"],
        "patch_dim": prompts[0].pixel_values.shape[1],
        "merge_size": family.merge_size if vision else None,
        "image_backend": "pillow" if vision else None,
        "pixel_limits": None,
    }
