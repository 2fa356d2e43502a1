"""An OpenAI-compatible server of the tests: real HTTP, a tiny transformers model, and faults on demand."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from agent_rows import NAME
from attrs import define, field, frozen
from PIL import Image
from transformers import AutoTokenizer

from ops.artifacts import TargetModel
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor

Body = dict[str, Any]
IDS = ("srv1", "srv2", "srv3")  # of calls


@frozen
class Fault:
    """A fault that a request meets instead of an answer.

    status 0: the connection is cut; hang: there is no response until the server ends.
    """

    status: int = 0
    message: str = ""
    headers: Mapping[str, str] = field(factory=dict)
    hang: bool = False


def is_probe(body: Body) -> bool:
    """Whether a request only checks that the server answers at all."""
    return body["max_tokens"] == 1 and [{"role": "user", "content": "Hello"}] == body.get("messages")


@define(eq=False)
class ChatServer:
    """A server of chat completions while the context is open. `answer`: from a request's body to the response, or to
    the list of its chunks, which are streamed with `pause` seconds behind each.

    fault(body, attempt): the fault of this attempt at a request, counted from 0. asked: the bodies of all chat requests
    except probes, with their times; most: the largest number in flight; key: the API key that clients must send.
    """

    answer: Callable[[Body], dict[str, Any] | list[dict[str, Any]]]
    fault: Callable[[Body, int], Fault | None] = lambda body, attempt: None
    model: str = "talker"
    owner: str = "somebody"
    key: str | None = None
    delay: Callable[[Body], float] = lambda body: 0.0
    pause: float = 0.0
    asked: list[tuple[float, Body]] = field(factory=list)
    most: int = 0
    _in_flight: int = 0
    _attempts: Counter[str] = field(factory=Counter)
    _lock: threading.Lock = field(factory=threading.Lock)
    _ended: threading.Event = field(factory=threading.Event)
    _http: ThreadingHTTPServer = field(init=False)

    def __attrs_post_init__(self) -> None:
        handler = type("Handler", (_Handler,), {"chat": self})
        self._http = _Server(("127.0.0.1", 0), handler)

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def conversations(self) -> list[Body]:
        return [body for _, body in self.asked]

    def respond(self, path: str, authorization: str, body: Body | None) -> tuple[int, Mapping[str, str], Any] | None:
        """The status, headers and response to a request, or None if the connection is to be cut."""
        if self.key and authorization != f"Bearer {self.key}":
            return 401, {}, {"error": {"message": f"no such key: {authorization}"}}
        if path == "/v1/models":
            return 200, {}, {"object": "list", "data": [{"id": self.model, "owned_by": self.owner}]}
        by_ids = path == "/v1/completions" and self.owner == "vllm" and body is not None and "prompt" in body
        if body is None or not (by_ids or (path == "/v1/chat/completions" and "messages" in body)):
            return 404, {}, {"detail": "Not Found"}
        with self._lock:
            self._in_flight += 1
            self.most = max(self.most, self._in_flight)
            if not is_probe(body):
                self.asked.append((time.monotonic(), body))
            digest = json.dumps(body, sort_keys=True)
            attempt = self._attempts[digest]
            self._attempts[digest] += 1
        try:
            return self._answered(body, attempt)
        finally:
            with self._lock:
                self._in_flight -= 1

    def _answered(self, body: Body, attempt: int) -> tuple[int, Mapping[str, str], Any] | None:
        fault = self.fault(body, attempt)
        if fault is None:
            time.sleep(self.delay(body))
            return 200, {}, self.answer(body)
        if fault.hang:
            self._ended.wait()
        return (fault.status, fault.headers, {"error": {"message": fault.message}}) if fault.status else None


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that is killed or stopped says no goodbye
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer
    protocol_version = "HTTP/1.1"
    timeout = 120  # a thread that waits for the next request of a kept connection

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Body | None) -> None:
        response = self.chat.respond(self.path, self.headers.get("Authorization", ""), body)
        if response is None or self.chat._ended.is_set():
            self.close_connection = True
            return
        status, headers, content = response
        if isinstance(content, list):
            self._stream(content)
            return
        encoded = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Type": "application/json", "Content-Length": len(encoded)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(encoded)

    def _stream(self, chunks: Sequence[Body]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            time.sleep(self.chat.pause)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *arguments: object) -> None:
        pass


def response(
    text: str | None, finish_reason: str = "stop", usage: Mapping[str, int] | None = None, **more: Any
) -> Body:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, **more}
    return {"object": "chat.completion", "choices": [choice], "usage": usage}


def called(*cities: str, name: str = NAME, ids: Sequence[str] = IDS, content: str | None = None, **more: Any) -> Body:
    """An answer in which the server's parser found calls for the cities."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps({"city": city})}}
        for call_id, city in zip(ids, cities, strict=False)
    ]
    answer = response(content, "tool_calls", **more)
    answer["choices"][0]["message"]["tool_calls"] = made
    return answer


