"""Requests to an OpenAI-compatible server, and its responses: retried if it is busy, ended if no retry can help.

    connection error, timeout, 408, 409, 425, 429, 5xx, an unreadable answer    retried with exponential backoff
    401, 402, 403, 404, a redirect                                              DataError: every request would fail
    other 4xx                                                                   Refused: only this conversation

A request without attempts left does not show what is at fault. Then a trivial question is sent: if it is answered, the
conversation is at fault (Refused), else the server (TransientError, so that the node is retried later). The same
question is sent before all others, so that a wrong name or parameter costs one request. An unreachable server is
reported at the first failed request.

Sources: the chat completions API of OpenAI; for DIALECTS the protocol modules of SGLang and the documentation of vLLM.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import hashlib
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from attrs import define, field, frozen
from PIL import Image

from dsl.errors import ConfigError, DataError, TransientError
from dsl.files import parse_json
from ops.ingest.documents import ARGUMENTS, KEY
from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.lib.data.files import shown_json
from ops.lib.data.proxies import Proxy, proxy_of
from ops.lib.data.sample_account import Unusable
from ops.lib.vision.images import FORMATS, decode, orientation
from ops.regenerate_answers.op import DRAWN, RegenerateAnswers, api_key
from ops.regenerate_answers.sampling import Sampling
from ops.regenerate_answers.shards import Key
from ops.tokenize_chat.habits import KEYS
from ops.tokenize_chat.template import Documents, Messages, Tools, texts_of

T = TypeVar("T")

LATER = (408, 409, 425, 429)
NEVER = (401, 402, 403, 404)
REFUSED, SERVER_FAILS = "refused by the server", "the server fails on it"
LONGEST_BACKOFF_S, LONGEST_WAIT_S = 60.0, 3600.0
FEW_RETRIES = 2  # of the trivial question after a request without attempts left
CONNECT_S = 15.0
LARGEST_ANSWER = 64 << 20  # bytes
SHOWN = 500  # characters of a server's message


class Refused(Unusable):
    """A server refuses one conversation, while it answers others."""


class _Rejected(Exception):
    """An error: a server's status that another attempt would not change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


class _NoAttemptLeft(Exception):
    """A request failed in all its attempts; the message is the outcome of the last one."""


@frozen
class _Failed:
    """The outcome of an attempt that may be repeated. wait_s: the delay that the server requests, 0 for none."""

    why: str
    wait_s: float = 0.0


