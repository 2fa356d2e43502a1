"""tau by kind of token, and every answer of held-out conversations asked in the context of a server."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from agent_rows import with_template, write_agent_processor
from agent_templates import EXTENDS, TEMPLATES
from attrs import evolve
from chat_samples import png, row, run_tokenize, write_rows
from evaluate_cases import evaluate_config, make_draft, run_evaluate, small_draft
from fake_stage import FakeStage
from lively_target import make_lively

from dsl.errors import DataError
from ops.artifacts import TargetModel, TokenShards
from ops.evaluate.benchmark_rows import Benchmark
from ops.evaluate.intervals import missing_kinds
from ops.evaluate.lengths import StoredPrompt, check_lengths, stored_lengths_mistake
from ops.evaluate.op import Evaluate
from ops.evaluate.plan import asked_prompts
from ops.evaluate.prompts import Prompt, choose_prompts, encoder_of, read_benchmark
from ops.evaluate.run import data_kinds
from ops.evaluate.statistics import steps_of, tau_by
from ops.evaluate.summary import Summary
from ops.evaluate.turns import Answered, PromptResult
from ops.lib.data.files import json_line, read_json, read_jsonl
from ops.lib.data.token_shards import KINDS, TokenReader
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.forecasts import TokensForecast
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.encode import ChatEncoder
from ops.tools.diagnose.bench import spread_samples


def say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


TALK = [say("user", "Say one."), say("assistant", "One."), say("user", "Say two."), say("assistant", "Two.")]
LONG = [*TALK, say("user", "And three?"), say("assistant", "Three, and that is all.")]
SHORT = [say("user", "Hello"), say("assistant", "Hello!")]


@pytest.fixture(scope="module")
def lively(target, tmp_path_factory) -> TargetModel:
    return make_lively(target, tmp_path_factory.mktemp("lively") / "target")


@pytest.fixture(scope="module")
def draft(lively, tmp_path_factory):
    return make_draft(small_draft(Target.load(lively)), tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def rows():
    return [row("long", LONG), row("seen", TALK, png(28, 28)), row("short", SHORT)]


@pytest.fixture(scope="module")
def served(tokens, rows, tmp_path_factory) -> TokenShards:
    folder = tmp_path_factory.mktemp("served")
    samples = write_rows(folder / "in", [row("train", SHORT), *({**each, "split": "test"} for each in rows)])
    options = {"processor": str(tokens.path / "processor"), "contexts": "served", "min_loss_tokens": 1}
    return run_tokenize(folder, samples, max_dropped=0, **options).artifact(TokenShards)


def test_every_answer_is_asked_behind_the_messages_before_it(served, rows):
    reader = TokenReader(served, "test")
    prompts = {prompt.id: prompt for prompt in Prompt.of_each_answer(reader)}
    assert ["long/1", "long/2", "long/3", "seen/1", "seen/2", "short"] == list(prompts)
    stored = [prompt for record in reader.records for prompt in StoredPrompt.each(record)]
    assert [(prompt.origin, prompt.length) for prompt in prompts.values()] == [
        (prompt.origin, prompt.length) for prompt in stored
    ]
    encoder = ChatEncoder(load_processor(str(served.path / "processor")))
    for each in rows:
        messages = [*each["messages"]]
        if each["image"]:
            messages[0] = {**messages[0], "content": [{"type": "image"}, *messages[0]["content"]]}
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, place in enumerate(answers):
            prompt = prompts[f"{each['name']}/{turn + 1}" if len(answers) > 1 else each["name"]]
            sample = prompt.sample()
            ids = sample.prompt().input_ids
            assert (turn, len(ids), len(ids)) == (prompt.turn, prompt.length, sample.prompt_tokens)
            placeholder = reader.info["image_token_id"]
            single = [
                token
                for token, before in zip(ids, [None, *ids], strict=False)
                if token != before or token != placeholder
            ]
            assert encoder.prompt(messages[:place]).tolist() == [int(token) for token in single]


def test_a_plan_refuses_lengths_that_an_evaluation_of_each_answer_would_refuse_and_no_others(served):
    reader = TokenReader(served, "test")
    prompts = Prompt.of_each_answer(reader)
    longest = max(prompts, key=lambda prompt: prompt.length)
    known = TokensForecast.read(served.path, "t", longest=max(record["tokens"] for record in reader.records))
    text = {"max_position_embeddings": longest.length + 20, "rope_theta": 10000.0}
    check_lengths(prompts, text, None, 19)
    assert "" == stored_lengths_mistake(known, "test", "each", None, text, None, 19)
    with pytest.raises(DataError, match=f"  {longest.origin}: {longest.length} "):
        check_lengths(prompts, text, None, 20)
    found = stored_lengths_mistake(known, "test", "each", None, text, None, 20)
    assert found.startswith("1 of 6 prompts") and f"({longest.origin}: {longest.length} + 21 = " in found
    # Which prompts are chosen depends on which of them have images, which samples.jsonl does not say.
    assert "" == stored_lengths_mistake(known, "test", "each", 1, text, None, 1_000_000)


def test_an_evaluation_of_each_answer_reports_all_turns(served, draft, lively, tmp_path):
    stage = run_evaluate(
        tmp_path, draft, lively, served, prompts="each", max_prompts=None, max_new_tokens=6, random_draft=False
    )
    report = read_json(stage.out_dir / "report.json")
    assert (6, "every") == (report["prompts"], report["turns"])
    assert {"0": 3, "1": 2, "2": 1} == {turn: tau["prompts"] for turn, tau in report["tau_by_turn"].items()}
    assert {"errors": 0, "ties": 0} == report["lossless"]
    for table in ("tau_by_turn", "tau_by_context", "tau_by_kind"):
        for part in ("generated", "steps"):
            assert report["tau"]["all"][part] == sum(tau[part] for tau in report[table].values())
    asked = {line["id"]: line["prompt_tokens"] for line in read_jsonl(stage.out_dir / "prompts.jsonl")}
    assert asked["long/1"] < asked["long/2"] < asked["long/3"]
    last = run_evaluate(
        tmp_path / "last", draft, lively, served, max_prompts=None, max_new_tokens=6, random_draft=False
    )
    lines = {line["id"]: line for line in read_jsonl(last.out_dir / "prompts.jsonl")}
    assert {"long": asked["long/3"], "seen": asked["seen/2"], "short": asked["short"]} == {
        name: line["prompt_tokens"] for name, line in lines.items()
    }
    assert {"0": 1, "1": 1, "2": 1} == {
        turn: tau["prompts"] for turn, tau in read_json(last.out_dir / "report.json")["tau_by_turn"].items()
    }


def test_a_conversation_in_several_samples_keeps_its_turns_and_is_asked_once_for_its_last_answer(tokens, tmp_path):
    """A template that shows only the last two messages: each answer has a context of its own."""
    processor = tmp_path / "processor"
    shutil.copytree(tokens.path / "processor", processor)
    template = (
        "{% for m in messages[-2:] if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
        "{{ p.text }}{% endfor %}{% if m.role == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "template").write_text(template)
    rows = [row("long", LONG), row("long@4", SHORT), row("short", SHORT), row("me@2", SHORT)]
    samples = write_rows(tmp_path / "in", [row("train", SHORT), *({**each, "split": "test"} for each in rows)])
    options = {"processor": str(processor), "chat_template": str(tmp_path / "template"), "contexts": "served"}
    tokens = run_tokenize(tmp_path, samples, min_loss_tokens=1, **options).artifact(TokenShards)
    reader = TokenReader(tokens, "test")
    turns = {prompt.id: prompt.turn for prompt in Prompt.of_each_answer(reader)}
    assert {"long@1": 0, "long@2": 1, "long@3": 2, "long@4": 0, "short": 0, "me@2": 0} == turns
    last = Prompt.held_out(reader)
    assert {"long@3": 2, "long@4": 0, "short": 0, "me@2": 0} == {prompt.id: prompt.turn for prompt in last}
    assert [prompt.id for prompt in last] == [sample.id for sample in spread_samples(reader, 99)]
    for prompts, asked in (("last", 4), ("each", 6)):
        assert {"text": asked} == asked_prompts(evaluate_config(prompts=prompts), tokens.path)
    ids = [record["id"] for record in reader.records]
    assert [reader.sample(ids.index(prompt.id)).prompt_tokens for prompt in last] == [prompt.length for prompt in last]


def test_prompts_whose_own_ids_look_like_those_of_contexts_are_all_asked(tokens, tmp_path):
    rows = [row("me@1", LONG[:1]), row("me@2", LONG[:3]), row("me@3", LONG[:5])]
    samples = write_rows(tmp_path / "in", [{**each, "split": "test"} for each in rows])
    options = {"processor": str(tokens.path / "processor"), "contexts": "served", "prompts_only": True}
    reader = TokenReader(run_tokenize(tmp_path, samples, **options).artifact(TokenShards), "test")
    assert {"me@1": 0, "me@2": 1, "me@3": 2} == {prompt.id: prompt.turn for prompt in Prompt.held_out(reader)}


def test_tokens_that_do_not_say_where_answers_begin_are_refused(tokens):
    with pytest.raises(DataError, match='tokenise them with contexts = "served", or set prompts = "last"'):
        Prompt.of_each_answer(TokenReader(tokens, "test"))


@pytest.fixture
def late(tokens, tmp_path) -> TokenShards:
    """A held-out conversation whose image stands behind its first answer."""
    later = [*TALK[:2], {"role": "user", "content": [{"type": "image"}, *TALK[2]["content"]]}, TALK[3]]
    rows = [row("train", SHORT), {**row("late", TALK, png(28, 28)), "split": "test"}]
    samples = write_rows(tmp_path / "in", rows)
    lines = [dict(line) for line in read_jsonl(tmp_path / "in" / "samples.jsonl")]
    lines[1]["messages"] = later
    (tmp_path / "in" / "samples.jsonl").write_text("".join(map(json_line, lines)), encoding="utf-8")
    options = {"processor": str(tokens.path / "processor"), "contexts": "served", "min_loss_tokens": 1}
    return run_tokenize(tmp_path, samples, **options).artifact(TokenShards)


def test_a_prompt_has_the_images_before_its_answer(late):
    first, second = Prompt.of_each_answer(TokenReader(late, "test"))
    whole = TokenReader(late, "test").sample(0)
    assert [("late/1", "text", False), ("late/2", "image", True)] == [
        (prompt.id, prompt.category, prompt.has_images) for prompt in (first, second)
    ]
    before, behind = first.sample(), second.sample()
    assert (0, 0) == (len(before.image_grid_thw), len(before.pixel_values))
    assert not before.has_images and not (before.prompt().input_ids == TokenReader(late).info["image_token_id"]).any()
    assert torch.equal(whole.pixel_values, behind.pixel_values)
    assert torch.equal(whole.image_grid_thw, behind.image_grid_thw)


def test_an_image_behind_an_earlier_answer_is_refused_where_one_tensor_has_all_images(late):
    """As other processors than Qwen's make them."""
    reader = TokenReader(late, "test")
    reader.info["images_of"] = "gemma3"
    with pytest.raises(DataError, match=r"sample late has an image behind its first answer, .* a gemma3 processor"):
        Prompt.of_each_answer(reader)
    assert 1 == len(Prompt.held_out(reader))


