"""What `dflow init` counts by the target's chat template is what tokenize_chat makes of the same data."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from agent_rows import NAME, TOOLS
from agent_templates import STRIPS
from attrs import evolve, frozen
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint

from dsl.op import Ref
from dsl.read_toml import read_graph
from executor.cli import main
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.ingest.digits import digit_samples
from ops.ingest.run import ingest
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json
from ops.lib.data.sample_account import SPLITS
from ops.lib.data.token_shards import TokenReader
from ops.shard_sequence.plan import steps_of_epoch
from ops.tokenize_chat.run import tokenize_chat
from ops.tools.init.counting import counted
from ops.tools.init.survey import LONGEST, Counter, survey

HEAD = "<|im_start|>system\nYou are a model of 2025-01-01, and answer briefly.<|im_end|>\n"


@frozen
class Tokens:
    """What tokenize_chat made: the tokens and samples of each split, and the longest prompt and sample."""

    tokens: dict[str, int]
    samples: dict[str, int]
    dropped: dict[str, int]
    prompt: int
    sample: int


def tokenized(folder: Path, checkpoint: Path) -> tuple[dict[str, Any], Tokens]:
    """The configs of folder's pipeline, and what its nodes make of the data's own answers."""
    configs = {name: node.config for name, node in read_graph(folder / "pipeline.toml").nodes.items()}
    stage = FakeStage(folder / "ingest")
    ingest(configs["ingest"], stage)
    inject = FakeStage(folder / "inject", {"samples": stage.artifact(Samples)})
    inject_images(configs["inject"], inject)
    tokens = FakeStage(folder / "tokens", {"samples": inject.artifact(ImageSamples)})
    config = evolve(configs["tokenize"], samples=Ref("a"), target=None, processor=str(checkpoint), workers=1)
    tokenize_chat(config, tokens)
    shards = read_json(tokens.out_dir / "tokens.json")["shards"]
    records = TokenReader(tokens.artifact(TokenShards)).records
    return configs, Tokens(
        {split: sum(each["tokens"] for each in shards if each["split"] == split) for split in SPLITS},
        {split: sum(each["samples"] for each in shards if each["split"] == split) for split in SPLITS},
        read_json(tokens.out_dir / "summary.json")["dropped"],
        max(record["prompt_tokens"] for record in records),
        max(record["tokens"] for record in records),
    )


def check(folder: Path, checkpoint: Path) -> Tokens:
    """Check the file that init wrote against what its nodes make."""
    configs, made = tokenized(folder, checkpoint)
    assert configs["tokenize"].expected_tokens == sum(made.tokens.values())
    assert made.prompt <= configs["regenerate"].max_prompt_tokens
    assert made.sample <= configs["tokenize"].max_length
    shard = configs["shard"]
    steps = shard.epochs * steps_of_epoch(made.tokens["train"], made.samples["train"], shard.tokens_per_step)
    found = re.search(r"# ([\d,]+) steps in total", (folder / "pipeline.toml").read_text())
    assert found is not None and steps == int(found[1].replace(",", ""))
    return made


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def agents_log(conversations: int) -> list[dict[str, Any]]:
    """Requests of an agent: two calls of a tool, with their results, and an answer; each request is in the log."""
    drawn, rows = random.Random(0), []
    for place in range(conversations):
        turns = [asked(f"Weather in the {place + 1} cities? " + "Please. " * drawn.randrange(40))]
        for step in range(3):
            if step < 2:
                call = {"id": f"c{step}", "type": "function", "function": {"name": NAME, "arguments": {"city": "Rome"}}}
                said = {"role": "assistant", "content": "I look. " * drawn.randrange(4), "tool_calls": [call]}
            else:
                said = {"role": "assistant", "content": "It is sunny there. " * drawn.randrange(1, 30)}
            request = {"messages": [*turns], "tools": TOOLS}
            rows.append({"request": request, "response": {"choices": [{"message": said, "finish_reason": "stop"}]}})
            turns += [
                said,
                {"role": "tool", "tool_call_id": f"c{step}", "content": "sky: clear " * drawn.randrange(20)},
            ]
    return rows


def inline(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def test_an_agents_log_and_chats_have_the_tokens_samples_and_steps_that_init_wrote_and_no_prompt_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template has a head of its own, and shows earlier turns otherwise than it prompted for them."""
    monkeypatch.chdir(tmp_path)
    checkpoint = make_checkpoint("qwen3", tmp_path / "target")
    (checkpoint / "chat_template.jinja").write_text(HEAD + STRIPS)
    chats = [
        {
            "messages": [
                asked(f"{place}: two and two? " * (place + 1)),
                {"role": "assistant", "content": "Four. " * 20},
            ]
            * 2
        }
        for place in range(20)
    ]
    log, chat = write(tmp_path / "log.jsonl", agents_log(40)), write(tmp_path / "chat.jsonl", chats)
    assert 0 == main(["init", log, chat, "--target", str(checkpoint)])
    said = " ".join(capsys.readouterr().out.split())
    made = check(tmp_path, checkpoint)
    assert {} == made.dropped and 140 < sum(made.samples.values()) == 40 * 3 + 20 * 2
    assert "(as the target's chat template and tokenizer make them; of 160 samples that 140 conversations make)" in said
    assert "requests: 80 of 120 have earlier answers, and of 80 of them the log has the request before" in said
    settings = {"checkpoint": str(checkpoint), "image_backend": "pillow", "enable_thinking": False, "tools_as": None}
    row = {"id": "a", "messages": inline(chats[19]["messages"]), "tools": (), "documents": (), "is_prompt": False}
    asks = {**row, "messages": row["messages"][:-1], "is_prompt": True}
    whole, prompt = counted(settings, [row, asks])
    assert [whole["prompts"][-1]] == prompt["prompts"] == prompt["samples"] and 2 == len(whole["answers"])


def test_the_built_in_digits_have_the_tokens_samples_and_steps_that_init_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = make_checkpoint("qwen3_vl", tmp_path / "target")
    (tmp_path / "digits").mkdir()
    rows = []
    for sample in digit_samples()[:150]:
        (image,) = sample.images
        assert isinstance(image, bytes)
        (tmp_path / "digits" / f"{len(rows)}.png").write_bytes(image)
        turns = [
            {
                "role": turn.role,
                "content": "".join(part if isinstance(part, str) else "<image>" for part in turn.content),
            }
            for turn in sample.turns
        ]
        rows.append({"messages": turns, "image": f"digits/{len(rows)}.png"})
    assert 0 == main(["init", write(tmp_path / "digits.jsonl", rows), "--target", str(checkpoint)])
    made = check(tmp_path, checkpoint)
    assert 150 == sum(made.samples.values()) + sum(made.dropped.values())


def test_the_samples_with_the_most_text_of_all_are_found_wherever_they_stand(tmp_path: Path) -> None:
    rows = [{"messages": [asked(f"{place}"), {"role": "assistant", "content": "Four. "}]} for place in range(1500)]
    long = random.Random(1).sample(range(1500), LONGEST)
    for place in long:
        rows[place]["messages"][0]["content"] = "Two and two? " * 50
    found = survey((Path(write(tmp_path / "chat.jsonl", rows)),), Counter.of(None))
    assert {str(place + 1) for place in long} == {drawn.sample.id for drawn in found.most}
    assert 200 == len({drawn.sample.id for drawn in found.drawn}) and 1000 == len(found.lengths)