@define
class ChatClient:
    """A client of one chat server. info: reports a line to the user. requests, retries: made so far.

    models: served name -> owner.
    """

    config: RegenerateAnswers
    sampling: Sampling
    info: Callable[[str], None]
    http: httpx.AsyncClient
    key: str | None
    proxy: Proxy | None = None
    requests: int = 0
    retries: int = 0
    models: dict[str, str] = field(factory=dict)
    _dialect: str | None = None  # known after the first request
    _is_away: bool = False  # and that was reported
    _detecting: asyncio.Lock = field(factory=asyncio.Lock)

    @classmethod
    def of(cls, config: RegenerateAnswers, sampling: Sampling, info: Callable[[str], None]) -> ChatClient:
        """Create a client of the config's server, to be used as a context.

        Raises ConfigError if the variable of the API key is not set, or the environment's proxy cannot be used.
        """
        key, proxy = api_key(config), proxy_of(str(config.endpoint))
        if proxy is not None and proxy.mistake:
            raise ConfigError(proxy.mistake)
        client = httpx.AsyncClient(
            base_url=f"{str(config.endpoint).rstrip('/')}/",
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s)),
            proxy=None if proxy is None else proxy.url,
            trust_env=False,  # else httpx asks the proxy also for a server of this machine
            verify=httpx.create_ssl_context(),
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
        )
        return cls(config, sampling, info, client, key, proxy)

    async def __aenter__(self) -> ChatClient:
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.http.__aexit__(*error)

    async def complete(
        self,
        messages: list[dict[str, Any]],
        seed: int | None,
        tools: Tools = (),
        prompt_ids: Sequence[int] | None = None,
        documents: Documents = (),
    ) -> Reply:
        """The server's answer to a conversation, which may call the tools.

        prompt_ids: the tokens of the prompt, to be read instead of messages, tools and documents. Raises Refused if it
        refuses this one, DataError if it will never answer, and TransientError if it is down.
        """
        async with self._detecting:  # the first one detects the server's dialect, the others wait for it
            if self._dialect is None:
                self._dialect = await self._detect_dialect()
        drawn = {} if seed is None else {"seed": seed}
        if prompt_ids is None:
            callable_tools = {"tools": list(tools), "tool_choice": "auto"} if tools else {}
            path, prompt = CHAT, {"messages": _with_own_keys(messages, self._dialect), **callable_tools}
        else:
            path, prompt = prompt_by_ids(prompt_ids, self._dialect)
        body = {**parameters(self.config, self.sampling, self._dialect), **prompt, **drawn}
        if documents and prompt_ids is None:
            body[ARGUMENTS] = {**body.get(ARGUMENTS, {}), KEY: list(documents)}
        try:
            return await self._request("POST", path, read_reply, body, self.config.retries)
        except _Rejected as fault:
            if fault.status in NEVER or fault.status < 400:
                raise DataError(self._refusal(fault)) from fault
            raise Refused(REFUSED, f"{fault.status}: {fault.message}") from fault
        except _NoAttemptLeft as fault:
            await self._ask_trivial(self._dialect, min(self.config.retries, FEW_RETRIES))
            raise Refused(SERVER_FAILS, str(fault)) from fault

    async def _detect_dialect(self) -> str:
        """The server's dialect. Raises DataError if the model is not served, TransientError without an answer."""
        try:
            self.models = await self._request("GET", "models", _served_models, None, self.config.retries)
        except _Rejected as fault:
            if fault.status in (401, 402, 403) or fault.status < 400:
                raise DataError(self._refusal(fault)) from fault
            self.models = {}  # a gateway may not list them
        except _NoAttemptLeft as fault:
            raise TransientError(self._down(str(fault))) from fault
        if self.models and self.config.model not in self.models:
            raise DataError(
                f'{self.config.endpoint} serves no model "{self.config.model}"; it serves {self._names()}: give one of '
                "these names as `model`"
            )
        owner = self.models.get(str(self.config.model), "")
        by_owner = owner if owner in ("sglang", "vllm") else "openai"
        dialect = by_owner if self.config.dialect == "auto" else self.config.dialect
        if dialect == "openai":
            self._check_parameters(owner)
        await self._ask_trivial(dialect, self.config.retries)
        return dialect

    def _check_parameters(self, owner: str) -> None:
        """Check that OpenAI's own parameters are enough for the config. Raises DataError."""
        needed = ['prompts = "ids"'] if self.config.prompts == "ids" else []
        needed += [f"{name} = {value:g}" for name in DRAWN if (value := getattr(self.sampling, name))]
        if needed:
            raise DataError(
                f'{self.config.endpoint} gets OpenAI\'s parameters only (the owner of "{self.config.model}" is '
                f'"{owner}"), and these have no {" and no ".join(needed)}: if it is SGLang or vLLM, set dialect to '
                '"sglang" or "vllm", else leave out prompts = "ids" and sampling = "checkpoint"'
            )

    async def _ask_trivial(self, dialect: str, retries: int) -> None:
        """Request one token in answer to a short question, with the parameters of all requests, as a test.

        Raises DataError if the server rejects it, and TransientError without an answer.
        """
        question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        body = {**parameters(self.config, self.sampling, dialect), **question}
        try:
            await self._request("POST", CHAT, read_reply, body, retries)
        except _Rejected as fault:
            raise DataError(self._refusal(fault)) from fault
        except _NoAttemptLeft as fault:
            raise TransientError(self._down(str(fault))) from fault

    async def _request(
        self, method: str, path: str, read: Callable[[Any], T], body: Mapping[str, Any] | None, retries: int
    ) -> T:
        """The response as `read` parses it. Raises _Rejected and _NoAttemptLeft."""
        for attempt in range(retries + 1):
            self.requests += 1
            outcome = await self._attempt(method, path, read, body)
            if not isinstance(outcome, _Failed):
                return outcome
            failed: _Failed = outcome
            if attempt == retries or failed.wait_s > LONGEST_WAIT_S:
                break
            self.retries += 1
            backoff = min(self.config.backoff_s * 2**attempt, LONGEST_BACKOFF_S)
            # Jitter: requests that failed together must not be repeated together.
            await asyncio.sleep(max(failed.wait_s, backoff * random.uniform(0.5, 1.0)))
        raise _NoAttemptLeft(f"{attempt + 1} attempts, the last: {failed.why}")

    async def _attempt(
        self, method: str, path: str, read: Callable[[Any], T], body: Mapping[str, Any] | None
    ) -> T | _Failed:
        try:
            async with (
                asyncio.timeout(self.config.timeout_s),
                self.http.stream(method, path, json=body) as response,
            ):
                if encoding := response.headers.get("Content-Encoding"):
                    return _Failed(self._hidden(f"an answer with the content encoding {encoding}, not asked for"))
                content = bytearray()
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > LARGEST_ANSWER:
                        return _Failed(f"an answer of more than {LARGEST_ANSWER >> 20} MiB")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return self._unreachable(self._hidden(f"{type(error).__name__}: {error}".rstrip(": ")))
        except (TimeoutError, httpx.TimeoutException):
            return _Failed(f"no answer within {self.config.timeout_s:g} s")
        except httpx.RequestError as error:
            return _Failed(self._hidden(f"{type(error).__name__}: {error}"))
        self._is_away = False
        status = response.status_code
        if status in LATER or status >= 500:
            return _Failed(
                f"{status}: {self._error_text(response, content)}", retry_after_s(response.headers.get("Retry-After"))
            )
        if status >= 300:
            raise _Rejected(status, self._error_text(response, content))
        try:
            return read(parse_json(bytes(content)))
        except ValueError as error:  # a proxy's page, or an incomplete answer
            return _Failed(self._hidden(str(error)))

    def _unreachable(self, why: str) -> _Failed:
        """A failure for a server that cannot be reached, and a message to the user for the first of them.

        The message comes at once, since all retries may take long.
        """
        if not self._is_away:
            self._is_away = True
            again = f"retrying up to {self.config.retries} times"
            through = f" through the proxy {self.proxy}" if self.proxy else ""
            self.info(f"{self.config.endpoint} cannot be reached{through} ({why}); {again}")
        return _Failed(why)

    def _error_text(self, response: httpx.Response, content: bytearray) -> str:
        """The server's error message, without the API key, which some servers repeat."""
        if response.is_redirect:
            return self._hidden(f"redirected to {response.headers.get('Location')}; set endpoint to that address")
        try:
            data = parse_json(bytes(content))
        except ValueError:
            data = content.decode(errors="replace")
        if isinstance(data, dict):
            error = data.get("error") or data
            data = (
                error if isinstance(error, str) else next((error[n] for n in ("message", "detail") if n in error), data)
            )
        text = data if isinstance(data, str) else shown_json(data)
        return self._hidden(" ".join(text.split()))[:SHOWN]

    def _hidden(self, message: str) -> str:
        """The message without the API key, plain or URL-quoted, and valid as UTF-8."""
        for key in (self.key, quote(self.key, safe="")) if self.key else ():
            message = message.replace(key, "<API key>")
        return message.encode(errors="replace").decode()

    def _names(self) -> str:
        names = sorted(self.models)
        return ", ".join(f'"{name}"' for name in names[:20]) + (" and others" if len(names) > 20 else "")

    def _refusal(self, fault: _Rejected) -> str:
        advice = {
            401: "the API key is missing or wrong; api_key_env names the environment variable that holds it",
            402: "the account has no credit left",
            403: "the API key may not use this model",
            404: 'unknown model or address; endpoint is the base URL, which usually ends in "/v1"',
        }.get(fault.status, "every conversation would fail: check the parameters, including extra_body")
        served = f"; it serves {self._names()}" if self.models and fault.status == 404 else ""
        if self.proxy:
            return (
                f"{self.config.endpoint} or the proxy {self.proxy} rejects requests: {fault.status}: {fault.message}\n"
                f"if it is the proxy: {self._past_proxy()}; if it is the server: {advice}{served}"
            )
        return f"{self.config.endpoint} rejects requests: {fault.status}: {fault.message}\n{advice}{served}"

    def _past_proxy(self) -> str:
        host = urlsplit(str(self.config.endpoint)).hostname
        return f"let it reach {host}, or add {host} to the environment variable no_proxy"

    def _down(self, why: str) -> str:
        if self.proxy:
            return (
                f"no answer of {self.config.endpoint} through the proxy {self.proxy}: {why}\nall answers so far are "
                f"kept; {self._past_proxy()}, and check that the server runs, then resume"
            )
        return (
            f"{self.config.endpoint} does not answer: {why}\nall answers so far are kept; check that the server runs "
            "and can be reached from here, then resume (retries, backoff_s and timeout_s decide how long to wait)"
        )


