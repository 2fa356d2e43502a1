"""A live server under load: the same prompts at several concurrencies, and what each request took.

Requests are closed-loop: `concurrency` of them are always in flight, and the next one starts when one has ended. Before
anything counts, every prompt is sent once, so that it is in the server's prefix cache at every concurrency, and before
each concurrency as many requests as are in flight. All answers are greedy.

N requests, R resamplings
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from attrs import frozen

from dsl.errors import ServerError
from ops.evaluate.intervals import interval, resampled
from ops.evaluate.load import LoadPoint, load_curve
from ops.tools.serve.chat import Answer, ChatPrompt, Dialect, ask, ask_streamed

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
FEWEST_REQUESTS, ROUNDS = 16, 4  # of a concurrency: at least, and for each request in flight
RESAMPLINGS, SEED = 2000, 0
SPEEDUP = ("speedup", "speedup_low", "speedup_high")  # of a level


@frozen(kw_only=True)
class LoadSettings:
    """How a server is measured. max_tokens: of an answer. stream: measure the time to the first token."""

    concurrencies: Sequence[int] = CONCURRENCIES
    max_tokens: int = 128
    stream: bool = False

    def requests(self, concurrency: int) -> int:
        """The number of measured requests at a concurrency."""
        return max(FEWEST_REQUESTS, ROUNDS * concurrency)


@frozen(kw_only=True)
class Endpoint:
    """A server: its address without /v1, and its API key."""

    url: str
    dialect: Dialect
    key: str = ""


@frozen
class Request:
    """A measured request: wall-clock seconds, those to the first token if it was streamed, and the answer or why there
    is none.
    """

    seconds: float
    first_token: float | None
    answer: Answer | None
    error: str = ""

    @property
    def tokens(self) -> int:
        return 0 if self.answer is None else self.answer.tokens


@frozen
class Level:
    """The requests of one concurrency in the order of their start, and the wall-clock seconds of all."""

    concurrency: int
    requests: Sequence[Request]
    seconds: float

    @property
    def answered(self) -> list[Request]:
        return [request for request in self.requests if request.answer is not None]

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all answers, first ones included, by the seconds of all requests."""
        return sum(request.tokens for request in self.requests) / self.seconds

    def rates(self, draws_RN: np.ndarray) -> np.ndarray:
        """Tokens per second of resampled requests, [R], scaled to `tokens_per_second`.

        In a closed loop the time of all requests is proportional to the sum of their own.
        """
        tokens_N = np.array([request.tokens for request in self.requests], dtype=np.float64)
        seconds_N = np.array([request.seconds for request in self.requests])
        whole = tokens_N.sum() / seconds_N.sum()
        rates_R: np.ndarray = tokens_N[draws_RN].sum(1) / seconds_N[draws_RN].sum(1) / whole * self.tokens_per_second
        return rates_R

    def to_json(self) -> dict[str, Any]:
        """The figures of a concurrency; without an answer those of speed are None."""
        answers = [request.answer for request in self.requests if request.answer is not None]
        errors = [request.error for request in self.requests if request.answer is None]
        steps = sum(answer.steps for answer in answers)
        found: dict[str, Any] = {
            "concurrency": self.concurrency,
            "requests": len(self.requests),
            "errors": len(errors),
            "first_error": errors[0] if errors else None,
            "tokens": sum(answer.tokens for answer in answers),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second if answers else None,
            "low": None,
            "high": None,
            "latency": spread([request.seconds for request in self.answered]),
            "first_token": spread([each.first_token for each in self.answered if each.first_token is not None]),
            "tau": sum(answer.tokens - 1 for answer in answers) / steps if steps else None,
        }
        if answers:
            rates_R = self.rates(resampled(len(self.requests), RESAMPLINGS, SEED))
            found["low"], found["high"] = interval(self.tokens_per_second, rates_R, len(self.requests))
        return found


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """The median and the 95th percentile of some seconds; None without any."""
    if not seconds:
        return None
    median, p95 = np.percentile(seconds, (50, 95))
    return {"median": float(median), "p95": float(p95)}


