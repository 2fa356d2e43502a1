"""What servers were asked, and what they answered, as rows: logs of requests, and the files of OpenAI's batches.

    {"request": {...}, "response": {...}}       a request and its response, objects or JSON; either may be the "body"
                                                beside headers and a status. Also request_body and response_body, and
                                                input and output
    {"messages": [...], "response": {...}}      the same in one object; also with "choices", or the answer as a text.
                                                Its split, category and images are kept
    {"request": {"system": ...}, "response": {"type": "message", ...}}      the same of Anthropic's messages
    {"custom_id", "method", "url", "body"}      a line of a batch's input; its answer is in the batch's output
    {"custom_id", "response", "error"}          a line of that output, in another file
    {"event": "request.finished", "obj", "out"} SGLang's log as JSON (--log-requests-format json), whose prompts are
                                                texts that the chat template rendered: RENDERED is the table of those
                                                that become turns again

Of a request the messages, the tools that its `tool_choice` leaves, documents and Anthropic's `system` are used, of a
response the first choice's message, or Anthropic's content. Settings that change the prompt are counted (SETTINGS of
ops/ingest/rows.py). All else stays out of the row: ids, users, keys, headers, metadata. Nor does a message or a reason
of this file show a value.

A log has a conversation's earlier turns again in every later request. All of these fall into one split, which is drawn
by what they begin with (`opening_of`).

A request that is no sample has a reason (`Record.lacks`), by which it is dropped and counted:

    no response, the request failed, a refusal
    the answer was cut at its limit, the answer was filtered
    a streamed response in pieces       a list of them, or the events as a text
    the request ends with an answer     begun by the client, which the response goes on with: the target did not say the
                                        beginning. As a prompt it ends before this turn
    a request without messages          embeddings, completions of a bare text, and OpenAI's responses
    a text that the log cut             by SGLang's --log-requests-level 2
    a rendered prompt with tools, with images, of no known chat template; several prompts in a request
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from ops.ingest.documents import KEY
from ops.ingest.row_values import REASONING, is_none, parsed, turn_role
from ops.ingest.rows import SETTINGS
from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.ingest.tools import TOOL_KEYS, chosen_tool, tool_name, with_tools
from ops.lib.data.json_lines import json_kind

if TYPE_CHECKING:
    from ops.ingest.records import Record  # whose rows may have columns of other names, which are not these

Row = dict[str, Any]

NO_RESPONSE, FAILED, REFUSED = "no response", "the request failed", "a refusal"
CUT, FILTERED = "the answer was cut at its limit", "the answer was filtered"
STREAMED = "a streamed response in pieces"
PREFILLED = "the request ends with an answer"
NO_MESSAGES = "a request without messages"
LOG_CUT = "a text that the log cut"
WITH_TOOLS, WITH_IMAGES = "a rendered prompt with tools", "a rendered prompt with images"
NOT_KNOWN = "a rendered prompt of no known chat template"
SEVERAL = "several prompts in a request"
INPUT, OUTPUT = "input", "output"  # of a batch


@frozen
class Answer:
    """The answer to a request as a turn, or why there is none. is_sglang: whether SGLang wrote the response."""

    turn: Row | None = None
    lacks: str = ""
    is_sglang: bool = False


Answers = Mapping[str, Answer]  # by custom_id
NO_ANSWERS: Answers = MappingProxyType({})


@frozen
class Exchange:
    """A request and its answer as a row, the mistake in its form, and why it is no sample with an answer."""

    row: Row
    mistake: str = ""
    lacks: str = ""


def exchanges(records: Iterator[Record], answers: Answers = NO_ANSWERS) -> Iterator[Record]:
    """The records, their rows of servers as rows of turns. answers: of a batch's output, to the lines of its input.

    What SGLang logs when a request arrives is left out, since it logs the request again with its answer.
    """
    for record in records:
        if record.mistake or not isinstance(record.row, dict):
            yield record
        elif not is_arrival(record.row):
            found = exchange(record.row, answers)
            if found is None:
                yield record
            else:
                yield attrs.evolve(record, row=found.row, mistake=found.mistake, lacks=found.lacks, is_request=True)


def exchange(row: Row, answers: Answers = NO_ANSWERS) -> Exchange | None:
    """The exchange in a row; None for a row of another form."""
    if row.get("event") == "request.finished" and "rid" in row:
        return _sglang(row)
    kind = batch_kind(row)
    if kind == OUTPUT:
        return Exchange(row, OUTPUT_ALONE)
    if kind == INPUT:
        if not isinstance(row.get("custom_id"), str):
            return Exchange(row, NO_CUSTOM_ID)
        if not isinstance(row.get("body"), dict):
            return Exchange(row, NO_BODY)
        return _joined(row["body"], answers.get(row["custom_id"], Answer(lacks=NO_RESPONSE)))
    for asked, answered in PAIRS:
        if asked in row and answered in row and _may_be_object(row[asked], asked):
            request = _object(row[asked])
            if request is None:
                return Exchange(row, f'"{asked}" must be an object, or its JSON, got {json_kind(row[asked])}')
            return _joined(_body(request), _answer(row[answered]))
    if row.get("object") == "chat.completion" and "messages" not in row:
        return Exchange(row, RESPONSE_ALONE)
    return _in_one(row)


RESPONSE_ALONE = 'a response without its request: write both, {"request": {...}, "response": {...}}'
OUTPUT_ALONE = (
    "a line of a batch's output, which has no prompt: list the batch's input as a source too, "
    'source = ["input.jsonl", "output.jsonl"]'
)
NO_CUSTOM_ID = 'no string "custom_id", by which a batch\'s output belongs to its input'
NO_BODY = 'no object "body": a line of a batch\'s input has "custom_id", "method", "url" and "body"'
OWN = ("split", "category", "image", "images")  # keys of a row that no server writes
PAIRS = (("request", "response"), ("request_body", "response_body"), ("input", "output"))


def batch_kind(row: Any) -> str:
    """INPUT or OUTPUT for a line of OpenAI's batches; "" for others."""
    if not isinstance(row, dict) or "custom_id" not in row:
        return ""
    if any(key in row for key in ("body", "url", "method")):
        return INPUT
    return OUTPUT if "response" in row or "error" in row else ""


