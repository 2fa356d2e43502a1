"""Conversations with tools in vLLM's own renderer: it makes the prompts that dflow renders, id by id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_rows import SAMPLES, TOOL_LISTS
from agent_templates import EXTENDS, STRIPS
from chat_requests import renderer
from family_checkpoints import make_checkpoint
from regenerate_cases import config
from transformers import AutoTokenizer

from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.client import parameters, prompt_by_ids, read_reply, wire_messages
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.sampling import Sampling
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


def test_vllms_completions_take_prompts_of_ids_and_sampling_and_tell_the_ids_of_the_answer():
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseChoice as Choice
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

    asked = config(backend="endpoint", endpoint="http://h/v1", model="m", prompts="ids", sampling="checkpoint")
    path, prompt = prompt_by_ids([7, 8, 9], "vllm")
    body = {**parameters(asked, Sampling(0.6, 0.95, 20, 0.1), "vllm"), **prompt, "seed": 5}
    request = CompletionRequest(**body)
    assert {} == (request.model_extra or {})
    sampled = request.to_sampling_params(40, {"repetition_penalty": 1.3, "top_k": 3})
    assert (0.6, 0.95, 20, 0.1, 1.0, 5) == (
        sampled.temperature, sampled.top_p, sampled.top_k, sampled.min_p, sampled.repetition_penalty, sampled.seed
    )  # fmt: skip
    assert ("completions", [7, 8, 9], True, False) == (
        path, request.prompt, request.return_token_ids, request.skip_special_tokens
    )  # fmt: skip
    choice = Choice(index=0, text="Yes.", finish_reason="stop", token_ids=[4, 2], prompt_token_ids=[7, 8, 9])
    usage = UsageInfo(prompt_tokens=3, completion_tokens=2, total_tokens=5)
    reply = read_reply(CompletionResponse(model="m", choices=[choice], usage=usage).model_dump())
    assert ("Yes.", "stop", [4, 2], [7, 8, 9]) == (reply.text, reply.finish_reason, reply.token_ids, reply.prompt_ids)
