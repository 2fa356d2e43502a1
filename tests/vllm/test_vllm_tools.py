"""Conversations with tools in vLLM's own renderer: it makes the prompts that dflow renders, id by id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_rows import SAMPLES, TOOL_LISTS, TOOLS
from agent_templates import EXTENDS, STRIPS
from chat_requests import renderer
from family_checkpoints import make_checkpoint
from published_prompts import SETTINGS, of_dflow, set_template
from regenerate_cases import config
from result_images import SEEN, SHOWING, images_of
from transformers import AutoTokenizer

from ops.lib.data.image_packs import PackWriter
from ops.lib.data.reasoning_keys import engines_without
from ops.lib.data.tool_forms import FORMS, GIVEN, tools_in_form
from ops.lib.vision.processor import load_processor
from ops.lib.vllm.version import VLLM_VERSION
from ops.regenerate_answers.client import parameters, prompt_by_ids, read_reply, wire_messages
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.sampling import Sampling
from ops.tokenize_chat.encode import ChatEncoder

ENGINE = f"vllm-{VLLM_VERSION}"
TEMPLATES = {"extends": EXTENDS, "rewrites history": STRIPS}
# They read the reasoning of earlier answers from "thinking"; vLLM gives them "reasoning" and "reasoning_content".
UNLIKE = ("gptoss", "openai-gpt-oss-120b", "lfm2_2_5", "LFM2.5-8B-A1B")


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request, tmp_path_factory):
    """vLLM's renderer of a checkpoint, and dflow's prompts by the form of tools."""
    checkpoint = make_checkpoint("qwen3", tmp_path_factory.mktemp("made"), lively=False, num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATES[request.param]
    tokenizer.save_pretrained(checkpoint)
    processor = load_processor(str(checkpoint))
    prompts = {form: Prompts(ChatEncoder(processor, tools_as=form), Path()) for form in FORMS}
    return renderer(checkpoint, "pillow", {}), prompts


@pytest.mark.parametrize("listed", TOOL_LISTS)
def test_vllm_makes_the_prompts_that_dflow_renders_with_tools_in_its_form_and_in_no_other(both, listed):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.renderers import ChatParams

    made, prompts = both
    tools = TOOL_LISTS[listed]
    received = [ChatCompletionToolsParam(**tool).model_dump() for tool in tools]  # as its server reads a request
    for messages in SAMPLES.values():
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            sent = [
                {"reasoning" if key == "reasoning_content" else key: each for key, each in one.items()}
                for one in wire_messages(prompts[GIVEN].shown(messages[:turn]), [])
            ]
            params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tools": received})
            _, [prompt] = made.render_chat([sent], params, skip_mm_cache=True)
            row = {"id": "a", "images": [], "messages": messages[:turn], "tools": tools}
            for form in FORMS:
                is_engines = json.dumps(tools_in_form(form, tools)) == json.dumps(tools_in_form(ENGINE, tools))
                assert is_engines == (prompts[form].ids(row)[0] == list(prompt["prompt_token_ids"]))


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    """A checkpoint, and vLLM's renderer of it."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 16384}
    checkpoint = make_checkpoint("qwen3", tmp_path_factory.mktemp("made"), lively=False, **sizes)
    return checkpoint, renderer(checkpoint, "pillow", {})


@pytest.mark.parametrize(("name", "thinking"), SETTINGS)
def test_vllm_makes_the_prompts_of_published_templates_or_the_card_says_it_does_not(rendering, name, thinking):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import ChatParams

    checkpoint, made = rendering
    template = set_template(checkpoint, name).chat_template
    ours = of_dflow(checkpoint, thinking, ENGINE)
    theirs = []
    for each in ours.asked:
        received = ChatCompletionRequest(model="m", messages=each.messages, tools=TOOLS)  # as its server reads it
        given = {"add_generation_prompt": True, "tools": [tool.model_dump() for tool in received.tools]}
        given |= {} if thinking is None else {"enable_thinking": thinking}
        params = ChatParams(chat_template=template, chat_template_kwargs=given)
        _, [prompt] = made.render_chat([received.messages], params, skip_mm_cache=True)
        theirs.append(list(prompt["prompt_token_ids"]))
    is_unlike = theirs != [each.ids for each in ours.asked]
    assert is_unlike == (name in UNLIKE)
    if is_unlike:
        assert [ENGINE] == engines_without(ours.reasoning_key, [ENGINE])  # which the card and the gate name


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
