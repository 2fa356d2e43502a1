"""Chats about pictures of one colour, and a Qwen3-VL that was taught them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import frozen
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint
from PIL import Image
from torch.nn.functional import cross_entropy

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.target.checkpoint_files import PROCESSOR, copy_files
from ops.lib.target.model import Target
from ops.lib.vision.batch import collate
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (50, 60, 210), "yellow": (220, 210, 50)}


TRAIN, HELD_OUT = 24, 6  # pictures of each colour


STEPS, BATCH = 70, 16


@frozen(eq=False)
class Case:
    """A checkpoint directory, its target, and samples with and without images by id."""

    checkpoint: Path
    target: Target
    samples: dict[str, TokenSample]

    def row(self, name: str) -> torch.Tensor:
        """The log-probabilities of one sample by itself, [S - 1]."""
        return token_log_probs(self.target, collate([self.samples[name]]))[0]


def solid(colour: str, generator: torch.Generator) -> Image.Image:
    """A picture of one colour, with random size, shade and noise."""
    width, height = torch.randint(16, 41, (2,), generator=generator).tolist()
    shade = torch.tensor(COLOURS[colour]) + torch.randint(-30, 31, (3,), generator=generator)
    pixels = shade + torch.randint(-15, 16, (height, width, 3), generator=generator)
    return Image.fromarray(pixels.clamp(0, 255).to(torch.uint8).numpy())


def write_data(folder: Path) -> Path:
    """Write JSON lines and their PNG files; each held-out picture occurs once with every colour as the answer."""
    generator = torch.Generator().manual_seed(0)
    rows = []

    def add(split, name, answer, image=None, question="What colour is it?"):
        if image is not None:
            image.save(folder / f"{name}.png")
        turns = [{"role": "user", "text": question}, {"role": "assistant", "text": answer}]
        picture_of = {} if image is None else {"image": f"{name}.png"}
        rows.append({"id": name, "split": split, "conversations": turns, **picture_of})

    for number in range(TRAIN):
        for colour in COLOURS:
            add("train", f"{colour}-{number}", f"It is {colour}.", solid(colour, generator))
    for number in range(8):
        add("train", f"text-{number}", "There are three of them.", question=f"Count to {number}.")
    for number in range(HELD_OUT):
        for colour in COLOURS:
            image = solid(colour, generator)
            for said in COLOURS:
                add("test", f"{colour}-{number}-said-{said}", f"It is {said}.", image)
    halves = Image.new("RGB", (48, 32), COLOURS["red"])
    halves.paste(COLOURS["blue"], (24, 0, 48, 32))
    add("test", "halves", "It is blue.", halves)
    add("test", "words", "There are three of them.", question="Count to eight, then describe the line.")
    add("test", "few-words", "All of them.", question="What is it?")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"


def train(target: Target, samples: list[TokenSample]) -> None:
    """Train a target by a plain loop: AdamW on the tokens of the answers."""
    target.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(target.model.parameters(), lr=5e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs = collate([samples[row] for row in torch.randperm(len(samples), generator=generator)[:BATCH]])
        learnt = inputs.loss_mask[:, 1:]
        logits = target.forward(inputs, use_cache=False).logits[:, :-1]
        cross_entropy(logits[learnt], inputs.input_ids[:, 1:][learnt]).backward()
        torch.nn.utils.clip_grad_norm_(target.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> ImageSamples:
    """The colour chats after ingest and inject_images."""
    source = write_data(tmp_path_factory.mktemp("pictures"))
    stage = FakeStage(tmp_path_factory.mktemp("ingest"))
    ingest(Ingest(source=str(source), seed=0), stage)
    samples = stage.artifact(Samples)
    stage = FakeStage(tmp_path_factory.mktemp("inject"), {"samples": samples})
    inject_images(InjectImages(samples=Ref("ingest")), stage)
    return stage.artifact(ImageSamples)


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory) -> Case:
    """A Qwen3-VL of two layers that has learnt colours, saved and loaded again; its samples are the held-out ones."""
    start = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("start"), lively=False, num_hidden_layers=2)
    stage = FakeStage(tmp_path_factory.mktemp("tokenize"), {"samples": packed})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), processor=str(start), min_loss_tokens=1), stage)
    tokens = stage.artifact(TokenShards)
    target = Target.from_directory(start, {})
    reader = TokenReader(tokens, "train")
    train(target, [reader.sample(index) for index in range(len(reader))])
    checkpoint = tmp_path_factory.mktemp("trained")
    target.model.save_pretrained(checkpoint)
    copy_files(start, checkpoint, PROCESSOR)
    held_out = TokenReader(tokens, "test")
    samples = [held_out.sample(index) for index in range(len(held_out))]
    return Case(checkpoint, Target.from_directory(checkpoint, {}), {sample.id: sample for sample in samples})
