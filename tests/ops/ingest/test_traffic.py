"""Traffic of servers: batches of OpenAI, logs of requests and responses, SGLang's log. Nothing but texts is written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fake_stage import FakeStage
from format_reading import read

from dsl.errors import DataError
from ops.ingest.op import Ingest
from ops.ingest.plan import missing_here
from ops.ingest.run import ingest
from ops.ingest.sample import IMAGE, RawSample, Turn, opening_of
from ops.ingest.traffic import (
    CUT,
    FAILED,
    FILTERED,
    LOG_CUT,
    NO_MESSAGES,
    NO_RESPONSE,
    NOT_KNOWN,
    PREFILLED,
    REFUSED,
    RESPONSE_ALONE,
    SEVERAL,
    STREAMED,
    WITH_IMAGES,
    WITH_TOOLS,
)

SECRET = "sk-proj-4711"
USER = "alice@example.com"
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello world!"}]
BODY = {"model": "gpt-4.1-mini", "messages": MESSAGES, "max_tokens": 1000, "user": USER, "metadata": {"key": SECRET}}
ASKED = [("system", "You are a helpful assistant."), ("user", "Hello world!")]


def completion(text: str | None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """A response of OpenAI's chat completions, as its documentation shows one."""
    said = {"role": "assistant", "content": text, "refusal": None, **message}
    return {
        "id": "chatcmpl-123",
        "object": "chat.completion",
        "created": 1711652795,
        "model": "gpt-4.1-mini",
        "choices": [{"index": 0, "message": said, "logprobs": None, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 22, "completion_tokens": 2, "total_tokens": 24},
        "system_fingerprint": "fp_123",
    }


def asking(name: str, **body: Any) -> dict[str, Any]:
    """A line of a batch's input."""
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": BODY | body}


def answering(name: str, body: Any = None, status: int = 200, error: Any = None) -> dict[str, Any]:
    """A line of a batch's output."""
    response = None if body is None else {"status_code": status, "request_id": f"req-{SECRET}", "body": body}
    return {"id": "batch_req_123", "custom_id": name, "response": response, "error": error}


def logged(prompt: Any, text: Any, ending: str = "stop", **asked: Any) -> dict[str, Any]:
    """A line of SGLang's log for a request that ended."""
    about = {"id": "8a1f", "finish_reason": {"type": ending}, "prompt_tokens": 9, "e2e_latency": 0.3}
    return {
        "timestamp": "2026-03-02T10:11:12.345678",
        "event": "request.finished",
        "rid": "8a1f",
        "obj": {"rid": "8a1f", "text": prompt, "input_ids": [1, 2], "sampling_params": {}, "image_data": None, **asked},
        "out": {"text": text, "meta_info": about},
    }


DONE = answering("a", completion("x"))


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(turn["role"], "".join(part["text"] for part in turn["content"])) for turn in row["conversations"]]


