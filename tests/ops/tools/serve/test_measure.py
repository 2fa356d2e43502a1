"""A server under load: real requests to a stand-in, and the arithmetic of speeds on requests of known seconds.

A measured time has only the lower bound that the delays dictate: any process of the machine may stand still.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, Fault, response
from toy_ops import wait_for

from dsl.errors import ServerError
from ops.tools.serve.chat import SGLANG, VLLM, Answer, ChatPrompt, ask_streamed
from ops.tools.serve.measure import (
    FEWEST_REQUESTS,
    Endpoint,
    Level,
    LoadSettings,
    Request,
    break_even,
    break_even_text,
    level_line,
    measure,
    speedup,
)

DELAY, TOKENS, STEPS = 0.05, 9, 2
PROMPTS = [ChatPrompt(name, [{"role": "user", "content": f"Tell me of {name}"}]) for name in ("a", "b", "c")]


def answered(body: dict[str, Any]) -> dict[str, Any]:
    meta = {"spec_verify_ct": STEPS, "spec_accept_length": 4.5}
    return response("It is blue.", usage={"completion_tokens": TOKENS}, meta_info=meta)


def streamed(body: dict[str, Any]) -> list[dict[str, Any]]:
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    words = [{"choices": [{"delta": {"content": word}}]} for word in ("It ", "is ", "blue.")]
    return [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, *words, usage()]


def usage(**more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": TOKENS}, **more}


def server(answer: Any = answered, delay: float = DELAY, **more: Any) -> ChatServer:
    return ChatServer(answer, delay=lambda body: delay, **more)


def endpoint(of: ChatServer, **more: Any) -> Endpoint:
    return Endpoint(url=of.url.removesuffix("/v1"), dialect=SGLANG, **more)


def test_each_concurrency_has_as_many_requests_in_flight_and_the_speed_that_the_delay_allows():
    def until_four_are_there(body: dict[str, Any]) -> float:
        if len(four.conversations) > len(PROMPTS):  # after the warm-up, which sends each prompt once
            wait_for(lambda: four.most >= 4)
        return DELAY

    lines: list[str] = []
    with server(key="secret") as one:
        settings = LoadSettings(concurrencies=(1,), max_tokens=7)
        [single] = measure(endpoint(one, key="secret"), PROMPTS[:1], settings)
        assert 1 == one.most
    with ChatServer(answered, delay=until_four_are_there) as four:
        [several] = measure(endpoint(four), PROMPTS, LoadSettings(concurrencies=(4,), max_tokens=7), show=lines.append)
        assert 4 == four.most
        bodies = four.conversations
    assert len(PROMPTS) + 4 + FEWEST_REQUESTS == len(bodies)
    assert {(7, 0, True)} == {(body["max_tokens"], body["temperature"], body["return_meta_info"]) for body in bodies}
    texts = Counter(body["messages"][0]["content"] for body in bodies)
    assert {"Tell me of a", "Tell me of b", "Tell me of c"} == set(texts)
    assert max(texts.values()) - min(texts.values()) <= 2
    for level, concurrency in ((single, 1), (several, 4)):
        assert (concurrency, FEWEST_REQUESTS, 0) == tuple(level[name] for name in ("concurrency", "requests", "errors"))
        assert TOKENS * FEWEST_REQUESTS == level["tokens"]
        assert level["seconds"] >= FEWEST_REQUESTS * DELAY / concurrency
        assert level["tokens_per_second"] == pytest.approx(level["tokens"] / level["seconds"])
        assert level["tokens_per_second"] <= concurrency * TOKENS / DELAY
        assert level["low"] <= level["tokens_per_second"] <= level["high"]
        assert DELAY <= level["latency"]["median"] <= level["latency"]["p95"]
        assert (TOKENS - 1) / STEPS == level["tau"]
        assert level["first_token"] is None
    assert [level_line(several)] == lines
    assert "tau 4.00" in lines[0]


def test_more_requests_than_the_fewest_are_sent_at_a_high_concurrency():
    assert [16, 16, 256] == [LoadSettings().requests(concurrency) for concurrency in (1, 4, 64)]


def test_streamed_answers_have_a_time_to_the_first_token_before_their_end():
    with server(streamed, pause=0.02) as live:
        [level] = measure(endpoint(live), PROMPTS, LoadSettings(concurrencies=(2,), stream=True))
    assert DELAY <= level["first_token"]["median"]
    assert level["first_token"]["median"] + 3 * 0.02 <= level["latency"]["p95"]
    assert (TOKENS * FEWEST_REQUESTS, None) == (level["tokens"], level["tau"])


def test_a_streamed_answer_is_put_together_and_has_the_measurements_that_the_server_tells():
    metrics = {"speculative_decoding": {"num_spec_steps": 4, "mean_acceptance_length": 2.5}}
    with server(lambda body: [*streamed(body), usage(metrics=metrics)], delay=0) as live:
        answer, first = ask_streamed(live.url.removesuffix("/v1"), PROMPTS[0].messages, 8, "", VLLM)
    assert ("It is blue.", TOKENS, 4, 2.5) == (answer.text, answer.tokens, answer.steps, answer.accept_length)
    assert first is not None
    broken = {"error": {"message": "out of memory"}}
    with (
        server(lambda body: [*streamed(body)[:2], broken], delay=0) as live,
        pytest.raises(ServerError, match=r"the stream has an error: .*out of memory"),
    ):
        ask_streamed(live.url.removesuffix("/v1"), PROMPTS[0].messages, 8)


def test_failed_requests_are_counted_and_leave_the_others_their_figures():
    def fault(body: dict[str, Any], attempt: int) -> Fault | None:
        return Fault(503, "too busy") if "of b" in body["messages"][0]["content"] and attempt >= 2 else None

    with server(delay=0, fault=fault) as live, server(delay=0) as plain:
        [level] = measure(endpoint(live), PROMPTS, LoadSettings(concurrencies=(2,)), endpoint(plain))
    assert 5 == level["errors"]  # of the sixteen requests, those for the second of three prompts
    assert "503" in level["first_error"] and "too busy" in level["first_error"]
    assert TOKENS * (FEWEST_REQUESTS - 5) == level["tokens"]
    assert None is level["speedup"] is level["speedup_low"]
    assert "5 of 16 requests failed" in level_line(level)


def test_a_server_that_answers_nothing_is_refused_after_the_warm_up():
    with (
        server(fault=lambda body, attempt: Fault(500, "no model")) as live,
        pytest.raises(ServerError, match=r"none of the 3 prompts of the warm-up was answered: .*no model"),
    ):
        measure(endpoint(live), PROMPTS, LoadSettings(concurrencies=(1,)))


def test_a_server_is_compared_with_one_without_the_draft():
    with server(delay=0) as drafted, server(delay=0) as plain:
        [level] = measure(endpoint(drafted), PROMPTS, LoadSettings(concurrencies=(8,)), endpoint(plain))
    texts = [Counter(body["messages"][0]["content"] for body in each.conversations) for each in (drafted, plain)]
    assert texts[0] == texts[1]
    assert len(PROMPTS) + 8 + LoadSettings().requests(8) == texts[0].total()
    assert level["speedup"] == pytest.approx(level["tokens_per_second"] / level["plain"]["tokens_per_second"])
    assert level["speedup_low"] <= level["speedup"] <= level["speedup_high"]
    assert "times as fast as without the draft" in level_line(level)


def level_of(seconds: list[float], tokens: int = 10, concurrency: int = 1) -> Level:
    """A level whose requests took these seconds, with as many always in flight, and have answers of this length."""
    answer = Answer("", tokens, 0, None)
    return Level(concurrency, [Request(each, None, answer) for each in seconds], sum(seconds) / concurrency)


# Of 2 requests, 97.5 % of Student's t with one degree of freedom, 12.706, by the normal distribution's, times sqrt(2).
WIDER = 12.7062 / 1.960 * 2**0.5


def test_the_speed_of_a_level_is_that_of_all_requests_together_and_its_interval_resamples_them():
    level = level_of([1.0, 3.0], concurrency=2)
    assert 20 / 2.0 == level.tokens_per_second
    # Resampled requests take 2, 4 and 6 s, of which two are in flight.
    rates_R = level.rates(np.array([[0, 0], [0, 1], [1, 1]]))
    assert [20 / 1, 20 / 2, 20 / 3] == pytest.approx(rates_R)
    found = level.to_json()
    # A quarter of all resamplings draws the first request twice, a quarter the second one.
    assert [10 - WIDER * (10 - 20 / 3), 10 + WIDER * (20 - 10)] == pytest.approx(
        [found["low"], found["high"]], rel=1e-4
    )
    assert {"median": 2.0, "p95": 2.9} == found["latency"]


def test_the_speedup_is_the_ratio_of_speeds_and_its_interval_draws_the_same_requests_of_both():
    seconds = [0.1, 0.4, 0.2, 0.9, 0.3, 0.5, 0.2, 0.8]
    fast, slow = level_of(seconds), level_of([10 * each for each in seconds])
    found = speedup(fast, slow)
    assert [10.0, 10.0, 10.0] == pytest.approx([found[name] for name in ("speedup", "speedup_low", "speedup_high")])
    assert "10.00 times as fast as without the draft (10.00 to 10.00)" in level_line({**fast.to_json(), **found})
    # Resampled, one takes 2, 4 or 6 s, the other 4 s in any case: the ratio is 2, 1 or 2/3.
    found = speedup(level_of([1.0, 3.0]), level_of([2.0, 2.0]))
    assert 1.0 == found["speedup"]
    assert 0.0 == found["speedup_low"], "1 - WIDER / 3 is below 0, which no speed is"
    assert 1.0 + WIDER * (2 - 1) == pytest.approx(found["speedup_high"], rel=1e-4)
    # Longer answers in the same time are faster by as much.
    assert 3.0 == pytest.approx(speedup(level_of(seconds, tokens=30), level_of(seconds))["speedup"])


def compared_level(concurrency: int, low: float | None, high: float | None) -> dict[str, Any]:
    """A level whose speed-up has this interval; without one a request failed."""
    bounds = {"speedup": None if low is None else (low + high) / 2, "speedup_low": low, "speedup_high": high}
    return {
        "concurrency": concurrency,
        "tau": 2.0,
        "tokens_per_second": 9.0,
        "plain": {"tokens_per_second": 6.0},
        **bounds,
    }


def test_the_draft_pays_up_to_the_concurrency_whose_interval_is_above_1_and_costs_from_where_it_stays_below():
    levels = [compared_level(*level) for level in ((1, 1.5, 2.5), (4, 1.1, 1.3), (8, 0.9, 1.2), (16, 0.7, 0.9))]
    found = break_even(levels, 8)
    assert {"pays_up_to": 4, "costs_from": 16} == found
    assert "the draft pays up to concurrency 4; from 16 on it costs" == break_even_text(found)
    uncertain = break_even(levels[2:3], 8)
    assert {"pays_up_to": None, "costs_from": None} == uncertain
    assert "at no measured concurrency is it certain that the draft pays" == break_even_text(uncertain)
    assert None is break_even([*levels, compared_level(32, None, None)], 8)