def batch_answers(records: Iterator[Record], answers: dict[str, Answer], places: dict[str, str]) -> Iterator[str]:
    """Add the answers in a batch's output, and the places of their lines; the mistakes in it."""
    for record in records:
        own = record.row.get("custom_id") if isinstance(record.row, dict) else None
        if record.mistake:
            yield f"{record.place}: {record.mistake}"
        elif not isinstance(own, str):
            yield f"{record.place}: {NO_CUSTOM_ID}"
        elif own in answers:
            yield (
                f"{record.place}: the same custom_id as {places[own]}; read batches that share custom_ids in nodes of "
                "their own"
            )
        else:
            places[own] = record.place
            answers[own] = Answer(lacks=FAILED) if record.row.get("error") else _answer(record.row.get("response"))


def _may_be_object(value: Any, key: str) -> bool:
    """Whether the value of a request's key may be a request, and is no text or turns of another form."""
    if key == "input" or isinstance(value, list):
        return isinstance(value, dict)
    return value.lstrip().startswith("{") if isinstance(value, str) else True


def _object(value: Any) -> Row | None:
    if isinstance(value, str):
        try:
            value = parsed(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def _body(value: Row) -> Row:
    """What a request or a response says, which may lie beside headers and a status."""
    inner = _object(value.get("body"))
    return value if inner is None else inner


def _in_one(row: Row) -> Exchange | None:
    """A request that has its response among its own keys."""
    turns = row.get("messages")
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, dict):
        return None
    if turn_role(last) not in ("user", "tool") and row.get("continue_final_message") is not True:
        return None
    response = row.get("response")
    if not isinstance(response, (dict, str)) and not isinstance(row.get("choices"), list):
        return None
    found = _joined(row, _answer(response if isinstance(response, (dict, str)) else row))
    own = {key: row[key] for key in (*OWN, *REASONING) if key in row}
    return attrs.evolve(found, row={**own, **found.row})