def test_each_answer_needs_contexts_and_no_benchmark():
    def above(*edges: str) -> dict[str, Any]:
        return {"contexts": "whole"} if edges == ("tokens",) else {}

    values = {"prompts": "each", "benchmark": None}
    wrong = Evaluate.mistakes_with_nodes_above(values, above)
    assert {"prompts": '"each" needs contexts = "served" in the node of tokens'} == wrong
    assert {} == Evaluate.mistakes_with_nodes_above(values, lambda *_: {})
    wrong = Evaluate.mistakes_with_nodes_above(values | {"benchmark": "a.jsonl"}, above)
    assert "about the split" in wrong["prompts"]
    assert {} == Evaluate.mistakes_with_nodes_above({"prompts": "last"}, above)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The kinds of tokens of a target whose thoughts are in <think>, and the ids of a text."""
    base = write_agent_processor(tmp_path_factory.mktemp("processor") / "base")
    processor = with_template(base, EXTENDS, ["<|im_end|>"])
    encoder = ChatEncoder(processor)
    return encoder.kinds, lambda text: encoder.processor.tokenizer(text)["input_ids"]


def test_tau_by_kind_equals_a_walk_through_the_tokens_and_adds_up_to_all(kinds):
    kinds, ids_of = kinds
    texts = [
        "<think>I must ask. It says clear.</think>Sunny, 20 degrees.<tool_call>get_weather Paris</tool_call><|im_end|>",
        "Rome: rain. Sunny, and again sunny.<|im_end|>",
        "<think>It is a thought without an end and so on",
    ]
    block, answers = 4, []
    for number, text in enumerate(texts):
        ids, accepted = ids_of(text), []
        while sum(accepted) + len(accepted) < len(ids) - 1:
            accepted.append((len(accepted) + number) % block)
        answers.append(Decoded(tuple(ids), accepted=tuple(accepted)))
    of_tokens = [kinds.of(answer.tokens, ()) for answer in answers]
    config = evaluate_config(max_new_tokens=200)
    prompts = [Prompt(f"{n}", f"{n}", "text", 10, False, lambda: None) for n in range(3)]
    results = [
        PromptResult(prompt.id, "text", answer, answer, None) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    summary = Summary(
        config=config,
        use=DraftUse(target_layer_ids=(1,), mask_token_id=0, block_size=block),
        trained_block_size=block,
        answered=Answered(0.0, 2, block, prompts, results, [], []),
        further=[],
        kinds=of_tokens,
        inputs={},
        enable_thinking=None,
    )
    tables = summary.report()
    slow: dict[str, list[int]] = {}
    for answer, each in zip(answers, of_tokens, strict=True):
        for anchor, tokens in steps_of(answer):
            sums = slow.setdefault(KINDS[each[anchor]], [0, 0])
            sums[0] += tokens
            sums[1] += 1
    assert {"reasoning", "text", "call"} == slow.keys()
    assert slow == {kind: [tau["generated"], tau["steps"]] for kind, tau in tables["tau_by_kind"].items()}
    assert sum(answer.generated for answer in answers) == sum(
        tau["generated"] for tau in tables["tau_by_kind"].values()
    )
    every = tau_by(answers, lambda *_: "all", 10, 0)["all"]
    assert every.steps == sum(tau["steps"] for tau in tables["tau_by_kind"].values())
    assert "kinds_without_steps" not in tables and [] == missing_kinds(tables)
    silent = evolve(summary, kinds=[[min(kind, 2) for kind in each] for each in of_tokens])
    known = evolve(silent, data_kinds={"all": 9, "reasoning": 2, "text": 9, "call": 7, "end": 9}).report()
    assert {"call": 7} == known["kinds_without_steps"]
    (sentence,) = missing_kinds(known)
    assert sentence.startswith("call: no steps; 7 of 9 samples of the split have some, and none of the target's")
    assert "kinds_without_steps" not in silent.report()


def test_the_kinds_of_the_data_are_counted_by_sample(served, tokens):
    assert {"all": 3, "none": 3, "text": 3, "end": 3} == data_kinds(TokenReader(served, "test"))
    assert {} == data_kinds(TokenReader(tokens, "test"))


def test_where_every_sample_has_one_answer_each_asks_no_more_than_last_and_says_so(tokens, draft, lively, tmp_path):
    held_out = [{**each, "split": "test"} for each in (row("long", LONG), row("b", SHORT))]
    samples = write_rows(tmp_path / "in", [row("train", SHORT), *held_out])
    options = {"processor": str(tokens.path / "processor"), "contexts": "served", "min_loss_tokens": 1}
    last = run_tokenize(tmp_path, samples, train_on="last", **options).artifact(TokenShards)
    stage = FakeStage(tmp_path / "eval", {"tokens": last})
    said: list[str] = []
    stage.info = said.append
    target = Target.load(lively)
    asked = choose_prompts(evaluate_config(prompts="each"), stage, target, encoder_of(last, target))
    assert ["long", "b"] == [prompt.id for prompt in asked]
    assert any('prompts = "each" asks what "last" asks: each of the 2 conversations' in text for text in said)


def test_the_history_of_a_benchmark_is_shown_as_a_server_shows_it(tmp_path):
    base = write_agent_processor(tmp_path / "base")
    encoder = ChatEncoder(with_template(base, TEMPLATES["strips"].text, TEMPLATES["strips"].eos))
    thought = {**say("assistant", "<think>Hm.</think>One.")}
    messages = [TALK[0], thought, TALK[2]]
    file = tmp_path / "bench.jsonl"
    texts = [{"role": each["role"], "content": each["content"][0]["text"]} for each in messages]
    file.write_text(json_line({"id": "a", "category": "talk", "messages": texts}))
    (prompt,) = read_benchmark(Benchmark(file), encoder)
    wanted = encoder.served_prompt(messages, (), True)
    assert wanted.input_ids.tolist() == prompt.sample().input_ids.tolist()
    assert prompt.length == len(wanted.input_ids)
    assert wanted.input_ids.tolist() != encoder.prompt(messages).tolist()