def measure(
    endpoint: Endpoint,
    prompts: Sequence[ChatPrompt],
    settings: LoadSettings,
    plain: Endpoint | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure a server at each concurrency, and a server without the draft beside it, if there is one.

    show: called with a line for each concurrency. A level's "plain" holds the figures of the other server, and
    "speedup", "speedup_low" and "speedup_high" the ratio, whose interval resamples the same requests of both. Failed
    requests are counted. Raises ServerError if no request of the warm-up is answered.
    """
    for each in (endpoint, plain):
        if each is not None:
            _warm_up(each, prompts, max(settings.concurrencies), settings)
    return list(_levels(endpoint, prompts, settings, plain, show))


def _levels(
    endpoint: Endpoint,
    prompts: Sequence[ChatPrompt],
    settings: LoadSettings,
    plain: Endpoint | None,
    show: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    for concurrency in settings.concurrencies:
        level = _level(endpoint, prompts, concurrency, settings)
        found = level.to_json()
        if plain is not None:
            other = _level(plain, prompts, concurrency, settings)
            found |= {"plain": other.to_json(), **speedup(level, other)}
        show(level_line(found))
        yield found


def _warm_up(endpoint: Endpoint, prompts: Sequence[ChatPrompt], concurrency: int, settings: LoadSettings) -> None:
    failed = [each.error for each in _send(endpoint, prompts, concurrency, settings) if each.answer is None]
    if len(failed) == len(prompts):
        raise ServerError(
            f"{endpoint.url}: none of the {len(prompts)} prompts of the warm-up was answered: {failed[0]}"
        )


def _level(endpoint: Endpoint, prompts: Sequence[ChatPrompt], concurrency: int, settings: LoadSettings) -> Level:
    def cycled(count: int) -> list[ChatPrompt]:
        return [prompts[place % len(prompts)] for place in range(count)]

    _send(endpoint, cycled(concurrency), concurrency, settings)
    started = time.perf_counter()
    requests = _send(endpoint, cycled(settings.requests(concurrency)), concurrency, settings)
    return Level(concurrency, requests, time.perf_counter() - started)


def _send(endpoint: Endpoint, prompts: Sequence[ChatPrompt], concurrency: int, settings: LoadSettings) -> list[Request]:
    """Send prompts, `concurrency` at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: _request(endpoint, prompt, settings), prompts))


def _request(endpoint: Endpoint, prompt: ChatPrompt, settings: LoadSettings) -> Request:
    first = None
    started = time.perf_counter()
    try:
        arguments = (endpoint.url, prompt.messages, settings.max_tokens, endpoint.key, endpoint.dialect)
        if settings.stream:
            answer, first_at = ask_streamed(*arguments)
            first = None if first_at is None else first_at - started
        else:
            answer = ask(*arguments)
    except ServerError as error:
        return Request(time.perf_counter() - started, None, None, str(error))
    return Request(time.perf_counter() - started, first, answer)


def speedup(level: Level, plain: Level) -> dict[str, float | None]:
    """How many times as fast a server is as a plain one, with an interval; None where a request of either failed, since
    the other one then had more to do.
    """
    count = len(level.requests)
    if min(len(level.answered), len(plain.answered)) < count:
        return dict.fromkeys(SPEEDUP)
    ratio = level.tokens_per_second / plain.tokens_per_second
    draws_RN = resampled(count, RESAMPLINGS, SEED)
    low, high = interval(ratio, level.rates(draws_RN) / plain.rates(draws_RN), count)
    return {"speedup": ratio, "speedup_low": max(0.0, low), "speedup_high": high}


def break_even(levels: Sequence[Mapping[str, Any]], block_size: int) -> dict[str, int | None] | None:
    """From where on the draft costs, by levels with a plain server's figures; None where one has no speed-up.

    block_size: verified tokens. pays_up_to: the largest concurrency up to which the speed-up's interval lies above 1 at
    every measured one; costs_from: the smallest from which on it lies below. Each is None for none.
    """
    if any(level["speedup"] is None for level in levels):
        return None
    curve = load_curve(
        [
            LoadPoint(
                batch_size=level["concurrency"],
                block_size=block_size,
                plain_tokens_per_second=level["plain"]["tokens_per_second"],
                **{name: level[name] for name in ("tau", "tokens_per_second", *SPEEDUP)},
            )
            for level in levels
        ]
    )
    return {name: curve[name] for name in ("pays_up_to", "costs_from")}


def break_even_text(found: Mapping[str, int | None]) -> str:
    """What `break_even` found, as a line for the terminal."""
    if found["pays_up_to"] is None:
        text = "at no measured concurrency is it certain that the draft pays"
    else:
        text = f"the draft pays up to concurrency {found['pays_up_to']}"
    return text if found["costs_from"] is None else f"{text}; from {found['costs_from']} on it costs"


def level_line(level: Mapping[str, Any]) -> str:
    """The figures of a concurrency as a line for the terminal."""
    if level["tokens_per_second"] is None:
        return f"concurrency {level['concurrency']}: no answer to {level['requests']} requests: {level['first_error']}"
    parts = [f"{level['tokens_per_second']:,.0f} tokens/s ({level['low']:,.0f} to {level['high']:,.0f})"]
    if level.get("speedup") is not None:
        bounds = f"{level['speedup_low']:.2f} to {level['speedup_high']:.2f}"
        parts.append(f"{level['speedup']:.2f} times as fast as without the draft ({bounds})")
    if level["tau"] is not None:
        parts.append(f"tau {level['tau']:.2f}")
    if level["first_token"] is not None:
        parts.append(f"first token after {level['first_token']['median']:.3f} s")
    parts.append(f"answer after {level['latency']['median']:.3f} s")
    if level["errors"]:
        parts.append(f"{level['errors']} of {level['requests']} requests failed: {level['first_error']}")
    return f"concurrency {level['concurrency']}: {', '.join(parts)}"