def retry_after_s(header: str | None, now: datetime | None = None) -> float:
    """The delay of a Retry-After header in seconds; the header has seconds or a date. 0 without a readable one."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        pass
    else:
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    try:
        when = email.utils.parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())


def _served_models(data: Any) -> dict[str, str]:
    """The owner of each model, by its name, in an answer to GET models; empty if a gateway answers otherwise."""
    try:
        return {str(model["id"]): str(model.get("owned_by", "")) for model in data["data"]}
    except (KeyError, TypeError, AttributeError):
        return {}


CHAT = "chat/completions"
# Otherwise the text may lack special tokens and thoughts, which the token ids contain.
DIALECTS: dict[str, dict[str, Any]] = {
    "openai": {},
    "sglang": {
        "skip_special_tokens": False,
        "separate_reasoning": False,
        "return_token_ids": True,
    },
    "vllm": {"skip_special_tokens": False, "return_token_ids": True},
}
REASONING = "reasoning_content"  # the key of a message; vLLM's is "reasoning"
CALLED = ("tool_calls", "function_call")  # of answers that end with calls
FINAL = ("stop", "length", "content_filter", *CALLED)  # anything else, such as "abort", is not an answer
ID_LIMIT = 2**31  # tokenizers use ids of 32 bits


@frozen
class Reply:
    """A server's answer. token_ids: None if not reported. prompt_ids, prompt_tokens: the prompt as the
    server read it. called: whether its parser found calls; calls: as in samples, None if they are no JSON objects.
    """

    text: str
    thought: str
    finish_reason: str
    tokens: int | None
    token_ids: list[int] | None
    prompt_tokens: int | None
    prompt_ids: list[int] | None
    called: bool = False
    calls: list[dict[str, Any]] | None = None

    def full_text(self, prompt_opens_thought: bool) -> str:
        """All text after the generation prompt. A thought that a server's reasoning parser removed is put back.

        It is restored, with white space, as the families' templates write it.
        """
        if not self.thought:
            return self.text
        thought = self.thought if prompt_opens_thought else f"{THINK}\n{self.thought}"
        return f"{thought}\n{END_OF_THOUGHT}\n\n{self.text}" if self.text or self.called else thought


def parameters(config: RegenerateAnswers, sampling: Sampling, dialect: str) -> dict[str, Any]:
    """The parameters that all requests to the server share."""
    renders = config.enable_thinking is not None and config.prompts == "messages"
    # Otherwise a checkpoint's generation_config.json sets what a request omits, even a repetition penalty with greedy
    # decoding.
    drawn = {"top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": 1.0}
    return {
        "model": config.model,
        "max_tokens": config.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **({} if dialect == "openai" else drawn),
        **DIALECTS[dialect],
        **({ARGUMENTS: {"enable_thinking": config.enable_thinking}} if renders else {}),
        **(config.extra_body or {}),
    }


def prompt_by_ids(ids: Sequence[int], dialect: str) -> tuple[str, dict[str, Any]]:
    """The path of a request for an answer to a prompt of these tokens, and the keys with them.

    SGLang renders nothing where a chat has `input_ids`, though it wants a message; vLLM's chat has no ids.
    """
    if dialect == "sglang":
        return CHAT, {"messages": [{"role": "user", "content": ""}], "input_ids": list(ids)}
    return "completions", {"prompt": list(ids)}


def request_seed(seed: int, key: Key) -> int:
    """A seed of 31 bits for one answer, depending only on the arguments."""
    sample_id, turn = key
    return int.from_bytes(hashlib.sha256(f"{seed}\0{turn}\0{sample_id}".encode()).digest()[:4], "big") >> 1


def wire_messages(messages: Messages, images: Sequence[bytes]) -> list[dict[str, Any]]:
    """The messages with their images, in order, as data URLs.

    A message without images is a single text, which every server accepts, and none joins with blanks. The arguments of
    calls are JSON texts, and reasoning has the key of the protocol.
    """
    encoded = iter(images)
    return [
        {"role": message["role"], "content": _content(message, encoded), **_of_tools(message)} for message in messages
    ]


def _with_own_keys(messages: list[dict[str, Any]], dialect: str) -> list[dict[str, Any]]:
    """The messages, with the dialect's key of reasoning."""
    if dialect != "vllm":
        return messages
    return [{"reasoning" if key == REASONING else key: each for key, each in one.items()} for one in messages]


