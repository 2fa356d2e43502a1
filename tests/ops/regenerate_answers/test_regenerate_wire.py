"""What goes over the wire to a server, and what its answer is read as; thoughts that a server took out of an answer."""

from __future__ import annotations

import base64
import io
import itertools
from datetime import UTC, datetime

import numpy as np
import pytest
from chat_server import ChatServer, is_probe, response
from chat_templates import QWEN3, QWEN35, unmarked
from family_checkpoints import make_checkpoint
from PIL import Image
from regenerate_cases import answers_of, make_target, run_endpoint, turn
from tokenizers import AddedToken
from transformers import AutoTokenizer

from dsl.errors import DataError
from ops.artifacts import ImageSamples
from ops.lib.data.files import write_jsonl
from ops.lib.vision.images import decode
from ops.regenerate_answers.client import data_url, read_reply, request_seed, retry_after_s, wire_messages


def encoded(image: Image.Image, file_format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_an_image_is_sent_as_it_was_ingested(name):
    image = encoded(picture(), name)
    head, _, body = data_url(image).partition(",")
    assert f"data:image/{name.lower()};base64" == head
    assert image == base64.b64decode(body, validate=True)


def turned() -> bytes:
    image = picture()
    exif = image.getexif()
    exif[0x0112] = 6
    return encoded(image, "JPEG", exif=exif)


def deep_grey() -> bytes:
    return encoded(Image.fromarray(np.arange(0, 60000, 1000, dtype=np.uint16).reshape(6, 10)), "PNG")


def with_a_second_picture() -> bytes:
    """A JPEG with a second picture, as many cameras write them; Pillow calls it MPO."""
    return encoded(picture(), "MPO", save_all=True, append_images=[picture()])


@pytest.mark.parametrize("image", [turned(), deep_grey()], ids=["turned by EXIF", "16-bit grey"])
def test_an_image_that_engines_decode_to_other_pixels_is_sent_as_dflow_sees_it(image):
    def engine(encoded):  # what SGLang's loader does
        return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))

    head, _, body = data_url(image).partition(",")
    assert "data:image/png;base64" == head
    expected = np.asarray(decode(image))
    assert np.array_equal(expected, engine(base64.b64decode(body)))
    as_it_is = engine(image)
    assert expected.shape != as_it_is.shape or np.abs(expected.astype(int) - as_it_is).max() > 100


def test_a_picture_in_a_format_that_few_engines_know_is_sent_as_png():
    head, _, body = data_url(with_a_second_picture()).partition(",")
    assert "data:image/png;base64" == head
    assert np.array_equal(
        np.asarray(decode(with_a_second_picture())), np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))
    )


def test_messages_with_images_are_parts_and_all_others_one_text():
    image = encoded(picture(), "PNG")
    two_texts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(image)}},
                {"type": "text", "text": "What?"},
            ],
        },
        {"role": "user", "content": "ab"},
    ] == wire_messages([turn("system", "Be brief."), turn("user", "What?", image=True), two_texts], [image])


def test_seeds_are_functions_of_seed_sample_and_turn():
    seeds = [request_seed(*key) for key in itertools.product((0, 1), itertools.product(("a", "b"), (0, 1)))]
    assert [request_seed(0, ("a", 0)), request_seed(1, ("b", 1))] == [seeds[0], seeds[-1]]
    assert len(seeds) == len(set(seeds))
    assert all(0 <= seed < 2**31 for seed in seeds)


WAITS = {
    None: 0.0,
    "": 0.0,
    "7": 7.0,
    "0.5": 0.5,
    "-3": 0.0,
    "nan": 0.0,
    "soon": 0.0,
    "Wed, 21 Oct 2026 07:28:30 GMT": 30.0,
    "Wed, 21 Oct 2026 07:28:30 -0000": 30.0,
    "Wed, 21 Oct 2020 07:28:00 GMT": 0.0,
}


def test_what_a_server_asks_to_wait_is_read_as_seconds_or_a_date():
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)
    assert list(WAITS.values()) == [retry_after_s(header, now) for header in WAITS]


NO_ANSWERS = ([], {}, "<html>", {"choices": []}, {"choices": [{"message": None, "finish_reason": "stop"}]})


@pytest.mark.parametrize("data", NO_ANSWERS, ids=map(str, NO_ANSWERS))
def test_a_response_without_an_answer_is_no_answer(data):
    with pytest.raises(ValueError, match="not a chat completion"):
        read_reply(data)


@pytest.mark.parametrize("finish_reason", ["abort", "error", None])
def test_an_answer_that_was_broken_off_is_no_answer(finish_reason):
    with pytest.raises(ValueError, match="aborted by the server"):
        read_reply(response("Half a", finish_reason))