def run(sources: list[Path], out: Path, **config: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows and the drops of sources, of which plan sees no mistake; no secret is in what is written."""
    made = Ingest(source=tuple(map(str, sources)), seed=0, **config)
    assert {} == missing_here(made)
    stage = FakeStage(out)
    ingest(made, stage)
    for file in out.rglob("*"):
        if file.is_file():
            text = file.read_text()
            assert SECRET not in text and USER not in text
    rows = [json.loads(line) for line in (stage.out_dir / "samples.jsonl").read_text().splitlines()]
    return rows, json.loads((stage.out_dir / "summary.json").read_text())["dropped"]


def test_a_batch_joins_its_output_to_its_input_in_any_order_and_place(tmp_path: Path) -> None:
    names = [f"{USER}-{place}" for place in range(1, 7)]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked = [asking(name) for name in names[:5]] + [asking(names[5], tools=tools)]
    answers = [
        answering(names[5], completion(None, "tool_calls", tool_calls=[call])),
        answering(names[1], completion("Hello.")),
        answering(names[0], completion("Hi there!")),
        answering(names[2], {"error": {"message": f"Incorrect API key provided: {SECRET}"}}, 401),
    ]
    expired = answering(names[3], error={"code": "batch_expired", "message": f"{USER}: too late"})
    input_, output = write(tmp_path / "in.jsonl", *asked), write(tmp_path / "out.jsonl", *answers)
    errors = write(tmp_path / "errors.jsonl", expired)
    for place, sources in enumerate(([output, errors, input_], [tmp_path])):
        rows, dropped = run(sources, tmp_path.parent / f"{tmp_path.name}-{place}")
        assert [[*ASKED, ("assistant", "Hi there!")], [*ASKED, ("assistant", "Hello.")]] == [*map(said, rows[:2])]
        assert ["weather"] == [each["function"]["name"] for each in rows[2]["conversations"][2]["tool_calls"]]
        assert tools == rows[2]["tools"]
        assert {FAILED: 2, NO_RESPONSE: 1} == dropped
    rows, dropped = run([input_], tmp_path.parent / f"{tmp_path.name}-prompts", require_answers=False)
    assert ([ASKED] * 6, {}) == ([*map(said, rows)], dropped)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"in": [asking("a")]}, "in.jsonl: the input of a batch, which has no answers: list the batch's output as a"),
        (
            {"out": [DONE]},
            "out.jsonl: a line of a batch's output, which has no prompt: list",
        ),
        (
            {"in": [{"custom_id": "a", "method": "POST"}], "out": [DONE]},
            'in.jsonl:1: no object "body": a line of a batch',
        ),
        ({"in": [{**asking("a"), "custom_id": 5}], "out": [DONE]}, 'in.jsonl:1: no string "custom_id", by which'),
    ],
)
def test_half_a_batch_and_a_first_line_of_another_form_are_named_by_plan(tmp_path, files, message) -> None:
    sources = [write(tmp_path / f"{name}.jsonl", *rows) for name, rows in files.items()]
    config = Ingest(source=tuple(map(str, sources)), seed=0)
    with pytest.raises(DataError) as error:
        ingest(config, FakeStage(tmp_path / "stage"))
    for found in (str(error.value), missing_here(config)["source"]):
        assert found.startswith(f"{tmp_path}/{message}")


def test_broken_lines_of_a_batch_are_named_by_their_places_and_not_by_their_values(tmp_path: Path) -> None:
    asked = write(tmp_path / "in.jsonl", asking("a"), {"custom_id": USER, "url": SECRET}, "{")
    answers = [answering(USER, completion("x")), {"response": SECRET}, answering(USER, completion("y")), "nothing"]
    output = write(tmp_path / "out.jsonl", *answers)
    with pytest.raises(DataError) as error:
        ingest(Ingest(source=(str(asked), str(output)), seed=0), FakeStage(tmp_path / "stage"))
    assert str(error.value).split("\n") == [
        f'{output}:2: no string "custom_id", by which a batch\'s output belongs to its input',
        f"{output}:3: the same custom_id as {output}:1; read batches that share custom_ids in nodes of their own",
        f"{output}:4: broken JSON at column 1: Expecting value",
        f'{asked}:2: no object "body": a line of a batch\'s input has "custom_id", "method", "url" and "body"',
        f"{asked}:3: broken JSON at column 2: Expecting property name enclosed in double quotes",
    ]


HEADERS = {"authorization": f"Bearer {SECRET}", "x-user": USER}
EXCHANGES = {
    "objects": {"time": 1, "headers": HEADERS, "request": BODY, "response": completion("Hi!")},
    "JSON": {"key": SECRET, "request": json.dumps(BODY), "response": json.dumps(completion("Hi!"))},
    "bodies": {
        "request": {"method": "POST", "url": "/v1/chat/completions", "headers": HEADERS, "body": BODY},
        "response": {"status": 200, "headers": HEADERS, "body": completion("Hi!")},
    },
    "bodies as JSON": {"request_body": json.dumps(BODY), "response_body": json.dumps(completion("Hi!")), "user": USER},
    "input and output": {"input": BODY, "output": completion("Hi!"), "tags": {"user": USER}},
    "in the request": {**BODY, "response": completion("Hi!"), "user_api_key_hash": SECRET, "id": USER},
    "a text": {**BODY, "response": "Hi!", "id": USER},
    "merged": {**BODY, **completion("Hi!"), "id": USER},
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_requests_with_their_responses_become_conversations_without_anything_else(tmp_path: Path, name: str) -> None:
    [row], dropped = run([write(tmp_path / "log.jsonl", EXCHANGES[name])], tmp_path / "out")
    assert ([*ASKED, ("assistant", "Hi!")], {}) == (said(row), dropped)
    assert {"id", "split", "category", "conversations", "images"} == row.keys()
    assert "1" == row["id"]


def test_reasoning_and_calls_of_a_response_are_kept_and_settings_counted(tmp_path: Path, capsys) -> None:
    settings = {"chat_template_kwargs": {"enable_thinking": True}}
    row = {"request": BODY | settings, "response": completion("Hi!", reasoning_content="Greet.", annotations=[])}
    [found], _ = run([write(tmp_path / "log.jsonl", row)], tmp_path / "out")
    assert "Greet." == found["conversations"][-1]["reasoning_content"]
    assert '1 samples have "chat_template_kwargs" of their own' in capsys.readouterr().out


def test_settings_that_change_the_prompt_are_counted_with_whether_the_requests_differ_in_them(tmp_path, capsys) -> None:
    settings = [
        {"reasoning_effort": "high", "chat_template": "{{ messages }}", "thinking": {"type": "enabled"}},
        {"reasoning_effort": "low", "chat_template": "{{ messages }}", "continue_final_message": True},
        {"reasoning_effort": None, "chat_template": "{{ messages }}", "continue_final_message": False},
        {"chat_template": "{{ messages }}", "add_generation_prompt": False, "output_config": {"effort": "low"}},
        {"chat_template": "{{ messages }}", "add_generation_prompt": True, "reasoning": {"effort": "high"}},
    ]
    rows = [{"request": BODY | each, "response": completion("Hi!")} for each in settings]
    found, dropped = run([write(tmp_path / "log.jsonl", *rows)], tmp_path / "out")
    assert ([[*ASKED, ("assistant", "Hi!")]] * 5, {}) == ([*map(said, found)], dropped)
    told = [
        line.partition(" samples have ")[::2] for line in capsys.readouterr().out.splitlines() if "of their" in line
    ]
    left_out = "of their own, which is left out: a server has one setting for all"
    assert sorted((count.split()[-1], what) for count, what in told) == [
        ("1", f'"add_generation_prompt" {left_out}; 4 samples have none'),
        ("1", f'"continue_final_message" {left_out}; 4 samples have none'),
        ("1", f'"output_config" {left_out}; 4 samples have none'),
        ("1", f'"reasoning" {left_out}; 4 samples have none'),
        ("1", f'"thinking" {left_out}; 4 samples have none'),
        ("2", f'"reasoning_effort" {left_out}; their values differ; 3 samples have none'),
        ("5", f'"chat_template" {left_out}'),
    ]


def offered(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLED = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "sunny"}]
NAMED = {"type": "function", "function": {"name": "time"}}
BOTH = [offered("weather"), offered("time")]


def from_sglang(text: str) -> dict[str, Any]:
    """A response as SGLang writes one, whose choices have the token that ended them."""
    response = completion(text)
    return response | {"choices": [response["choices"][0] | {"matched_stop": 151645}]}


@pytest.mark.parametrize(
    ("choice", "of_sglang", "of_others"),
    [
        ("none", None, (BOTH, True)),
        ({"type": "none"}, None, (BOTH, True)),
        (NAMED, BOTH[1:], (BOTH, True)),
        ({"type": "tool", "name": "time"}, BOTH[1:], (BOTH, True)),
        ("auto", BOTH, (BOTH, False)),
        ("required", BOTH, (BOTH, False)),
        (None, BOTH, (BOTH, False)),
    ],
)
def test_sglang_shows_the_tools_that_the_choice_leaves_and_others_all(
    tmp_path: Path, capsys, choice, of_sglang, of_others
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([offered("default")]))
    for messages in (MESSAGES, CALLED):
        asked = {**BODY, "messages": messages, "tools": BOTH, "tool_choice": choice}
        for response, tools, is_told in ((from_sglang("Hi!"), of_sglang, False), (completion("Hi!"), *of_others)):
            source = write(tmp_path / "log.jsonl", {"request": asked, "response": response})
            [row], dropped = run([source], tmp_path / "out", default_tools=str(tmp_path / "tools.json"))
            assert (tools, {}) == (row.get("tools"), dropped)
            assert "Hi!" == said(row)[-1][1]
            assert is_told == ('1 samples have a "tool_choice" of "none" or of one' in capsys.readouterr().out)


BEGUN = {"role": "assistant", "content": "Sure, "}


@pytest.mark.parametrize(
    "row",
    [
        {"request": {**BODY, "messages": [*MESSAGES, BEGUN]}, "response": completion("here.")},
        {
            "request": {**BODY, "messages": [*MESSAGES, BEGUN], "continue_final_message": True},
            "response": completion("here.", "length"),
        },
        {**BODY, "messages": [*MESSAGES, BEGUN], "continue_final_message": True, "response": completion("here.")},
        {
            "request": {"system": MESSAGES[0]["content"], "messages": [MESSAGES[1], BEGUN]},
            "response": {"type": "message", "stop_reason": "end_turn", "content": [{"type": "text", "text": "here."}]},
        },
    ],
)
def test_a_request_that_ends_with_the_beginning_of_its_answer_is_a_prompt_only(tmp_path: Path, row) -> None:
    good = {"request": BODY, "response": completion("Hi!")}
    source = write(tmp_path / "log.jsonl", good, row)
    is_cut = "length" in json.dumps(row)
    rows, dropped = run([source], tmp_path / "out")
    assert ([[*ASKED, ("assistant", "Hi!")]], {CUT if is_cut else PREFILLED: 1}) == ([*map(said, rows)], dropped)
    rows, dropped = run([source], tmp_path / "prompts", require_answers=False)
    assert ([[*ASKED, ("assistant", "Hi!")], ASKED], {}) == ([*map(said, rows)], dropped)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"request": BODY, "response": None}, NO_RESPONSE),
        ({"request": BODY, "response": completion("Hi", "length")}, CUT),
        ({"request": BODY, "response": completion("Hi", "content_filter")}, FILTERED),
        ({"request": BODY, "response": completion(None, refusal="I can't.")}, REFUSED),
        ({"request": BODY, "response": {"error": {"message": SECRET}}}, FAILED),
        ({"request": BODY, "response": {"status_code": 429, "body": SECRET}}, FAILED),
        ({"request": BODY, "response": [{"choices": [{"delta": {"content": "Hi"}}]}]}, STREAMED),
        ({"request": BODY, "response": {"choices": [{"delta": {"content": "Hi"}}]}}, STREAMED),
        ({"request": BODY, "response": 'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\ndata: [DONE]\n'}, STREAMED),
        ({"request": BODY, "response": 'event: message_start\ndata: {"type": "message_start"}\n'}, STREAMED),
        ({"request": BODY, "response": "<html><body>502 Bad Gateway</body></html>"}, FAILED),
        ({"request": {"model": "e", "input": USER}, "response": {"data": []}}, NO_MESSAGES),
        ({"request": {"model": "e", "prompt": USER}, "response": {"choices": [{"text": "x"}]}}, NO_MESSAGES),
    ],
)
def test_an_exchange_without_an_answer_is_dropped_by_its_reason_or_a_prompt(tmp_path: Path, row, reason) -> None:
    good = {"request": BODY, "response": completion("Hi!")}
    source = write(tmp_path / "log.jsonl", good, row)
    rows, dropped = run([source], tmp_path / "out")
    assert (1, {reason: 1}) == (len(rows), dropped)
    rows, dropped = run([source], tmp_path / "prompts", require_answers=False)
    if reason == NO_MESSAGES:
        assert (1, {reason: 1}) == (len(rows), dropped)
    else:
        assert ([*ASKED, ("assistant", "Hi!")], ASKED) == tuple(map(said, rows))


def test_requests_of_one_conversation_fall_into_the_same_split_and_other_rows_into_that_of_their_id(tmp_path) -> None:
    turns = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Question {place}?"}]
        for place in range(60)
    ]
    more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}]
    first = [{"request": {"messages": each}, "response": completion("Yes.")} for each in turns]
    later = [{"messages": [*each, *more], "tools": [{"name": "w"}], "response": completion("Quite.")} for each in turns]
    fractions = {"test_fraction": 0.3, "val_fraction": 0.2}
    rows, _ = run([write(tmp_path / "log.jsonl", *first, *later)], tmp_path / "log", **fractions)
    splits = [row["split"] for row in rows]
    assert splits[:60] == splits[60:]
    assert {"train", "val", "test"} == set(splits)
    plain = [{"messages": [*each, more[0]]} for each in turns]
    rows, _ = run([write(tmp_path / "chat.jsonl", *plain)], tmp_path / "chat", **fractions)
    for row in rows:
        drawn = int.from_bytes(hashlib.sha256(f"0\0{row['id']}".encode()).digest()[:8], "big") / 2**64
        assert ("test" if drawn < 0.3 else "val" if drawn < 0.5 else "train") == row["split"]


def test_conversations_that_begin_with_other_images_are_drawn_apart(tmp_path: Path) -> None:
    def opening(image: Path | bytes, text: str = "What is it?") -> str:
        turns = (Turn("user", (IMAGE, text)), Turn("assistant", ("A cat.",)), Turn("user", (IMAGE, "And this?")))
        return opening_of(RawSample("1", None, turns, (image, b"later")))

    assert opening(tmp_path / "a" / "x.png") == opening(tmp_path / "b" / "x.png")
    others = [opening(b"x"), opening(b"y"), opening(Path("y.png")), opening(b"x", "Which?")]
    assert 5 == len({opening(Path("x.png")), *others})


def test_a_request_that_is_none_is_named_by_its_line(tmp_path: Path) -> None:
    good = {"request": BODY, "response": completion("Hi!")}
    wrong = [{"request": 5, "response": {}}, {"request": f"{{{SECRET}", "response": {}}]
    messages = {"request": {"messages": SECRET}, "response": {}}
    with pytest.raises(DataError) as error:
        read(write(tmp_path / "log.jsonl", good, *wrong, messages, completion("Hi!")), tmp_path)
    assert str(error.value).split("\n") == [
        f'{tmp_path}/log.jsonl:2: "request" must be an object, or its JSON, got a number',
        f'{tmp_path}/log.jsonl:3: "request" must be an object, or its JSON, got a string',
        f'{tmp_path}/log.jsonl:4: no list "messages" (or "conversations")',
        f"{tmp_path}/log.jsonl:5: {RESPONSE_ALONE}",
    ]


def test_other_rows_with_keys_of_exchanges_are_read_as_before(tmp_path: Path) -> None:
    done = [*MESSAGES, {"role": "assistant", "content": "Hi!"}]
    rows = [
        {"instruction": "Repeat.", "input": '{"messages": []}', "output": "x"},
        {"messages": done, "response": "other"},
        {"messages": done, "response": completion("other")},
        {"input": MESSAGES, "output": "Hi!"},
    ]
    found = [said(row)[-1][1] for row in read(write(tmp_path / "rows.jsonl", *rows), tmp_path)[1]]
    assert ["x", "Hi!", "Hi!", "Hi!"] == found


def anthropic(*content: Any, stop_reason: str = "end_turn") -> dict[str, Any]:
    """A response of Anthropic's Messages API, as its documentation shows one."""
    message = {"id": "msg_123", "type": "message", "role": "assistant", "model": "claude", "content": list(content)}
    usage = {"input_tokens": 22, "output_tokens": 2}
    return message | {"stop_reason": stop_reason, "stop_sequence": None, "usage": usage}


def test_requests_of_anthropics_api_keep_their_system_turn_and_their_answer(tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "w", "input": {"city": "Paris"}}
    text = {"type": "text", "text": "I look."}
    blocks = [{"type": "text", "text": "You are a helpful assistant.", "cache_control": {"type": "ephemeral"}}]
    asked = {
        "model": "claude",
        "max_tokens": 1000,
        "metadata": {"user_id": USER},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello world!"}]}],
        "tools": [{"name": "w", "input_schema": {"type": "object"}}],
    }
    calling = anthropic(text, use, stop_reason="tool_use")
    rows = [
        {"request": asked | {"system": "You are a helpful assistant."}, "response": calling},
        {"request": asked | {"system": blocks}, "response": {"status": 200, "headers": HEADERS, "body": calling}},
        asked | {"system": blocks, "response": calling, "id": USER},
    ]
    wanting = [
        {"request": asked | {"system": blocks}, "response": answer}
        for answer in (
            anthropic(text, stop_reason="max_tokens"),
            anthropic(stop_reason="refusal"),
            {"type": "error", "error": {"type": "overloaded_error", "message": SECRET}},
            anthropic(),
        )
    ]
    source = write(tmp_path / "log.jsonl", *rows, *wanting)
    found, dropped = run([source], tmp_path / "out")
    assert [[*ASKED, ("assistant", "I look.")]] * 3 == [*map(said, found)]
    for row in found:
        [call] = row["conversations"][-1]["tool_calls"]
        assert ("toolu_1", {"city": "Paris"}) == (call["id"], call["function"]["arguments"])
        assert {"type": "object"} == row["tools"][0]["function"]["parameters"]
    assert {CUT: 1, REFUSED: 1, FAILED: 1, NO_RESPONSE: 1} == dropped
    prompts, dropped = run([source], tmp_path / "prompts", require_answers=False)
    assert ([ASKED] * 4, {}) == ([*map(said, prompts[3:])], dropped)


def test_an_image_behind_an_address_is_dropped_without_the_keys_in_it(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"https://{USER}:{SECRET}@host/a.png?signature={SECRET}#x"}},
    ]
    row = {"request": {"messages": [{"role": "user", "content": parts}]}, "response": completion("A cat.")}
    good = {"request": BODY, "response": completion("Hi!")}
    _, dropped = run([write(tmp_path / "log.jsonl", good, row)], tmp_path / "out")
    assert {"image behind a URL": 1} == dropped
    [table] = (tmp_path / "out").rglob("dropped.csv")
    assert "2,image behind a URL,https://host/a.png: download it" in table.read_text()


