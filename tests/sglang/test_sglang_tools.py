"""Conversations with tools at SGLang's own HTTP server: it reads the prompts that dflow renders, id by id."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from agent_rows import SAMPLES, TOOL_LISTS
from agent_templates import EXTENDS, STRIPS
from attrs import frozen
from family_checkpoints import make_checkpoint
from regenerate_cases import endpoint_config, make_target
from server_process import running_server
from transformers import AutoTokenizer

from ops.artifacts import TargetModel
from ops.regenerate_answers.client import ChatClient, wire_messages
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.sampling import Sampling

TEMPLATES = {"extends": EXTENDS, "rewrites history": STRIPS}


@frozen
class Endpoint:
    url: str


@frozen
class Served:
    """A target and the configuration of requests to its server."""

    target: TargetModel
    config: RegenerateAnswers
    prompts: Prompts


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    checkpoint = make_checkpoint("qwen3", folder / "made", lively=False, hidden_size=64, num_hidden_layers=3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATES[request.param]
    tokenizer.save_pretrained(checkpoint)
    target = make_target(folder / "target", checkpoint)
    arguments = ["--model-path", str(target.path / "model"), "--served-model-name", "talker", "--dtype", "float32"]
    with running_server(tmp_path_factory.mktemp("server"), arguments) as running:
        config = endpoint_config(Endpoint(f"{running.url}/v1"), max_new_tokens=2)
        yield Served(target, config, Prompts.load(config, target, Path()))


def read_ids(served, conversations, tools):
    """The ids that the server reads for each conversation."""

    async def ask():
        async with ChatClient.of(served.config, Sampling(), print) as client:
            return [
                (await client.complete(wire_messages(served.prompts.shown(messages), []), None, tools)).prompt_ids
                for messages in conversations
            ]

    return asyncio.run(ask())


def read_from_ids(served, prompts):
    """The ids that the server reads where it gets these."""

    async def ask():
        async with ChatClient.of(served.config, Sampling(), print) as client:
            return [(await client.complete([], None, (), ids)).prompt_ids for ids in prompts]

    return asyncio.run(ask())


def as_sglang_shows(tool):
    """A tool as SGLang 0.5.23 gives it to a chat template: `type` first, and null for what the client left out."""
    function = dict(tool["function"])
    missing = {key: None for key in ("description", "parameters") if key not in function}
    return {"type": tool["type"], "function": function | missing, "defer_loading": None}


@pytest.mark.parametrize("listed", TOOL_LISTS)
def test_sglang_reads_the_prompts_that_dflow_renders_before_every_answer_but_for_what_it_adds_to_tools(served, listed):
    asked = [
        messages[:turn]
        for messages in SAMPLES.values()
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    own = TOOL_LISTS[listed]
    as_shown = [as_sglang_shows(tool) for tool in own]
    theirs = read_ids(served, asked, own)
    for tools, is_equal in ((as_shown, True), (own, False)):
        rows = [{"id": "a", "images": [], "messages": messages, "tools": tools} for messages in asked]
        rendered = [served.prompts.ids(row)[0] for row in rows]
        assert is_equal == (theirs == rendered)
    assert rendered == read_from_ids(served, rendered)  # of tools as they were given
