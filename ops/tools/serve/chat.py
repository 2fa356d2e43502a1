"""Prompts for a served draft, held-out samples of its run as chat messages; one chat request to a server, and how many
tokens of the answer each verification step yielded.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import ServerError
from dsl.files import parse_json
from ops.lib.data.files import read_jsonl
from ops.lib.data.image_packs import read_packed
from ops.lib.data.proxies import open_directly

ANSWER_WITHIN_S = 600.0
HELD_OUT = ("test", "val", "train")  # splits of the prompt to try: the first of these that has one


@frozen
class Dialect:
    """An engine's additions to OpenAI's chat format.

    request: further keys of a request. place: the keys to the table of measurements, starting in the first choice or in
    the response. steps, figure: its keys for the number of verification steps, and for the engine's own accepted
    length. counts: how that differs from tau.
    """

    engine: str
    request: Mapping[str, Any]
    of_choice: bool
    place: tuple[str, ...]
    steps: str
    figure: str
    counts: str

    def measured(self, response: Mapping[str, Any], choice: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table of measurements in a response; empty for a server without a draft."""
        table: Mapping[str, Any] = choice if self.of_choice else response
        for key in self.place:
            table = table.get(key) or {}
        return table


SGLANG = Dialect(
    engine="SGLang",
    request={"model": "default", "return_meta_info": True},
    of_choice=True,
    place=("meta_info",),
    steps="spec_verify_ct",
    figure="spec_accept_length",
    counts="which also counts the first token",
)
VLLM = Dialect(  # with --per-request-spec-decode-metrics; it serves one model, which need not be named
    engine="vLLM",
    request={},
    of_choice=False,
    place=("metrics", "speculative_decoding"),
    steps="num_spec_steps",
    figure="mean_acceptance_length",
    counts="which also counts what follows the end of the answer",
)


@frozen
class Answer:
    """A server's answer to a chat request.

    tokens: of the answer, including the first one and EOS. steps: verification steps, 0 without a draft. accept_length:
    the engine's own figure, None without a step.
    """

    text: str
    tokens: int
    steps: int
    accept_length: float | None

    @property
    def tau(self) -> float | None:
        """The tokens per verification step, as `evaluate` counts: without the first one, which the prefill yields."""
        return (self.tokens - 1) / self.steps if self.steps else None


def ask(
    url: str, messages: Sequence[Mapping[str, Any]], max_tokens: int, key: str = "", dialect: Dialect = SGLANG
) -> Answer:
    """Ask a server for the greedy answer to a conversation. key: the server's API key.

    Raises ServerError if the server rejects it or gives no answer.
    """
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens, **dialect.request}
    return read_answer(post(f"{url}/v1/chat/completions", body, key), dialect)


def ask_streamed(
    url: str, messages: Sequence[Mapping[str, Any]], max_tokens: int, key: str = "", dialect: Dialect = SGLANG
) -> tuple[Answer, float | None]:
    """The same answer, streamed, and the moment of its first text by `time.perf_counter`; None without a text.

    Engines need not report verification steps of streamed answers, so `steps` may be 0. Raises ServerError.
    """
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens, **dialect.request}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    url = f"{url}/v1/chat/completions"
    whole: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    text, first = "", None
    with _reply(url, body, key) as reply:
        for line in reply:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            chunk = parse_json(data)
            if not isinstance(chunk, dict) or "error" in chunk:
                raise ServerError(f"{url}: the stream has an error: {json.dumps(chunk)[:500]}")
            whole |= {name: value for name, value in chunk.items() if value and name != "choices"}
            for part in chunk.get("choices") or ():
                choice |= {name: value for name, value in part.items() if value}
                delta = part.get("delta") or {}
                said = delta.get("content") or delta.get("reasoning_content") or ""
                if said and first is None:
                    first = time.perf_counter()
                text += said
    return read_answer({**whole, "choices": [{**choice, "message": {"content": text}}]}, dialect), first


