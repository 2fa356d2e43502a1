"""Images in the results of tools, answered again: what a server is sent, and what a target here is asked."""

from __future__ import annotations

import io

import numpy as np
import torch
from agent_rows import NAME, TOOLS, calls, conversation, say
from chat_samples import real_processor, run_tokenize
from chat_server import ChatServer, called, is_probe, response
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint
from PIL import Image
from regenerate_cases import endpoint_config, make_target, run
from result_images import SEEN, SHOWING, images_of, shown, write_seen
from transformers import AutoTokenizer

from ops.artifacts import ImageSamples, TokenShards
from ops.lib.data.files import read_jsonl
from ops.lib.data.image_packs import read_packed
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.model import Target
from ops.regenerate_answers.client import data_url
from ops.regenerate_answers.run import regenerate_answers

OPTIONS = {"min_answer_tokens": 1, "finish_reasons": ("stop", "length")}


def checkpoint_of(folder, template):
    checkpoint = make_checkpoint("qwen3_vl", folder, num_hidden_layers=3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


def part(image):
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def test_a_server_gets_images_of_results_as_parts_behind_the_calls_of_the_target(tmp_path):
    checkpoint = checkpoint_of(tmp_path / "made", SHOWING["qwen3-vl"])
    messages = conversation(
        shown("user", "Look.", None),
        calls("Paris", "Rome"),
        shown("tool", "Paris: ", None),
        shown("tool", None),
        say("assistant", "Both."),
    )
    of_user, of_paris, of_rome = images_of(messages)
    replies = iter([called("Rome", "Paris"), response("Fine.")])
    with ChatServer(lambda body: response("H", "length") if is_probe(body) else next(replies)) as server:
        stage = FakeStage(tmp_path, {"samples": write_seen(tmp_path / "in", {"a": messages}), "target": None})
        served = {"target": None, "processor": str(checkpoint), "concurrency": 1, **OPTIONS}
        regenerate_answers(endpoint_config(server, **served), stage)
    _, asked = server.conversations
    assert [{"type": "text", "text": "Look."}, part(of_user)] == asked["messages"][0]["content"]
    assert [
        {"role": "tool", "content": [part(of_rome)], "tool_call_id": "srv1", "name": NAME},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "Paris: "}, part(of_paris)],
            "tool_call_id": "srv2",
            "name": NAME,
        },
    ] == asked["messages"][2:]
    [row] = read_jsonl(stage.out_dir / "samples.jsonl")
    assert [of_user, of_rome, of_paris] == [read_packed(stage.out_dir, image) for image in row["images"]]


def test_a_target_here_answers_behind_images_of_results_as_transformers_generates(tmp_path):
    target = make_target(tmp_path / "target", checkpoint_of(tmp_path / "made", SHOWING["qwen3-vl"]))
    samples = write_seen(tmp_path / "in", {"chain": SEEN["chain"]})
    stage = run(tmp_path, samples, target, history="data", max_new_tokens=12, **OPTIONS)
    rows = list(read_jsonl(stage.out_dir / "samples.jsonl"))
    assert ["chain@1", "chain@2", "chain@3", "chain@4"] == [row["id"] for row in rows]
    assert [1, 2, 4, 5] == [len(row["images"]) for row in rows]
    model, real = Target.load(target).model, real_processor(target.path / "model")
    images = [Image.open(io.BytesIO(image)) for image in images_of(SEEN["chain"])]
    for row in rows:
        text = real.apply_chat_template(row["messages"][:-1], tools=TOOLS, add_generation_prompt=True, tokenize=False)
        made = real(text=[text], images=images[: len(row["images"])])
        given = {name: torch.as_tensor(np.asarray(values)) for name, values in made.items()}
        generated = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
        assert generated.tolist() == row["messages"][-1]["generated_ids"]
    tokens = run_tokenize(
        tmp_path / "tokens",
        stage.artifact(ImageSamples),
        processor=str(target.path / "model"),
        contexts="served",
    )
    reader = TokenReader(tokens.artifact(TokenShards))  # of fewer answer tokens than min_loss_tokens, each by itself
    for place, row in enumerate(rows):
        sample = reader.sample(place)
        assert row["messages"][-1]["generated_ids"] == sample.input_ids[sample.loss_mask].tolist()
        assert len(row["images"]) == len(sample.image_grid_thw)
    assert torch.equal(
        reader.sample(0).pixel_values, reader.sample(3).pixel_values[: len(reader.sample(0).pixel_values)]
    )