def test_token_ids_are_read_as_sglang_and_as_vllm_tell_them():
    sglang = response("a", response_token_ids=[5, 6], prompt_token_ids=[1, 2])
    vllm = {**response("a", token_ids=[5, 6]), "prompt_token_ids": [1, 2]}
    assert [([5, 6], [1, 2])] * 2 == [(read.token_ids, read.prompt_ids) for read in map(read_reply, (sglang, vllm))]


THOUGHT, ANSWER = "It has ears.", "A cat."
OPENS = {"qwen3": (QWEN3, "<think>\n"), "qwen3.5": (QWEN35, "")}  # what the target itself writes before its thought


@pytest.fixture(scope="module", params=OPENS)
def thinker(request, tmp_path_factory):
    """(what the target writes before a thought, the target), whose model answers nothing here."""
    tmp = tmp_path_factory.mktemp("thinker")
    checkpoint = make_checkpoint("qwen3", tmp / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.chat_template = unmarked(OPENS[request.param][0])
    tokenizer.save_pretrained(checkpoint)
    return OPENS[request.param][1], make_target(tmp / "target", checkpoint)


def ask(folder, target, reply, **options):
    """Ask one question of a server that replies the same to everything; returns the stage and the server."""
    (folder / "samples").mkdir()
    row = {"id": "cat", "split": "train", "category": "text", "messages": [turn("user", "What is it?")], "images": []}
    write_jsonl(folder / "samples" / "samples.jsonl", [row])
    with ChatServer(lambda body: response("H", "length") if is_probe(body) else reply) as server:
        samples = ImageSamples(folder / "samples", "a")
        return run_endpoint(folder / "run", samples, target, server, enable_thinking=True, **options), server


@pytest.mark.parametrize("parsed", [False, True])
def test_a_thought_is_learnt_as_it_was_generated_whether_the_server_takes_it_out_or_not(thinker, tmp_path, parsed):
    begin, target = thinker
    said = f"{begin}{THOUGHT}\n</think>\n\n{ANSWER}"
    tokens = len(AutoTokenizer.from_pretrained(target.path / "model")(said + "<|im_end|>")["input_ids"])
    reply = response(ANSWER if parsed else said, usage={"completion_tokens": tokens})
    if parsed:
        reply["choices"][0]["message"]["reasoning_content"] = THOUGHT
    stage, server = ask(tmp_path, target, reply)
    assert {"cat": [said]} == answers_of(stage)
    assert [0] == stage.metric("regenerate/retokenised_differently")
    assert [tokens] == stage.metric("regenerate/tokens")
    assert [{"enable_thinking": True}] == [body["chat_template_kwargs"] for body in server.conversations]


def test_a_thought_that_was_cut_stays_open(thinker, tmp_path):
    begin, target = thinker
    reply = response("", "length", usage={"completion_tokens": 5})
    reply["choices"][0]["message"] |= {"content": None, "reasoning": THOUGHT}
    stage, _ = ask(tmp_path, target, reply, finish_reasons=("stop", "length"), min_answer_tokens=1)
    assert {"cat": [f"{begin}{THOUGHT}"]} == answers_of(stage)


def test_another_count_of_tokens_tells_an_answer_whose_text_is_not_all_that_was_said(thinker, tmp_path):
    begin, target = thinker
    said = f"{begin}{THOUGHT}\n</think>\n\n{ANSWER}"
    tokens = len(AutoTokenizer.from_pretrained(target.path / "model")(said + "<|im_end|>")["input_ids"])
    stage, _ = ask(tmp_path, target, response(said, usage={"completion_tokens": tokens + 1}))
    assert [1] == stage.metric("regenerate/retokenised_differently")


def test_without_usage_tokens_are_counted_here_and_nothing_is_compared(thinker, tmp_path):
    begin, target = thinker
    said = f"{begin}{THOUGHT}\n</think>\n\n{ANSWER}"
    tokens = len(AutoTokenizer.from_pretrained(target.path / "model")(said + "<|im_end|>")["input_ids"])
    stage, _ = ask(tmp_path, target, response(said))
    assert [tokens] == stage.metric("regenerate/tokens")
    assert [0] == stage.metric("regenerate/retokenised_differently")


def test_an_answer_that_the_server_held_back_is_dropped_by_its_finish_reason(thinker, tmp_path):
    _, target = thinker
    with pytest.raises(DataError, match="1  finish reason content_filter"):
        ask(tmp_path, target, response("I may", "content_filter"))
