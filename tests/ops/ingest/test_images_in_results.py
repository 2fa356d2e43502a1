"""Images in the results of tools: the forms in which rows have them become one, each image at its place."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from own_samples import run_ingest
from PIL import Image

from ops.lib.data.image_packs import read_packed

Row = dict[str, Any]


def picture(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(file, "PNG")
    return file.getvalue()


MAP, SHOT, OTHER = map(picture, ("red", "green", "blue"))
FILES = {"map.png": MAP, "shot.png": SHOT, "other.png": OTHER}
DATA = base64.b64encode(SHOT).decode()
URL = f"data:image/png;base64,{DATA}"
TOOL = {"name": "shot", "description": "Takes a picture.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
ASK, DONE = {"role": "user", "content": "Look."}, {"role": "assistant", "content": "Done."}
PAGE = {"type": "text", "text": "page"}
CALL = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
SWIFT = {"role": "tool_call", "content": json.dumps({"name": "shot", "arguments": {}})}
HERMES = {"role": "assistant", "content": '<tool_call>{"name": "shot", "arguments": {}}</tool_call>'}
JOINED = "<image>\n</tool_response>\n<tool_response>\n<image>page"


def openai(content: Any, **more: Any) -> Row:
    """The user's question, a call, and a result of this content."""
    result = {"role": "tool", "tool_call_id": "c1", "content": content}
    return {"tools": TOOLS, "messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}, result, DONE]} | more


def turns(*messages: Row, **more: Any) -> Row:
    return {"tools": json.dumps(TOOLS), "messages": [ASK, *messages, DONE]} | more


def anthropic(content: Any, *parts: Row) -> Row:
    use = {"type": "tool_use", "id": "c1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    tools = [{"name": "shot", "description": "Takes a picture.", "input_schema": TOOL["parameters"]}]
    messages = [ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [*parts, result]}, DONE]
    return {"tools": tools, "messages": messages}


def of_anthropic(**source: Any) -> Row:
    return {"type": "image", "source": source}


def llama_factory(value: str, *images: str, calls: int = 1) -> Row:
    asked = json.dumps([{"name": "shot", "arguments": {}}] * calls)
    values = {"human": "<image>Look.", "function_call": asked, "observation": value, "gpt": "Done."}
    said = [{"from": role, "value": value} for role, value in values.items()]
    return {"tools": json.dumps([TOOL]), "conversations": said, "images": list(images)}


# A row, its results with None for each image, and all images of the row in their order.
FORMS: dict[str, tuple[Row, list[list[str | None]], list[bytes]]] = {
    "OpenAI: parts": (
        openai([PAGE, {"type": "image_url", "image_url": {"url": "shot.png"}}]),
        [["page", None]],
        [SHOT],
    ),
    "OpenAI: a data URL": (openai([{"type": "image_url", "image_url": {"url": URL}}, PAGE]), [[None, "page"]], [SHOT]),
    "OpenAI: one part": (openai({"type": "image_url", "image_url": {"url": "shot.png"}}), [[None]], [SHOT]),
    "OpenAI Responses": (openai([{"type": "input_image", "image_url": URL}]), [[None]], [SHOT]),
    "a screenshot of a computer": (openai({"type": "computer_screenshot", "image_url": URL}), [[None]], [SHOT]),
    "parts and a column": (openai([{"type": "image"}, PAGE], images=["shot.png"]), [[None, "page"]], [SHOT]),
    "a text and a column": (openai("<image>page", image="shot.png"), [[None, "page"]], [SHOT]),
    "Model Context Protocol": (
        openai([PAGE, {"type": "image", "data": DATA, "mimeType": "image/png"}]),
        [["page", None]],
        [SHOT],
    ),
    "Anthropic": (
        anthropic([PAGE, of_anthropic(type="base64", media_type="image/png", data=DATA)]),
        [["page", None]],
        [SHOT],
    ),
    "Anthropic: the user's image stands behind the result's": (
        anthropic([of_anthropic(type="url", url="shot.png")], PAGE, of_anthropic(type="url", url="map.png")),
        [[None]],
        [SHOT, MAP],
    ),
    "LLaMA-Factory": (llama_factory("<image>page", "map.png", "shot.png"), [[None, "page"]], [MAP, SHOT]),
    "LLaMA-Factory: parallel": (
        llama_factory(JOINED, "map.png", "shot.png", "other.png", calls=2),
        [[None], [None, "page"]],
        [MAP, SHOT, OTHER],
    ),
    "ms-swift": (
        turns(
            *(SWIFT, SWIFT, {"role": "tool_response", "content": "<image>"}),
            {"role": "tool_response", "content": "page<image>"},
            images=["shot.png", "other.png"],
        ),
        [[None], ["page", None]],
        [SHOT, OTHER],
    ),
    "ms-swift: an object": (
        turns(SWIFT, {"role": "tool", "content": '{"image": "<image>"}'}, images=["shot.png"]),
        [['{"image": "', None, '"}']],
        [SHOT],
    ),
    "Hermes": (
        turns(HERMES, {"role": "tool", "content": "<tool_response>\n<image>\n</tool_response>"}, image="shot.png"),
        [[None]],
        [SHOT],
    ),
    "no parts: values of JSON": (
        openai([{"image": "shot.png"}, {"text": "page"}]),
        [['[{"image": "shot.png"}, {"text": "page"}]']],
        [],
    ),
}


@pytest.fixture(scope="module")
def ingested(tmp_path_factory):
    """The samples of all forms, by name, and the folder of their images."""
    folder = tmp_path_factory.mktemp("ingested")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    stage, written, _ = run_ingest(folder, [{"id": name, **row} for name, (row, _, _) in FORMS.items()])
    return {row["id"]: row for row in written}, stage.out_dir


@pytest.mark.parametrize("name", FORMS)
def test_images_of_results_stand_at_their_places_in_the_one_form(ingested, name):
    rows, folder = ingested
    _, expected, images = FORMS[name]
    results = [
        [None if part["type"] == "image" else part["text"] for part in turn["content"]]
        for turn in rows[name]["conversations"]
        if turn["role"] == "tool"
    ]
    assert expected == results
    assert images == [read_packed(folder, reference) for reference in rows[name]["images"]]
    assert ("image" if images else "text") == rows[name]["category"]


def test_images_of_results_that_are_not_there_drop_the_sample_by_name(tmp_path):
    rows = {
        "image missing": openai([{"type": "image_url", "image_url": {"url": "gone.png"}}]),
        "image behind a URL": anthropic([of_anthropic(type="url", url="https://a.example/shot.png")]),
        "placeholders and images differ": anthropic([of_anthropic(type="file", file_id="file_1")]),
        "unknown content part": openai([{"type": "image_url", "image_url": {"url": URL}}, {"type": "resource"}]),
        "": turns(),
    }
    _, _, summary = run_ingest(tmp_path, [{"id": reason, **row} for reason, row in rows.items()])
    assert dict.fromkeys(filter(None, rows), 1) == summary["dropped"]