def read_answer(response: Mapping[str, Any], dialect: Dialect = SGLANG) -> Answer:
    """Parse a server's answer. Raises ServerError for a response that is no chat completion."""
    try:
        choice = response["choices"][0]
        message, measured = choice["message"], dialect.measured(response, choice)
        return Answer(
            text=message.get("content") or message.get("reasoning_content") or "",
            tokens=int(response["usage"]["completion_tokens"]),
            steps=int(measured.get(dialect.steps) or 0),
            accept_length=measured.get(dialect.figure),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = json.dumps(response)[:500]
        raise ServerError(
            f"the server's response is no chat completion of {dialect.engine} ({error!r}): {shown}"
        ) from error


def post(url: str, body: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Send a JSON request, and return the JSON response. Raises ServerError."""
    with _reply(url, body, key) as response:
        answer = parse_json(response.read())
    if not isinstance(answer, dict):
        raise ServerError(f"{url}: no JSON object but {json.dumps(answer)[:500]}")
    return answer


@contextmanager
def _reply(url: str, body: Mapping[str, Any], key: str) -> Iterator[Any]:
    """The reply to a JSON request, open for reading. Raises ServerError, also for what fails while it is read."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with open_directly(request, timeout=ANSWER_WITHIN_S) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}: {error.code}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ServerError(f"{url}: no answer ({error})") from error


def tau_text(answer: Answer, dialect: Dialect = SGLANG) -> str:
    """A line with tau as dflow counts it, and the engine's own figure."""
    own = f"tau: {answer.tau:.3g} ({answer.tokens - 1} tokens after the first in {answer.steps} verification steps)"
    if answer.accept_length is None:
        return f"{own}; the server reports no {dialect.figure}"
    return f"{own}; {dialect.engine}'s {dialect.figure}, {dialect.counts}: {answer.accept_length:.3g}"


@frozen
class ChatPrompt:
    """A prompt for a server: a sample's id, and its turns before the first answer as chat messages."""

    id: str
    messages: Sequence[Mapping[str, Any]]


HELLO = ChatPrompt(
    "no held-out sample", [{"role": "user", "content": [{"type": "text", "text": "Hello! Who are you?"}]}]
)


def held_out_prompts(samples: Path, vision: bool, count: int) -> tuple[ChatPrompt, ...]:
    """The first `count` held-out prompts of an ImageSamples folder, from the first held-out split that has any.

    vision: take only prompts with images; otherwise only those without.
    """
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in HELD_OUT}
    for row in read_jsonl(samples / "samples.jsonl"):
        asks = any(turn["role"] == "user" for turn in row["messages"]) and not {"tools", "documents"} & row.keys()
        fits = asks and bool(row["images"]) == vision
        if fits and len(rows[row["split"]]) < count:
            rows[row["split"]].append(row)
        if len(rows[HELD_OUT[0]]) == count:
            break
    chosen = next(filter(None, rows.values()), [])
    return tuple(ChatPrompt(str(row["id"]), chat_messages(row, samples)) for row in chosen)


def chat_messages(row: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The turns of a sample before its first answer, as chat messages with the images as data URLs."""
    images = iter(row["images"])
    messages = []
    for turn in row["messages"]:
        if turn["role"] == "assistant":
            break
        parts = [
            {"type": "image_url", "image_url": {"url": _data_url(folder, next(images))}}
            if part["type"] == "image"
            else {"type": "text", "text": part["text"]}
            for part in turn["content"]
        ]
        messages.append({"role": turn["role"], "content": parts})
    return messages


def _data_url(folder: Path, image: Mapping[str, Any]) -> str:
    """The data: URL of an image reference of ops/artifacts.py; SGLang recognises the format by the bytes."""
    return "data:image/png;base64," + base64.b64encode(read_packed(folder, dict(image))).decode()


def prompt_text(prompt: ChatPrompt) -> str:
    parts: list[Any] = [part for message in prompt.messages for part in message["content"]]
    images = sum(part["type"] == "image_url" for part in parts)
    text = " ".join(part["text"].strip() for part in parts if part["type"] == "text")
    return f"{text} ({prompt.id}{f', {images} image(s)' if images else ''})"