def _of_tools(message: Mapping[str, Any]) -> dict[str, Any]:
    """The calls, the id and name of a result, and the reasoning of a message."""
    more = {key: message[key] for key in ("tool_call_id", "name") if key in message}
    thought = next((message[key] for key in KEYS if key in message), None)
    if thought is not None:
        more[REASONING] = thought
    if "tool_calls" in message:
        more["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in message["tool_calls"]
        ]
    return more


def _arguments(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _content(message: Mapping[str, Any], images: Iterator[bytes]) -> str | list[dict[str, Any]] | None:
    """The content of a message; null beside calls without a text, of which vLLM would give some templates a part."""
    if all(part["type"] == "text" for part in message["content"]):
        text = "".join(texts_of(dict(message)))
        return None if not text and "tool_calls" in message else text
    return [
        {"type": "image_url", "image_url": {"url": data_url(next(images))}}
        if part["type"] == "image"
        else {"type": "text", "text": part["text"]}
        for part in message["content"]
    ]


def data_url(encoded: bytes) -> str:
    """The data URL of an image; its bytes are unchanged if engines decode them to the same pixels as dflow.

    Otherwise it is a PNG of dflow's pixels: for EXIF rotation, for 16-bit grey, which Pillow clips, and for formats
    that engines may not know.
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
    """Parse the answer in a response. Raises ValueError for a missing or incomplete answer, and for
    malformed fields.
    """
    try:
        choice, usage = data["choices"][0], data.get("usage") or {}
        message, finish_reason = choice.get("message"), choice["finish_reason"]
        message = {"content": choice["text"]} if message is None else message  # the completions have no message
        text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        called = message.get("tool_calls")
        ids = [choice.get("response_token_ids"), choice.get("token_ids")]
        prompt_ids = [choice.get("prompt_token_ids"), data.get("prompt_token_ids")]
        counts = usage.get("completion_tokens"), usage.get("prompt_tokens")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a chat completion: {shown_json(data)}") from error
    if finish_reason not in FINAL:
        raise ValueError(f"aborted by the server: finish_reason {finish_reason!r:.100}")
    calls = _calls(called or [])
    full_text = _text("content", text) + _text("reasoning_content", thought) + str(called or "")
    token_ids = _first("token_ids", ids, range(ID_LIMIT))
    return Reply(
        text=text or "",
        thought=thought or "",
        finish_reason=finish_reason,
        tokens=_count("completion_tokens", counts[0]),
        token_ids=None if full_text and not token_ids else token_ids,  # no ids of a non-empty answer: not reported
        prompt_tokens=_count("prompt_tokens", counts[1]),
        prompt_ids=_first("prompt_token_ids", prompt_ids, None) or None,
        called=bool(called),
        calls=calls,
    )


def _calls(called: Any) -> list[dict[str, Any]] | None:
    """The calls of an answer as in samples, the id "" where none is given; None if arguments are no JSON objects.

    Raises ValueError for anything but calls of functions.
    """
    try:
        functions = [call["function"] for call in called]
        names = [_text("name of a call", function["name"]) for function in functions]
        ids = [_text("id of a call", call.get("id")) for call in called]
        given = [function.get("arguments") or "{}" for function in functions]
    except (KeyError, TypeError, AttributeError) as error:
        raise _malformed("tool_calls", "a list of calls", called) from error
    try:
        arguments = [each if isinstance(each, dict) else parse_json(each) for each in given]
    except (TypeError, ValueError):
        return None
    if not names or not all(isinstance(each, dict) for each in arguments):
        return None
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": each}}
        for call_id, name, each in zip(ids, names, arguments, strict=True)
    ]


def _text(name: str, value: object) -> str:
    """A field's text, "" for null. Raises ValueError for anything else."""
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
    """The first reported list of ids, checked to be in `known`; None allows any, as engines put own values into
    prompts.
    """
    ids = next((value for value in values if value is not None), None)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(one) is int and (known is None or one in known) for one in ids):
        raise _malformed(name, "a list of token ids", ids)
    return ids


def _malformed(name: str, wanted: str, found: object) -> ValueError:
    shown = shown_json(found).encode("ascii", "backslashreplace").decode()
    return ValueError(f"a malformed answer: {name} is not {wanted}: {shown}")
