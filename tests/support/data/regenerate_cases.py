"""Samples to answer anew, targets to answer them, and runs of regenerate_answers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fake_stage import FakeStage, folder_digest
from family_checkpoints import make_checkpoint
from PIL import Image

from dsl.op import Ref
from ops.artifacts import ImageSamples, TargetModel, TokenShards
from ops.lib.data.files import read_jsonl, write_jsonl
from ops.lib.data.image_packs import PackWriter
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.model import Target
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}
PARROTED = "The answer of the data set."


def turn(role, text, image=False):
    return {"role": role, "content": [*([{"type": "image"}] if image else []), {"type": "text", "text": text}]}


def conversations():
    """Questions with the answers that the tests' target has learnt, as (id, split, colour or None, turns)."""
    for index, colour in enumerate(COLOURS):
        yield (
            f"picture-{colour}",
            "val" if index == 2 else "train",
            colour,
            [("What colour is it?", f"It is {colour}."), ("Is that so? Look again!", f"Yes, {colour} all over.")],
        )
    for index, thing in enumerate(["square", "circle", "line", "large one", "small picture", "green line"]):
        split = "train" if index < 5 else "test"
        yield (f"text-{index}", split, None, [(f"Describe the {thing}.", f"The {thing} is beside the {thing}.")])


def rows(folder, answers):
    """The rows of an ImageSamples artifact, its images packed in `folder`. answers(text): the answer in the row."""
    packs = PackWriter(folder)
    for sample_id, split, colour, turns in conversations():
        references = []
        if colour:
            file = folder / f"{colour}.png"
            Image.new("RGB", (16, 16), COLOURS[colour]).save(file)
            references = [packs.add(file.read_bytes())]
            file.unlink()
        messages = []
        for number, (question, answer) in enumerate(turns):
            messages.append(turn("user", question, image=bool(colour) and number == 0))
            messages.append(turn("assistant", answers(answer)))
        category = "image" if colour else "text"
        yield {"id": sample_id, "split": split, "category": category, "messages": messages, "images": references}


def artifact_of(folder, answers):
    folder.mkdir()
    write_jsonl(folder / "samples.jsonl", rows(folder, answers))
    return ImageSamples(folder, folder_digest(folder))


def tokens_of(tmp, samples, processor):
    stage = FakeStage(tmp, {"samples": samples})
    tokenize_chat(TokenizeChat(samples=Ref("a"), processor=str(processor), min_loss_tokens=1, preview_samples=0), stage)
    return stage.artifact(TokenShards)


def make_target(folder, checkpoint):
    stage = FakeStage(folder)
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    return stage.artifact(TargetModel)


def config(**changes):
    return RegenerateAnswers(
        samples=Ref("inject"), **{"target": Ref("target"), "max_new_tokens": 40, "seed": 0, **changes}
    )


def run(folder, samples, target, **changes):
    stage = FakeStage(folder, {"samples": samples, "target": target})
    regenerate_answers(config(**changes), stage)
    return stage


def endpoint_config(server, **changes):
    """The config of a run against a server, with short waits everywhere."""
    served = {"backend": "endpoint", "endpoint": server.url, "model": "talker", "concurrency": 4, "backoff_s": 0.01}
    return config(**{**served, **changes})


def run_endpoint(folder, samples, target, server, **changes):
    stage = FakeStage(folder, {"samples": samples, "target": target})
    regenerate_answers(endpoint_config(server, **changes), stage)
    return stage


def answers_of(stage):
    """The texts of the answers in the regenerated splits, by sample id."""
    return {
        row["id"]: [message["content"][0]["text"] for message in row["messages"] if message["role"] == "assistant"]
        for row in read_jsonl(stage.out_dir / "samples.jsonl")
        if row["split"] != "test"
    }


def teach(loaded: Target, samples, steps: int, lr: float) -> None:
    """Train the target until it knows the learnt tokens of these samples by heart."""
    loaded.model.requires_grad_(True)
    inputs = loaded.inputs(samples)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        logits_BSV = loaded.forward(inputs, use_cache=False).logits
        wanted = inputs.loss_mask[:, 1:]
        loss = F.cross_entropy(logits_BSV[:, :-1][wanted], inputs.input_ids[:, 1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.1


def make_talker(folder) -> TargetModel:
    """A tiny Qwen3-VL that knows the answers of `conversations` by heart."""
    checkpoint = make_checkpoint(
        "qwen3_vl",
        folder / "checkpoint",
        lively=False,
        hidden_size=64,
        num_hidden_layers=3,
        vision={"out_hidden_size": 64},
    )
    reader = TokenReader(tokens_of(folder / "tokens", artifact_of(folder / "samples", str), checkpoint))
    loaded = Target.load(make_target(folder / "untrained", checkpoint))
    teach(loaded, [reader.sample(index) for index in range(len(reader))], steps=80, lr=4e-3)
    loaded.model.save_pretrained(checkpoint)
    return make_target(folder / "trained", checkpoint)
