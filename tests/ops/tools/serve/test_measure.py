"""A server under load, measured by real requests to a stand-in whose answers take a known time.

Bounds of times are those that the delays dictate, and none that a busy machine breaks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from chat_server import ChatServer, Fault, response

from dsl.errors import ServerError
from ops.tools.serve.chat import SGLANG, VLLM, ChatPrompt, ask_streamed
from ops.tools.serve.measure import FEWEST_REQUESTS, Endpoint, LoadSettings, level_line, measure

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
    lines: list[str] = []
    with server(key="secret") as one:
        settings = LoadSettings(concurrencies=(1,), max_tokens=7)
        [single] = measure(endpoint(one, key="secret"), PROMPTS[:1], settings)
        assert 1 == one.most
    with server() as four:
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
    assert several["tokens_per_second"] > single["tokens_per_second"]
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
    with server(delay=0.02) as fast, server(delay=0.2) as slow:
        [level] = measure(endpoint(fast), PROMPTS, LoadSettings(concurrencies=(8,)), endpoint(slow))
    assert len(fast.conversations) == len(slow.conversations)
    assert level["speedup"] == pytest.approx(level["tokens_per_second"] / level["plain"]["tokens_per_second"])
    assert 1 < level["speedup_low"] <= level["speedup"] <= level["speedup_high"]
    assert "times as fast as without the draft" in level_line(level)
