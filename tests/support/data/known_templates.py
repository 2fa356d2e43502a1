"""What served_oracle.py must know of published chat templates, by hand: a line for each that is not as `Known()`."""

from __future__ import annotations

from attrs import evolve
from served_oracle import Known

WITHOUT = Known(key=None)  # shows no reasoning
OPENED, CLOSED, EMPTY = "<think>\n", "<think>\n\n</think>\n\n", "<think></think>"
THOUGHT_OF_GEMMA = ("<|channel>thought", "<channel|>")

QWEN = Known(holds=(CLOSED, OPENED))  # a thought of no words in the prompt, and none in history
GLM = Known(holds=("</think>", "<think>", EMPTY))
NEMOTRON = Known(holds=(EMPTY, OPENED))
GEMMA = Known(thought=THOUGHT_OF_GEMMA, holds=("<|channel>thought\n<channel|>",))
# Text beside a call stands behind its result, where the prompt ends the turn; only with thinking it begins a thought.
GEMMA_V5 = Known(thought=THOUGHT_OF_GEMMA, holds=("<|channel>thought\n", "<turn|>\n", "<turn|>\n<|channel>thought\n"))
HERMES = Known(  # a line break behind a result, unless it is the last message
    key=None, rewrites=("</tool_response>\n<|im_end|>", "</tool_response><|im_end|>")
)
IN_TEXT = Known(key="content", holds=(OPENED, "<think>\n</think>"))

KNOWN = {
    "Apertus-8B-Instruct": Known(key=None, holds=("<|assistant_start|>",)),  # history goes on in the turn of the call
    "Apriel-1.6-15b-Thinker-fixed": Known(
        thought=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), holds=("Here are my reasoning steps:\n",)
    ),
    "Bielik-11B-v3.0-Instruct": QWEN,
    "ByteDance-Seed-OSS": Known(thought=("<seed:think>", "</seed:think>")),
    "Cohere2MoE": Known(thought=("<|START_THINKING|>", "<|END_THINKING|>"), holds=("<|START_THINKING|>",)),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Known(
        thought=("<|START_THINKING|>", "<|END_THINKING|>"), holds=("<|START_THINKING|><|END_THINKING|>",)
    ),
    "GLM-4.6": GLM,
    "GLM-4.7-Flash": GLM,
    "GigaChat3-10B-A1.8B": WITHOUT,
    "GigaChat3.1-10B-A1.8B": WITHOUT,
    "Kimi-K3": Known(thought=("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    "LFM2.5-8B-A1B": Known(key="thinking"),
    "MiMo-VL": WITHOUT,
    "MiniMax-M1": WITHOUT,
    "MiniMax-M2": QWEN,
    "MiniMax-M3": Known(thought=("<mm:think>", "</mm:think>")),
    "Mistral-Small-3.2-24B-Instruct-2506": WITHOUT,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": NEMOTRON,
    "NVIDIA-Nemotron-Nano-v2": IN_TEXT,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": HERMES,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "Qwen-QwQ-32B": IN_TEXT,
    "Qwen-Qwen2.5-7B-Instruct": WITHOUT,
    "Qwen-Qwen3-0.6B": QWEN,
    "Qwen3-Coder": WITHOUT,
    "Qwen3.5-4B": QWEN,
    "Reka-Edge": Known(only_thinking=True),
    "Spark2.5": GLM,
    "deepseek-ai-DeepSeek-V3.2": Known(holds=(EMPTY,)),
    "google-gemma-4-31B-it": GEMMA,
    "google-gemma-4-31B-it-interleaved": GEMMA,
    "ibm-granite-granite-4.0": WITHOUT,
    "ibm-granite-granite-4.1": WITHOUT,
    "inclusionai-ling-3.0-flash": GLM,
    "meetkai-functionary-medium-v3.1": WITHOUT,
    "meta-llama-Llama-3.1-8B-Instruct": WITHOUT,
    "meta-llama-Llama-3.2-3B-Instruct": WITHOUT,
    "meta-llama-Llama-3.3-70B-Instruct": WITHOUT,
    "mistralai-Ministral-3-14B-Reasoning-2512": WITHOUT,  # only as a part of the content, which no server sends
    "mistralai-Mistral-Nemo-Instruct-2407": WITHOUT,
    "moonshotai-Kimi-K2": WITHOUT,
    "openai-gpt-oss-120b": Known(key="thinking"),
    "openbmb-MiniCPM5-1B": QWEN,
    "poolside-Laguna-XS-2.1": GLM,
    "poolside-Laguna-XS.2": GLM,
    "tencent-Hy3": Known(
        thought=("<think:opensource>", "</think:opensource>"), holds=("<think:opensource></think:opensource>",)
    ),
    "unsloth-Apriel-1.5": WITHOUT,  # only under "thought", which no server sends
    "unsloth-mistral-Devstral-Small-2507": WITHOUT,
    "upstage-Solar-Open-100B": Known(key="reasoning"),
    "diffusion_gemma": evolve(GEMMA_V5, header="<|turn>model\n"),  # behind a result, where a prompt has none
    "gemma4": GEMMA,
    "gemma4_v2": WITHOUT,
    "gemma4_v3": GEMMA,
    "gemma4_v4": GEMMA,
    "gemma4_v5": GEMMA_V5,
    "glm4moe": GLM,
    "gptoss": Known(key="thinking"),
    "lfm2_2_5": Known(key="thinking"),
    "lfm2_v2": WITHOUT,
    "llama3_1": WITHOUT,
    "llama3_2": WITHOUT,
    "nemotron_3_5_lightning": NEMOTRON,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON,
    "qwen2_5": WITHOUT,
    "qwen3": QWEN,
    "qwen3_5_nothink": QWEN,
    "qwen3_5_think": QWEN,
    "qwen3_6": QWEN,
    "qwen3_8": QWEN,
    "qwen3_instruct_2507": WITHOUT,
    "qwen3_vl": WITHOUT,
}
