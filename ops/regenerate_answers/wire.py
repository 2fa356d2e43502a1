"""Requests to an OpenAI-compatible server for a conversation, and its responses.

Sources: the chat completions API of OpenAI; for DIALECTS the protocol modules of SGLang and the
documentation of vLLM.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen
from PIL import Image

from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.lib.data.files import shown_json
from ops.lib.vision.images import FORMATS, decode, orientation
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.shards import Key
from ops.tokenize_chat.template import Messages, texts_of

# Otherwise a checkpoint's generation_config.json sets what a request omits, even a repetition penalty with greedy
# decoding; and the text may lack special tokens and thoughts, which the token ids contain.
_NEUTRAL_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
DIALECTS: dict[str, dict[str, Any]] = {
    "openai": {},
    "sglang": {
        **_NEUTRAL_SAMPLING,
        "skip_special_tokens": False,
        "separate_reasoning": False,
        "return_token_ids": True,
    },
    "vllm": {**_NEUTRAL_SAMPLING, "skip_special_tokens": False, "return_token_ids": True},
}
FINAL = (
    "stop",
    "length",
    "content_filter",
    "tool_calls",
    "function_call",
)  # anything else, such as "abort", is not an answer
ID_LIMIT = 2**31  # tokenizers use ids of 32 bits


@frozen
class Reply:
    """A server's answer. token_ids: None if not reported; prompt_ids, prompt_tokens: as the server read it."""

    text: str
    thought: str
    finish_reason: str
    tokens: int | None
    token_ids: list[int] | None
    prompt_tokens: int | None
    prompt_ids: list[int] | None

    def full_text(self, prompt_opens_thought: bool) -> str:
        """Everything after the generation prompt. A server with a reasoning parser removes the thought and the white
        space around it, which is restored as the families' templates write it.
        """
        if not self.thought:
            return self.text
        thought = self.thought if prompt_opens_thought else f"{THINK}\n{self.thought}"
        return f"{thought}\n{END_OF_THOUGHT}\n\n{self.text}" if self.text else thought


def parameters(config: RegenerateAnswers, dialect: str) -> dict[str, Any]:
    """The parameters of all requests."""
    thinking = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
    return {
        "model": config.model,
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        **DIALECTS[dialect],
        **({"chat_template_kwargs": thinking} if thinking else {}),
        **(config.extra_body or {}),
    }


def request_seed(seed: int, key: Key) -> int:
    """A seed of 31 bits for one answer, depending only on the arguments."""
    sample_id, turn = key
    return int.from_bytes(hashlib.sha256(f"{seed}\0{turn}\0{sample_id}".encode()).digest()[:4], "big") >> 1


def wire_messages(messages: Messages, images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Messages with their images, in order, as data URLs; without images a message is one text, which every server
    accepts and none joins with blanks.
    """
    encoded = iter(images)
    return [{"role": message["role"], "content": _content(message, encoded)} for message in messages]


def _content(message: Mapping[str, Any], images: Iterator[bytes]) -> str | list[dict[str, Any]]:
    if all(part["type"] == "text" for part in message["content"]):
        return "".join(texts_of(dict(message)))
    return [
        {"type": "image_url", "image_url": {"url": data_url(next(images))}}
        if part["type"] == "image"
        else {"type": "text", "text": part["text"]}
        for part in message["content"]
    ]


def data_url(encoded: bytes) -> str:
    """An image that `decode` takes, as it was ingested. If engines would decode it to other pixels than dflow does
    (rotated by EXIF data, 16-bit grey, which Pillow clips), or not know its format, it is sent as a PNG of dflow's
    pixels.
    """
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        upright = orientation(image) == 1
        is_unchanged = upright and not image.mode.startswith("I") and image.format in FORMATS
        mime = Image.MIME[image.format] if is_unchanged and image.format else "image/png"
    if not is_unchanged:
        buffer = io.BytesIO()
        decode(encoded).save(buffer, "PNG")
        encoded = buffer.getvalue()
    return f"data:{mime};base64,{base64.b64encode(encoded).decode('ascii')}"


def read_reply(data: Any) -> Reply:
    """The answer in a response. Raises ValueError for a response without an answer, with an incomplete one, or with a
    malformed field.
    """
    try:
        choice, usage = data["choices"][0], data.get("usage") or {}
        message, finish_reason = choice["message"], choice["finish_reason"]
        text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        ids = [choice.get("response_token_ids"), choice.get("token_ids")]
        prompt_ids = [choice.get("prompt_token_ids"), data.get("prompt_token_ids")]
        counts = usage.get("completion_tokens"), usage.get("prompt_tokens")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a chat completion: {shown_json(data)}") from error
    if finish_reason not in FINAL:
        raise ValueError(f"aborted by the server: finish_reason {finish_reason!r:.100}")
    full_text = _text("content", text) + _text("reasoning_content", thought)
    token_ids = _first("token_ids", ids, range(ID_LIMIT))
    return Reply(
        text=text or "",
        thought=thought or "",
        finish_reason=finish_reason,
        tokens=_count("completion_tokens", counts[0]),
        token_ids=None if full_text and not token_ids else token_ids,  # no ids of a non-empty answer: not reported
        prompt_tokens=_count("prompt_tokens", counts[1]),
        prompt_ids=_first("prompt_token_ids", prompt_ids, None) or None,
    )


def _text(name: str, value: object) -> str:
    """A valid text, empty for null. Raises ValueError."""
    if not isinstance(value, str | None):
        raise _malformed(name, "a text", value)
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise _malformed(name, "Unicode text", value) from error
    return value or ""


def _count(name: str, value: object) -> int | None:
    if value is not None and not (type(value) is int and value >= 0):
        raise _malformed(name, "a number of tokens", value)
    return value


def _first(name: str, values: Sequence[Any], known: range | None) -> list[int] | None:
    """The first reported list of ids, each in `known`; None allows any: engines put own values into prompts."""
    ids = next((value for value in values if value is not None), None)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(one) is int and (known is None or one in known) for one in ids):
        raise _malformed(name, "a list of token ids", ids)
    return ids


def _malformed(name: str, wanted: str, found: object) -> ValueError:
    shown = shown_json(found).encode("ascii", "backslashreplace").decode()
    return ValueError(f"a malformed answer: {name} is not {wanted}: {shown}")
