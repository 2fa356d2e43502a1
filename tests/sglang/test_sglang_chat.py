"""SGLang's own chat code makes the prompts that dflow renders of published chat templates, id by id, without a server.

The code is that of its chat endpoint (`OpenAIServingChat`), which reads a request, finds out what the template takes,
and renders and tokenises it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_rows import TOOLS
from attrs import frozen
from family_checkpoints import make_checkpoint
from published_prompts import SETTINGS, TEMPLATES, of_dflow, set_template
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.server_args import ServerArgs

from ops.lib.data.reasoning_keys import engines_without
from ops.lib.sglang.version import installed_version

ENGINE = f"sglang-{installed_version()}"
# They read the reasoning of earlier answers from "thinking" or "reasoning"; SGLang gives them "reasoning_content".
UNLIKE = ("gptoss", "openai-gpt-oss-120b", "lfm2_2_5", "LFM2.5-8B-A1B", "upstage-Solar-Open-100B")
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="no chat templates here: `make test-sglang` installs trl's")


@frozen
class TokenizerSide:
    """What the chat code reads of the process that holds the tokenizer; no engine is behind it."""

    server_args: ServerArgs
    model_config: ModelConfig
    tokenizer: Any
    served_model_name: str = "talker"

    @property
    def model_path(self) -> str:
        return self.server_args.model_path

    def config_value(self, name: str) -> Any:
        return getattr(self.server_args, name)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    checkpoint = make_checkpoint("qwen3", tmp_path_factory.mktemp("made"), lively=False, num_hidden_layers=3)
    arguments = ServerArgs(model_path=str(checkpoint), device="cpu", dtype="float32")
    publish(arguments, role="tokenizer")
    yield arguments
    reset_context()


def chat_code(arguments: ServerArgs, name: str) -> OpenAIServingChat:
    """SGLang's chat code over the checkpoint, which gets the template."""
    tokenizer = set_template(Path(arguments.model_path), name)
    side, templates = TokenizerSide(arguments, ModelConfig.from_server_args(arguments), tokenizer), TemplateManager()
    templates.load_chat_template(side, None, arguments.model_path)
    return OpenAIServingChat(side, templates)


@pytest.mark.parametrize(("name", "thinking"), SETTINGS)
def test_sglangs_chat_code_makes_the_prompts_of_published_templates_or_the_card_says_it_does_not(
    arguments, name, thinking
):
    chat = chat_code(arguments, name)
    settings = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    ours = of_dflow(Path(arguments.model_path), thinking, ENGINE)
    theirs = []
    for each in ours.asked:
        request = ChatCompletionRequest(model="talker", messages=each.messages, tools=TOOLS, **settings)
        theirs.append(list(chat._process_messages(request, False).prompt_ids))
    is_unlike = theirs != [each.ids for each in ours.asked]
    assert is_unlike == (name in UNLIKE)
    if is_unlike:
        assert [ENGINE] == engines_without(ours.reasoning_key, [ENGINE])  # which the card and the gate name
