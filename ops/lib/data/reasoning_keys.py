"""The keys under which the server of an engine gives a chat template the reasoning of earlier answers.

    sglang-0.5.21, sglang-0.5.23    `ChatCompletionMessageGenericParam` in sglang/srt/entrypoints/openai/protocol.py
    vllm-0.33.0                     vllm/renderers/chat_utils/chat_message.py

A template that reads another key, as those of gpt-oss and LFM2.5 do, shows none. tests/sglang/test_sglang_chat.py and
tests/vllm/test_vllm_tools.py compare prompts with those of the engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

REASONING_KEYS: Mapping[str, tuple[str, ...]] = {
    "sglang-0.5.21": ("reasoning_content",),
    "sglang-0.5.23": ("reasoning_content",),
    "vllm-0.33.0": ("reasoning", "reasoning_content"),
}


def engines_without(key: str, engines: Iterable[str] = REASONING_KEYS) -> list[str]:
    """Those of the engines whose servers do not give a template this key."""
    return [engine for engine in engines if key not in REASONING_KEYS[engine]]