CHATML = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHello world!<|im_end|>\n"
    "<|im_start|>assistant\n"
)
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello world!<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = "<bos><start_of_turn>user\nHello world!<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (CHATML, "Hi!", [*ASKED, ("assistant", "Hi!")]),
        (CHATML, "Hi!<|im_end|>", [*ASKED, ("assistant", "Hi!")]),
        (f"{CHATML}<think>\n\n</think>\n\n", "Hi!", [*ASKED, ("assistant", "Hi!")]),
        (f"{CHATML}<think>\n", "Greet.\n</think>\n\nHi!", [*ASKED, ("assistant", "<think>\nGreet.\n</think>\n\nHi!")]),
        (LLAMA, "Hi!", [*ASKED, ("assistant", "Hi!")]),
        (GEMMA, "Hi!", [*ASKED[1:], ("assistant", "Hi!")]),
    ],
)
def test_prompts_that_sglang_logs_become_turns_again(tmp_path: Path, prompt, text, expected) -> None:
    arrived = {"timestamp": "x", "event": "request.received", "rid": "8a1f", "obj": {"rid": "8a1f", "text": None}}
    source = write(tmp_path / "host_0.log", arrived, logged(prompt, text, lora_path=SECRET))
    rows, dropped = run([source], tmp_path / "out")
    assert ([expected], {}, ["2"]) == ([*map(said, rows)], dropped, [row["id"] for row in rows])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (logged(CHATML, "Hi", "length"), CUT),
        (logged(CHATML, "Hi", "abort"), FAILED),
        (logged(CHATML, ""), NO_RESPONSE),
        (logged(CHATML[:1024] + "..." + CHATML[-24:].rjust(1024), "Hi!"), NOT_KNOWN),
        (logged("x" * 1024 + "..." + "y" * 1024, "Hi!"), LOG_CUT),
        (logged(CHATML, "x" * 1024 + "..." + "y" * 1024), LOG_CUT),
        (logged(CHATML.replace("You", "<tools>"), "Hi!"), WITH_TOOLS),
        (logged(CHATML, '<tool_call>\n{"name": "w"}\n</tool_call>'), WITH_TOOLS),
        (logged(CHATML, "A cat.", image_data=[f"https://host/?{SECRET}"]), WITH_IMAGES),
        (logged("The capital of France is", " Paris."), NOT_KNOWN),
        (logged(f"{CHATML}Hi", " there"), NOT_KNOWN),
        (logged([CHATML, CHATML], "Hi!"), SEVERAL),
    ],
)
def test_what_sglang_logs_otherwise_is_dropped_by_its_reason(tmp_path: Path, row, reason) -> None:
    source = write(tmp_path / "host_0.log", logged(CHATML, "Hi!"), row)
    rows, dropped = run([source], tmp_path / "out")
    assert (1, {reason: 1}) == (len(rows), dropped)


def test_a_log_of_sglang_without_texts_names_the_level_that_has_them(tmp_path: Path) -> None:
    row = logged(CHATML, "Hi!")
    bare = {**row, "obj": {"rid": "8a1f"}, "out": {"meta_info": row["out"]["meta_info"]}}
    config = Ingest(source=str(write(tmp_path / "host_0.log", bare)))
    found = missing_here(config)["source"]
    assert found.startswith(f'{tmp_path}/host_0.log:1: no "text" in "obj" or "out": the log has no prompts and answers')
    assert "--log-requests-level 3" in found
    with pytest.raises(DataError, match=r'host_0\.log:2: "obj" and "out" must be objects, as SGLang writes them'):
        read(write(tmp_path / "host_0.log", row, {**row, "obj": "GenerateReqInput(text='x')"}), tmp_path)


def test_an_answer_that_is_a_page_of_its_own_is_kept(tmp_path: Path) -> None:
    page = "<!DOCTYPE html><html><head><title>Kittens</title></head><body>5 of them</body></html>"
    [found], dropped = run([write(tmp_path / "log.jsonl", {"request": BODY, "response": page})], tmp_path / "out")
    assert (("assistant", page), {}) == (said(found)[-1], dropped)
