"""One chat request to SGLang's server, and how many tokens of the answer each verification step yielded."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from attrs import frozen

from dsl.errors import ServerError
from ops.lib.data.direct_http import open_directly
from ops.lib.data.files import parse_json

ANSWER_WITHIN_S = 600.0


@frozen
class Answer:
    """tokens: of the answer, the first one and EOS included. steps: verification steps, 0 without a draft.

    spec_accept_length: SGLang's own figure, None without a verification step.
    """

    text: str
    tokens: int
    steps: int
    spec_accept_length: float | None

    @property
    def tau(self) -> float | None:
        """Tokens per verification step, as `evaluate` counts: without the first token, which the prefill yields."""
        return (self.tokens - 1) / self.steps if self.steps else None


def ask(url: str, messages: Sequence[Mapping[str, Any]], max_tokens: int, key: str = "") -> Answer:
    """The greedy answer to a conversation. key: the server's API key. Raises ServerError if the server rejects it or
    gives none.
    """
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_meta_info": True,
    }
    return read_answer(post(f"{url}/v1/chat/completions", body, key))


def read_answer(response: Mapping[str, Any]) -> Answer:
    """Raises ServerError for a response that is no chat completion."""
    try:
        choice = response["choices"][0]
        message, meta = choice["message"], choice.get("meta_info") or {}
        return Answer(
            text=message.get("content") or message.get("reasoning_content") or "",
            tokens=int(response["usage"]["completion_tokens"]),
            steps=int(meta.get("spec_verify_ct") or 0),
            spec_accept_length=meta.get("spec_accept_length"),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        shown = json.dumps(response)[:500]
        raise ServerError(f"the server's response is no chat completion of SGLang ({error!r}): {shown}") from error


def post(url: str, body: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """A JSON request and its JSON response. Raises ServerError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with open_directly(request, timeout=ANSWER_WITHIN_S) as response:
            answer = parse_json(response.read())
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}: {error.code}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ServerError(f"{url}: no answer ({error})") from error
    if not isinstance(answer, dict):
        raise ServerError(f"{url}: no JSON object but {json.dumps(answer)[:500]}")
    return answer


def flush_cache(url: str) -> None:
    """Drops SGLang's cached prefixes of earlier prompts, once it is idle. Raises ServerError."""
    try:
        with open_directly(f"{url}/flush_cache?timeout=30", data=b"", timeout=60):
            pass
    except (OSError, HTTPException) as error:
        raise ServerError(f"{url}/flush_cache: {error}") from error


def accepted_lengths(answer: Answer) -> str:
    """tau as dflow counts it, beside SGLang's figure."""
    own = f"tau: {answer.tau:.3g} ({answer.tokens - 1} tokens after the first in {answer.steps} verification steps)"
    if answer.spec_accept_length is None:
        return f"{own}; the server reports no spec_accept_length"
    return f"{own}; SGLang's spec_accept_length, which also counts the first token: {answer.spec_accept_length:.3g}"