def _joined(request: Row, answer: Answer) -> Exchange:
    turns = request.get("messages")
    if turns is None:
        return Exchange({"messages": []}, lacks=NO_MESSAGES)
    others = {key: request[key] for key in (KEY, "system", *SETTINGS) if request.get(key) is not None}
    others |= _tools(request, is_sglang=answer.is_sglang)
    if not isinstance(turns, list):
        return Exchange({"messages": turns, **others}, lacks=answer.lacks)
    asked = list(turns)
    while asked and isinstance(asked[-1], dict) and turn_role(asked[-1]) == "assistant":
        asked.pop()
    if len(asked) < len(turns):
        return Exchange({"messages": asked, **others}, lacks=answer.lacks or PREFILLED)
    last = [] if answer.turn is None else [answer.turn]
    return Exchange({"messages": [*asked, *last], **others}, lacks=answer.lacks)


def _tools(request: Row, *, is_sglang: bool) -> Row:
    """The tools in a request's prompt, and its `tool_choice` where it is not known whether it left some out.

    With "none" SGLang renders no tools, of a named function only that (0.5.23, srt/entrypoints/openai/serving_chat.py,
    `_process_messages`); vLLM renders all in both cases (0.33, renderers/online_renderer.py), with
    --exclude-tools-when-tool-choice-none none of the first. A response of SGLang is known by "matched_stop".
    """
    given = {key: request[key] for key in TOOL_KEYS if request.get(key) is not None}
    chosen = chosen_tool(request)
    row, mistake = with_tools(given)
    if chosen is None or mistake or "tools" not in row:
        return given
    if not is_sglang:
        return {**given, "tool_choice": request["tool_choice"]}
    shown = [tool for tool in row["tools"] if tool_name(tool) == chosen]
    return {"tools": shown} if shown else {"tool_choice": "none"}


ENDINGS = {
    **dict.fromkeys(("length", "max_tokens", "model_context_window_exceeded"), CUT),
    "content_filter": FILTERED,
    "refusal": REFUSED,
    **dict.fromkeys(("abort", "error"), FAILED),
}
EVENTS = re.compile(r"\s*(?:event:[^\n]*\s+)?data:\s*(?:\{|\[DONE\])")  # server-sent events, as they came
PAGE = re.compile(r"\s*<(?:!doctype\s+html|html)\b.{0,500}<(?:title|h1|body)>\s*[45]\d\d\b", re.IGNORECASE | re.DOTALL)
KEPT = ("content", "tool_calls", "function_call", *REASONING)


def _answer(response: Any) -> Answer:
    """The answer in a response: chat completions, a message of Anthropic's API, or a text."""
    if isinstance(response, str) and EVENTS.match(response):
        return Answer(lacks=STREAMED)
    if isinstance(response, str) and PAGE.match(response):  # of a proxy, with a status, in place of an answer
        return Answer(lacks=FAILED)
    if isinstance(response, str) and _object(response) is None:
        return Answer({"role": "assistant", "content": response}) if response.strip() else Answer(lacks=NO_RESPONSE)
    if isinstance(response, list):
        return Answer(lacks=STREAMED)
    outer = _object(response)
    if outer is None:
        return Answer(lacks=NO_RESPONSE)
    inner = _body(outer)
    status = next((outer[key] for key in ("status_code", "status") if isinstance(outer.get(key), int)), 200)
    if status != 200 or not is_none(outer.get("error")) or not is_none(inner.get("error")):
        return Answer(lacks=FAILED)
    if inner.get("type") == "message" and "content" in inner:
        return _of_message(inner, inner.get("stop_reason"))
    choices = inner.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        return Answer(lacks=NO_RESPONSE)
    if "delta" in first:
        return Answer(lacks=STREAMED)
    found = _of_message(first.get("message"), first.get("finish_reason"))
    return attrs.evolve(found, is_sglang="matched_stop" in first)


def _of_message(message: Any, ending: Any) -> Answer:
    if ending in ENDINGS:
        return Answer(lacks=ENDINGS[ending])
    if not isinstance(message, dict):
        return Answer(lacks=NO_MESSAGES)
    turn = {key: message[key] for key in KEPT if not is_none(message.get(key))}
    if not any(turn.get(key) for key in ("content", "tool_calls", "function_call")):
        return Answer(lacks=REFUSED if message.get("refusal") else NO_RESPONSE)
    return Answer({"role": "assistant", "content": "", **turn})


