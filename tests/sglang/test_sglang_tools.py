"""Conversations with tools at SGLang's own HTTP server: it reads the prompts that dflow renders, id by id."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from agent_rows import SAMPLES, TOOL_LISTS
from agent_templates import EXTENDS, STRIPS
from attrs import evolve, frozen
from family_checkpoints import make_checkpoint
from regenerate_cases import endpoint_config, make_target
from server_process import running_server
from transformers import AutoTokenizer

from ops.artifacts import TargetModel
from ops.lib.data.tool_forms import FORMS, tools_in_form
from ops.lib.sglang.version import installed_version
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


@pytest.mark.parametrize("listed", TOOL_LISTS)
def test_sglang_reads_the_prompts_that_dflow_renders_with_tools_in_its_form_and_in_no_other(served, listed):
    asked = [
        messages[:turn]
        for messages in SAMPLES.values()
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    tools, engine = TOOL_LISTS[listed], f"sglang-{installed_version()}"
    rows = [{"id": "a", "images": [], "messages": messages, "tools": tools} for messages in asked]
    theirs = read_ids(served, asked, tools)
    for form in FORMS:
        prompts = Prompts.load(evolve(served.config, tools_as=form), served.target, Path())
        is_engines = json.dumps(tools_in_form(form, tools)) == json.dumps(tools_in_form(engine, tools))
        assert is_engines == (theirs == [prompts.ids(row)[0] for row in rows])
    rendered = [served.prompts.ids(row)[0] for row in rows]  # of tools as they were given
    assert rendered == read_from_ids(served, rendered)
