"""Conversations with tools in vLLM's own renderer: it makes the prompts that dflow renders, id by id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_rows import SAMPLES, TOOL_LISTS, TOOLS
from agent_templates import EXTENDS, STRIPS
from chat_requests import renderer
from family_checkpoints import make_checkpoint
from result_images import SEEN, SHOWING, images_of
from transformers import AutoTokenizer

from ops.lib.data.image_packs import PackWriter
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.client import wire_messages
from ops.regenerate_answers.conversations import Prompts
from ops.tokenize_chat.encode import ChatEncoder

TEMPLATES = {"extends": EXTENDS, "rewrites history": STRIPS}


def as_vllm_shows(tool):
    """A tool as vLLM 0.33 gives it to a chat template: in an order of its own, null for what the client left out."""
    given = tool["function"]
    ordered = {"name": given["name"], "description": given.get("description"), "parameters": given.get("parameters")}
    strict = {"strict": given["strict"]} if "strict" in given else {}
    return {"type": tool["type"], "function": ordered | strict}


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request, tmp_path_factory):
    """vLLM's renderer of a checkpoint, and dflow's prompts."""
    checkpoint = make_checkpoint("qwen3", tmp_path_factory.mktemp("made"), lively=False, num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATES[request.param]
    tokenizer.save_pretrained(checkpoint)
    return renderer(checkpoint, "pillow", {}), Prompts(ChatEncoder(load_processor(str(checkpoint))), Path())


@pytest.mark.parametrize("listed", TOOL_LISTS)
def test_vllm_makes_the_prompts_that_dflow_renders_before_every_answer_but_for_its_form_of_tools(both, listed):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.renderers import ChatParams

    made, prompts = both
    own = TOOL_LISTS[listed]
    received = [ChatCompletionToolsParam(**tool).model_dump() for tool in own]  # as its server reads a request
    as_shown = [as_vllm_shows(tool) for tool in own]
    assert json.dumps(as_shown) == json.dumps(received)
    for messages in SAMPLES.values():
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            sent = [
                {"reasoning" if key == "reasoning_content" else key: each for key, each in one.items()}
                for one in wire_messages(prompts.shown(messages[:turn]), [])
            ]
            params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tools": received})
            _, [prompt] = made.render_chat([sent], params, skip_mm_cache=True)
            row = {"id": "a", "images": [], "messages": messages[:turn], "tools": as_shown}
            assert prompts.ids(row)[0] == list(prompt["prompt_token_ids"])
    assert (json.dumps(own) == json.dumps(received)) == (listed == "one")


def test_vllm_makes_the_prompts_that_dflow_renders_behind_images_of_results(tmp_path):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import ChatParams

    checkpoint = make_checkpoint("qwen3_vl", tmp_path / "made", lively=False, num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = SHOWING["qwen3-vl"]
    tokenizer.save_pretrained(checkpoint)
    made, prompts = renderer(checkpoint, "pillow", {}), Prompts(ChatEncoder(load_processor(str(checkpoint))), tmp_path)
    packs = PackWriter(tmp_path)
    for name, messages in SEEN.items():
        for turn in [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]:
            images = images_of(messages[:turn])
            sent = wire_messages(prompts.shown(messages[:turn]), images)
            received = ChatCompletionRequest(model="m", messages=sent, tools=TOOLS)  # as its server reads it
            tools = [tool.model_dump() for tool in received.tools]
            params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tools": tools})
            _, [prompt] = made.render_chat([received.messages], params, skip_mm_cache=True)
            row = {"id": name, "category": "image", "messages": messages[:turn], "tools": TOOLS}
            sample = prompts.sample(row | {"images": list(map(packs.add, images))})
            assert sample.input_ids.tolist() == list(prompt["prompt_token_ids"])
            items = prompt["mm_kwargs"]["image"] if images else []
            assert sample.image_grid_thw.tolist() == [item["image_grid_thw"].data.tolist() for item in items]