NOT_LOGGED = (
    'no "text" in "obj" or "out": the log has no prompts and answers; start SGLang with --log-requests '
    "--log-requests-level 3 --log-requests-format json"
)
NO_LOG = '"obj" and "out" must be objects, as SGLang writes them with --log-requests-format json'
MOST_LOGGED = 2048  # characters of a text at level 2, which are its first and last ones around three dots
DOTS = "..."


@frozen
class Rendered:
    """How a chat template marks turns: the header of one, with its role, its end, and what a text may begin with."""

    header: re.Pattern[str]
    end: str
    begin: str = ""


RENDERED = (
    Rendered(re.compile(r"<\|im_start\|>(\w+)\n"), "<|im_end|>"),
    Rendered(re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n"), "<|eot_id|>", "<|begin_of_text|>"),
    Rendered(re.compile(r"<start_of_turn>(\w+)\n"), "<end_of_turn>", "<bos>"),
)
OF_TOOLS = ("<tools>", "<tool_call>", "<tool_response>", "<|python_tag|>", "Environment: ipython")


def is_arrival(row: Row) -> bool:
    """Whether a row is SGLang's of a request without its answer yet."""
    return row.get("event") == "request.received" and "rid" in row


def _sglang(row: Row) -> Exchange:
    asked, said = row.get("obj"), row.get("out")
    if not isinstance(asked, dict) or not isinstance(said, dict):
        return Exchange(row, NO_LOG)
    if "text" not in asked or "text" not in said:
        return Exchange(row, NOT_LOGGED)
    prompt, text = asked["text"], said["text"]
    turns: list[Row] = []
    if isinstance(prompt, list):
        lacks = SEVERAL
    elif not is_none(asked.get("image_data")):
        lacks = WITH_IMAGES
    elif not isinstance(prompt, str):
        return Exchange(row, NOT_LOGGED)
    elif _is_cut(prompt):
        lacks = LOG_CUT
    elif any(mark in f"{prompt}{text}" for mark in OF_TOOLS):
        lacks = WITH_TOOLS
    else:
        turns, opened, end = _turns(prompt)
        lacks = _unanswered(said, text) if turns else NOT_KNOWN
        if not lacks:
            turns.append({"role": "assistant", "content": opened + text.removesuffix(end)})
    return Exchange({"messages": turns}, lacks=lacks)


def _unanswered(said: Row, text: Any) -> str:
    """Why SGLang's output is no whole answer, or an empty string."""
    about = said.get("meta_info")
    ending = about.get("finish_reason") if isinstance(about, dict) else None
    kind = ending.get("type") if isinstance(ending, dict) else ending
    if kind in ENDINGS:
        return ENDINGS[kind]
    if not isinstance(text, str) or not text.strip():
        return NO_RESPONSE
    return LOG_CUT if _is_cut(text) else ""


def _is_cut(text: str) -> bool:
    half = MOST_LOGGED // 2
    return len(text) == MOST_LOGGED + len(DOTS) and text[half:].startswith(DOTS)


def _turns(prompt: str) -> tuple[list[Row], str, str]:
    """The turns of a rendered prompt, the thought that it opens for the answer, and the mark that ends a turn.

    No turns for a text of another form.
    """
    for form in RENDERED:
        before, *pieces = form.header.split(prompt)
        if not pieces or before.strip() not in ("", form.begin):
            continue
        *said, opened = pieces[1::2]
        bodies = [body.partition(form.end) for body in said]
        is_open = pieces[-2] in ("assistant", "model") and opened.strip() in ("", THINK, f"{THINK}\n\n{END_OF_THOUGHT}")
        if said and is_open and all(end and not rest.strip() for _, end, rest in bodies):
            turns = [{"role": role, "content": body} for role, (body, _, _) in zip(pieces[::2], bodies, strict=False)]
            return turns, opened if opened.strip() == THINK else "", form.end
    return [], "", ""