@define(eq=False, slots=False)
class TinyModel:
    """A model that answers requests with transformers' template, processor and `generate`, once per distinct request.

    Token ids in a request, as `input_ids` of a chat (SGLang) or `prompt` (vLLM), are the prompt.
    changed: applied to the messages first, for a server whose template differs.
    """

    target: TargetModel
    changed: Callable[[list[Any]], list[Any]] = list
    _answers: dict[str, tuple[list[int], int]] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        folder = self.target.path / "model"
        self.loaded, self.processor = Target.load(self.target), load_processor(str(folder))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.chat_template = self.processor.tokenizer.chat_template

    def __call__(self, body: Body) -> Body:
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        with self._lock:
            if digest not in self._answers:
                self._answers[digest] = self._generated(body)
            tokens, prompt = self._answers[digest]
        stopped = tokens[-1] in self.processor.eos_token_ids
        skip = body.get("skip_special_tokens", True)
        text = self.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=skip)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(tokens)}
        end = "stop" if stopped else "length"
        if "prompt" in body:
            choice = {"index": 0, "text": text, "finish_reason": end, "token_ids": tokens}
            return {"object": "text_completion", "choices": [choice], "usage": usage}
        ids = {"response_token_ids": tokens} if body.get("return_token_ids") else {}
        return response(text, end, usage, **ids)

    def _generated(self, body: Body) -> tuple[list[int], int]:
        """Generate an answer; returns its tokens, and the length of the prompt."""
        given = body.get("input_ids") or body.get("prompt")
        if given:
            return self._continued(body, torch.tensor([given]), {})
        messages, images = [], []
        for message in self.changed(body["messages"]):
            parts = message["content"]
            parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
            images += [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
            shown = [{"type": "image"} if part["type"] == "image_url" else part for part in parts]
            text = message["content"] if not self.processor.sees else shown  # as templates without images take it
            messages.append({"role": message["role"], "content": text})
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **body.get("chat_template_kwargs", {})
        )
        arguments: dict[str, Any] = {}
        if images:
            pixels = self.processor.image_processor(images=[opened(url) for url in images], return_tensors="pt")
            arguments = {name: pixels[name] for name in ("pixel_values", "image_grid_thw")}
            for grid in pixels["image_grid_thw"]:
                tokens = int(grid.prod()) // self.processor.merge_size**2
                text = text.replace(self.processor.image_token, "<placeholder>" * tokens, 1)
            text = text.replace("<placeholder>", self.processor.image_token)
        prompt = torch.tensor([self.tokenizer(text)["input_ids"]])
        if images:
            arguments["mm_token_type_ids"] = (prompt == self.processor.image_token_id).int()
        return self._continued(body, prompt, arguments)

    def _continued(self, body: Body, prompt: torch.Tensor, arguments: dict[str, Any]) -> tuple[list[int], int]:
        self.loaded.forget_positions()
        torch.manual_seed(body.get("seed", 0))
        sampled = body["temperature"] > 0
        drawn = {"temperature": body["temperature"], "top_p": body["top_p"], "top_k": 0} if sampled else {}
        generated = self.loaded.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=body["max_tokens"],
            do_sample=sampled,
            eos_token_id=list(self.processor.eos_token_ids),
            pad_token_id=self.processor.pad_token_id,
            **drawn,
            **arguments,
        )
        return generated[0, prompt.shape[1] :].tolist(), prompt.shape[1]


def opened(url: str) -> Image.Image:
    head, _, encoded = url.partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)))
    assert f"data:{Image.MIME[image.format]};base64" == head
    return image.convert("RGB")
