"""A chat template of the user's own reaches everything that renders a prompt for the target, and serving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve
from chat_samples import conversation, run_tokenize, write_samples
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from written_files import HEAD, INGEST, INJECT, mistakes, write

from dsl.errors import DataError
from dsl.op import Ref
from dsl.read_toml import read_graph
from executor.keys.node_key import externals_of
from ops.artifacts import ImageSamples, TargetModel, TokenShards
from ops.lib.vision.chat_template import read_chat_template
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

ASK = {"role": "user", "content": [{"type": "text", "text": "What is it?"}]}
MARK = "<|im_start|>system\nOwn.<|im_end|>\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint with its template in every place where transformers looks for one."""
    folder = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("family") / "checkpoint")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for name in ("tokenizer_config.json", "processor_config.json"):
        settings = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**settings, "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def own(checkpoint, tmp_path_factory) -> Path:
    """The checkpoint's template behind a system turn of its own."""
    file = tmp_path_factory.mktemp("own") / "own.jinja"
    file.write_bytes((MARK + (checkpoint / "chat_template.jinja").read_text()).replace("\n", "\r\n").encode())
    return file


@pytest.fixture(scope="module")
def target(checkpoint, own, tmp_path_factory) -> TargetModel:
    stage = FakeStage(tmp_path_factory.mktemp("target"))
    load_target(LoadTarget(checkpoint=str(checkpoint), chat_template=str(own)), stage)
    return stage.artifact(TargetModel)


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> ImageSamples:
    talks = [conversation(("user", f"Say {number}."), ("assistant", f"It is {number}.")) for number in range(4)]
    return write_samples(tmp_path_factory.mktemp("samples") / "samples", talks)


def test_a_targets_own_template_is_the_only_one_in_its_checkpoint(checkpoint, target, own):
    model, text = target.path / "model", read_chat_template(str(own))
    assert MARK + (checkpoint / "chat_template.jinja").read_text() == text
    assert text == AutoTokenizer.from_pretrained(model).chat_template
    assert text == Qwen3VLProcessor.get_processor_dict(str(model))[0]["chat_template"]
    assert text == load_processor(str(model)).tokenizer.chat_template
    for name in ("tokenizer_config.json", "processor_config.json"):
        assert "chat_template" not in json.loads((model / name).read_text())
    assert not (model / "chat_template.json").exists()


def test_answers_and_tokens_are_rendered_with_it_by_target_and_by_processor_alike(
    checkpoint, target, own, samples, tmp_path
):
    config = RegenerateAnswers(samples=Ref("inject"), target=Ref("target"))
    by_target = Prompts.load(config, target, samples.path)
    server = {"backend": "endpoint", "endpoint": "http://host/v1", "model": "m", "processor": str(checkpoint)}
    config = RegenerateAnswers(samples=Ref("inject"), chat_template=str(own), **server)
    by_processor = Prompts.load(config, None, samples.path)
    for prompts in (by_target, by_processor):
        assert prompts.encoder.template.render([ASK], prompt=True).startswith(MARK)
    assert (
        not Prompts.load(evolve(config, chat_template=None), None, samples.path)
        .encoder.template.render([ASK])
        .startswith(MARK)
    )

    stage = FakeStage(tmp_path / "target", {"samples": samples, "target": target})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), target=Ref("target"), min_loss_tokens=1), stage)
    tokens = stage.artifact(TokenShards)
    options = {"processor": str(checkpoint), "chat_template": str(own), "min_loss_tokens": 1}
    other = run_tokenize(tmp_path / "processor", samples, **options).artifact(TokenShards)
    shards = [(made.path / "train-00000.safetensors").read_bytes() for made in (tokens, other)]
    assert shards[0] == shards[1]
    saved = load_processor(str(tokens.path / "processor")).tokenizer
    assert saved.chat_template == read_chat_template(str(own))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n{% if %}", "own.jinja:2: not a chat template: Expected an expression"),
        (b"{% for m in messages %}", "own.jinja:1: not a chat template: Unexpected end of template"),
        (b" \n", "own.jinja: is empty; chat_template must name"),
        (b"\xff", "own.jinja: cannot be read as a chat template: "),
        (b"x" * (1 << 20) + b"x", "own.jinja: larger than 1 MiB"),
        (b"x" * (1 << 20) + "é".encode(), "own.jinja: larger than 1 MiB"),
        (b"{{" + b"(" * 100_000, "own.jinja: not a chat template: nested too deeply"),
    ],
    ids=["expression", "unclosed", "empty", "not-utf-8", "large", "large-inside-a-character", "deep"],
)
def test_a_file_that_is_no_template_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "own.jinja").write_bytes(content)
    with pytest.raises(DataError) as error:
        read_chat_template(str(tmp_path / "own.jinja"))
    assert str(error.value).startswith(f"{tmp_path}/{message}")


def test_generation_marks_and_loop_controls_are_part_of_templates(tmp_path):
    text = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "own.jinja").write_text(text)
    assert text == read_chat_template(str(tmp_path / "own.jinja"))


TARGET = '[node.target]\nop = "load_target"\ncheckpoint = "."\n'
TOKENIZE = '[node.tokenize]\nop = "tokenize_chat"\nsamples = "@inject"\n'
REGENERATE = '[node.regenerate]\nop = "regenerate_answers"\nsamples = "@inject"\ntarget = "@target"\n'


def test_a_file_of_a_pipeline_is_in_the_key_and_a_target_has_its_own(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    own = 'chat_template = "own.jinja"\n'
    graph = read_graph(write(tmp_path, HEAD + INGEST + INJECT + TOKENIZE + own + TARGET + own))
    for name in ("tokenize", "target"):
        assert tmp_path / "own.jinja" == externals_of(graph.nodes[name])["chat_template"]
    both = HEAD + INGEST + INJECT + TARGET + TOKENIZE + 'target = "@target"\n' + own + REGENERATE + own
    said = "\n".join(mistakes(tmp_path, both))
    assert "target and chat_template are both given: give the template to the target's load_target" in said
    assert "chat_template goes with a processor: a target has its own, which load_target can replace" in said
