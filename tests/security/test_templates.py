"""Chat templates that render for ever, write without end, or need all memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_stage import FakeStage
from toy_ops import PROJECT

from dsl.errors import DataError
from ops.artifacts import ImageSamples
from ops.lib.data.sample_account import Unusable
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import CHAT_TEMPLATE, write_builtin_processor
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.rendering import LONGEST
from ops.tokenize_chat.run import tokenize_chat

SECONDS = 0.3
SLOW_SAMPLE = "{% if 'slow' in messages[0]['content'][0]['text'] %}@{% endif %}" + CHAT_TEMPLATE
LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
COUNTS = (
    "{% for a in range(200) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}{% set text = message.content[0].text %}"
    "{{ text | length }} {{ text }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
ENDLESS = {
    "nested loops": LOOPS,
    "one operation that Python cannot interrupt": "{% set n = 9 ** 9 %}{{ 9 ** n }}",
    "constants that are computed when the template is compiled": "{{ 9 ** (9 ** 9) }}",
    "a product of texts": "{{ 'x' * 10 ** 11 }}",
    "a list that doubles": "{% set n = namespace(l=[1]) %}{% for _ in range(99) %}{% set n.l = 2 * n.l %}{% endfor %}",
}
ANSWERED = {
    "a range without end": ("{% for a in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "a text of gigabytes": (f"{{{{ 'x' * {LONGEST + 1} }}}}", "chat template writes too much text"),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "an attribute that leads out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "a division by zero": ("{{ 1 // 0 }}", "by zero"),
    "loops that Python cannot compile": ("{% for a in [1] %}" * 99 + "{% endfor %}" * 99, "levels of indentation"),
}


def chat(text):
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role in ("user", "assistant")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    write_builtin_processor(folder, [chat("a few words")], 340)
    return folder


def encoder(folder, template, seconds=SECONDS):
    processor = load_processor(str(folder))
    processor.tokenizer.chat_template = template
    return ChatEncoder(processor, render_seconds=seconds)


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_without_end_fails_with_its_name_and_that_of_the_sample(folder, template):
    started = time.monotonic()
    with pytest.raises(DataError, match=r'^sample "a\\n1": rendering the chat template .* needs more than') as raised:
        encoder(folder, template).encode_batch([chat("hello")], [()], ["a\n1"])
    assert str(folder) in str(raised.value)
    assert time.monotonic() - started < 120
    assert "hello" in encoder(folder, CHAT_TEMPLATE).template.render(chat("hello"))  # by another process


def test_the_time_of_a_sample_is_for_all_its_renderings_together(folder):
    """Each earlier answer needs another rendering, of a fifth of the time, where the template counts characters."""
    conversation = [message for _ in range(12) for message in chat("hello")]
    with pytest.raises(DataError, match=r'^sample "a": .* needs more than 0\.5 s of CPU time'):
        encoder(folder, COUNTS, 0.5).encode_batch([conversation], [()], ["a"])
    assert not isinstance(encoder(folder, COUNTS, 60.0).encode_batch([conversation], [()])[0], Unusable)


@pytest.mark.parametrize(("template", "why"), ANSWERED.values(), ids=ANSWERED.keys())
def test_a_template_that_fails_drops_its_sample(folder, template, why):
    (result,) = encoder(folder, template, 10.0).encode_batch([chat("hello")], [()])
    assert isinstance(result, Unusable) and why in f"{result.reason}: {result.detail}"


def test_the_node_fails_with_the_id_of_the_slow_sample(folder, tmp_path):
    stage = FakeStage(tmp_path, {"samples": ImageSamples(tmp_path, "")})
    rows = [{"id": f"s{n}", "split": "train", "images": [], "messages": chat("words " * 9)} for n in range(40)]
    rows[20]["messages"] = chat("slow words " * 9)
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    processor = load_processor(str(folder))
    processor.tokenizer.chat_template = SLOW_SAMPLE.replace("@", LOOPS)
    processor.save(tmp_path / "slow")
    slow = str(tmp_path / "slow")
    config = TokenizeChat(samples="@samples", processor=slow, min_loss_tokens=1, render_seconds=SECONDS)
    with pytest.raises(DataError, match=r'^sample "s20": .*slow needs more than 0\.3 s of CPU time'):
        tokenize_chat(config, stage)


PARENT = """
import posixpath, sys, time
from ops.lib.data.limited_process import LimitedProcess
process = LimitedProcess(posixpath.join)
assert [reply.result for reply in process.map("a", ["b", "c"])] == ["a/b", "a/c"]
print(process._process.pid, flush=True)
time.sleep(60)
"""


def test_the_process_ends_with_the_one_that_started_it():
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 120
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end
        time.sleep(0.02)
