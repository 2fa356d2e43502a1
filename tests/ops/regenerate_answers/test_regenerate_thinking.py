"""Targets that think: what they are asked, what they answer, and what is learnt of it. Answers that were cut."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from chat_server import ChatServer, TinyModel
from chat_templates import QWEN3, QWEN25_VL, QWEN35, marked, unmarked
from fake_stage import FakeStage, folder_digest
from family_checkpoints import make_checkpoint
from regenerate_cases import answers_of, make_target, run, run_endpoint, teach, turn
from tokenizers import AddedToken
from transformers import AutoTokenizer

from dsl.op import Ref
from ops.artifacts import ImageSamples, TargetModel, TokenShards
from ops.lib.data.files import read_json, write_jsonl
from ops.lib.data.sample_account import losses_of
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

TEMPLATES = {"qwen3": QWEN3, "qwen3.5": QWEN35}
QUESTIONS = {"cat": ("What is it?", "It has ears.", "A cat."), "line": ("Is it blue?", "Yes, all of it is.", "It is.")}
AGAIN = ("Sure?", "I look at it again.", "Very.")


@frozen
class Thinker:
    """A tiny text target that knows its thoughts and answers by heart."""

    artifact: TargetModel

    @property
    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.artifact.path / "model")

    def prompt_ids(self, messages, thinking):
        """The token ids of the prompt that serving renders."""
        plain = [{"role": m["role"], "content": m["content"][0]["text"]} for m in messages]
        text = self.tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        return self.tokenizer(text)["input_ids"]


def written(name, thinking, thought, answer):
    """The text that a target with this template writes after its generation prompt."""
    if not thinking:
        return answer
    return f"{'' if name == 'qwen3.5' else '<think>' + chr(10)}{thought}\n</think>\n\n{answer}"


def dialogues(name, thinking):
    """(turns before an answer, what is written there): one question each, and a second one to the first of them."""
    for question, thought, answer in QUESTIONS.values():
        yield [turn("user", question)], written(name, thinking, thought, answer)
    question, thought, answer = QUESTIONS["cat"]
    first = turn("assistant", written(name, thinking, thought, answer))
    yield [turn("user", question), first, turn("user", AGAIN[0])], written(name, thinking, *AGAIN[1:])


@pytest.fixture(scope="module", params=TEMPLATES)
def thinker(request, tmp_path_factory):
    """(name of the template, the target)."""
    tmp = tmp_path_factory.mktemp("thinker")
    checkpoint = make_checkpoint("qwen3", tmp / "checkpoint", lively=False, hidden_size=64, num_hidden_layers=3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.chat_template = unmarked(TEMPLATES[request.param])
    tokenizer.save_pretrained(checkpoint)
    untrained = make_target(tmp / "untrained", checkpoint)
    samples = [
        lesson(Thinker(untrained), messages, text, thinking)
        for thinking in (True, False)
        for messages, text in dialogues(request.param, thinking)
    ]
    loaded = Target.load(untrained)
    teach(loaded, samples, steps=100, lr=4e-3)
    loaded.model.save_pretrained(checkpoint)
    return request.param, Thinker(make_target(tmp / "trained", checkpoint))


def lesson(thinker, messages, text, thinking):
    prompt = thinker.prompt_ids(messages, thinking)
    answer = thinker.tokenizer(text + "<|im_end|>")["input_ids"]
    return TokenSample(
        id="lesson",
        category="text",
        input_ids=torch.tensor([*prompt, *answer]),
        loss_mask=torch.tensor([False] * len(prompt) + [True] * len(answer)),
        pixel_values=torch.empty(0, 0),
        image_grid_thw=torch.empty(0, 3, dtype=torch.int64),
        prompt_tokens=len(prompt),
    )


def samples_of(folder, *conversations):
    """Prompts only, apart from the answers of the data set between two questions."""
    folder.mkdir(parents=True)
    rows = (
        {"id": name, "split": "train", "category": "text", "messages": messages, "images": []}
        for name, messages in conversations
    )
    write_jsonl(folder / "samples.jsonl", rows)
    return ImageSamples(folder, folder_digest(folder))


def single_turns(folder):
    return samples_of(folder, *((name, [turn("user", question)]) for name, (question, _, _) in QUESTIONS.items()))


def tokenized(folder, samples, target, **options):
    stage = FakeStage(folder, {"samples": samples, "target": target})
    tokenize_chat(
        TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=1, preview_samples=0, **options), stage
    )
    return TokenReader(stage.artifact(TokenShards))


@pytest.mark.parametrize("thinking", [True, False])
def test_a_thinking_target_is_asked_as_serving_would(thinker, tmp_path, thinking):
    name, target = thinker
    config = RegenerateAnswers(samples=Ref("a"), target=Ref("b"), enable_thinking=thinking)
    prompts = Prompts.load(config, target.artifact, tmp_path)
    for messages, _ in dialogues(name, thinking):
        row = {"id": "a", "category": "text", "images": [], "messages": messages}
        assert target.prompt_ids(messages, thinking) == prompts.sample(row).input_ids.tolist()


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_and_answers_are_learnt_token_for_token_as_they_were_generated(thinker, tmp_path, thinking):
    name, target = thinker
    stage = run(tmp_path, single_turns(tmp_path / "in"), target.artifact, enable_thinking=thinking)
    assert {
        sample_id: [written(name, thinking, thought, answer)] for sample_id, (_, thought, answer) in QUESTIONS.items()
    } == answers_of(stage)
    assert [0] == stage.metric("regenerate/retokenised_differently")
    reader = tokenized(tmp_path / "tokens", stage.artifact(ImageSamples), target.artifact, enable_thinking=thinking)
    for index, record in enumerate(reader.records):
        question, thought, answer = QUESTIONS[record["id"]]
        expected = lesson(target, [turn("user", question)], written(name, thinking, thought, answer), thinking)
        sample = reader.sample(index)
        length = len(expected.input_ids)
        assert expected.input_ids.tolist() == sample.input_ids[:length].tolist()
        assert sample.input_ids[expected.loss_mask.nonzero()[:, 0]].tolist() == (
            sample.input_ids[sample.loss_mask].tolist()
        )


def test_of_several_turns_the_last_thought_alone_is_learnt(thinker, tmp_path):
    name, target = thinker
    question, thought, answer = QUESTIONS["cat"]
    messages = [turn("user", question), turn("assistant", "Who knows."), turn("user", AGAIN[0])]
    stage = run(tmp_path, samples_of(tmp_path / "in", ("cat", messages)), target.artifact, enable_thinking=True)
    last = written(name, True, *AGAIN[1:])
    assert {"cat": [written(name, True, thought, answer), last]} == answers_of(stage)
    reader = tokenized(
        tmp_path / "tokens", stage.artifact(ImageSamples), target.artifact, enable_thinking=True, train_on="last"
    )
    sample = reader.sample(0)
    assert f"{last}<|im_end|>" == target.tokenizer.decode(sample.input_ids[sample.loss_mask])
    assert thought not in target.tokenizer.decode(sample.input_ids)


def test_a_thought_that_was_cut_is_learnt_as_it_was_generated(thinker, tmp_path):
    name, target = thinker
    options = {"enable_thinking": True, "finish_reasons": ("stop", "length"), "drop_retokenised": True}
    stage = run(tmp_path, single_turns(tmp_path / "in"), target.artifact, max_new_tokens=4, **options)
    assert [0] == stage.metric("regenerate/retokenised_differently")
    assert set(QUESTIONS) == set(answers_of(stage))
    for contexts in ("whole", "served"):
        made = stage.artifact(ImageSamples)
        reader = tokenized(tmp_path / contexts, made, target.artifact, enable_thinking=True, contexts=contexts)
        for index, record in enumerate(reader.records):
            question, thought, answer = QUESTIONS[record["id"]]
            expected = lesson(target, [turn("user", question)], written(name, True, thought, answer), True)
            sample = reader.sample(index)
            assert 4 == record["loss_tokens"] == int(sample.loss_mask.sum())
            assert expected.input_ids[expected.loss_mask][:4].tolist() == sample.input_ids[sample.loss_mask].tolist()


def test_a_thought_that_a_server_cut_is_counted_and_dropped_on_demand_where_it_tells_no_ids(thinker, tmp_path, capsys):
    name, target = thinker
    samples, model = single_turns(tmp_path / "in"), TinyModel(target.artifact)
    options = {"enable_thinking": True, "finish_reasons": ("stop", "length")}

    def run(*arguments, **options):
        with ChatServer(model) as server:
            return run_endpoint(*arguments, server, **options)

    texts = {key: written(name, True, *said[1:]) for key, said in QUESTIONS.items()}
    thoughts = {key: len(target.tokenizer(text.split("</think>")[0])["input_ids"]) for key, text in texts.items()}
    shorter, longer = sorted(thoughts, key=thoughts.__getitem__)
    assert thoughts[shorter] + 2 <= thoughts[longer]
    # In the words behind the shorter thought, and in the blanks behind the longer one, which the template adds.
    stage = run(tmp_path / "all", samples, target.artifact, max_new_tokens=thoughts[shorter] + 4, **options)
    assert {shorter, longer} == set(answers_of(stage))
    assert [1] == stage.metric("regenerate/retokenised_differently")
    said = capsys.readouterr().out
    lost = "50% of the answers (1 of 2) are tokenised otherwise than generated: the draft is trained on tokens that the"
    assert [True, "set drop_retokenised = true" in said] == [f"warning: {lost} target did not generate" in said, True]
    assert ["answers"] == [loss.of for loss in losses_of(read_json(stage.out_dir / "summary.json"))]
    stage = run(
        tmp_path / "drop",
        samples,
        target.artifact,
        max_new_tokens=thoughts[shorter] + 4,
        drop_retokenised=True,
        **options,
    )
    assert {shorter} == set(answers_of(stage))
    assert {"tokenised otherwise than generated": 1} == read_json(stage.out_dir / "summary.json")["dropped"]
    assert "warning: 50% of the samples (1 of 2) are dropped: 1 tokenised otherwise than" in capsys.readouterr().out
    stage = run(tmp_path / "both", samples, target.artifact, max_new_tokens=thoughts[shorter] - 2, **options)
    assert [2] == stage.metric("regenerate/retokenised_differently")
    [loss] = losses_of(read_json(stage.out_dir / "summary.json"))
    assert loss.remedy.startswith("remove the cause, since drop_retokenised = true would drop 2 of 2 samples; ")


def test_an_answer_that_lacks_its_end_alone_is_learnt_without_it(thinker, tmp_path):
    name, target = thinker
    lengths = {
        key: len(target.tokenizer(written(name, True, *said[1:]))["input_ids"]) for key, said in QUESTIONS.items()
    }
    stage = run(
        tmp_path,
        single_turns(tmp_path / "in"),
        target.artifact,
        enable_thinking=True,
        finish_reasons=("stop", "length"),
        max_new_tokens=max(lengths.values()),
    )
    reader = tokenized(tmp_path / "tokens", stage.artifact(ImageSamples), target.artifact, enable_thinking=True)
    expected = {key: length + (length < max(lengths.values())) for key, length in lengths.items()}
    assert expected == {record["id"]: record["loss_tokens"] for record in reader.records}


CUT_TEMPLATES = {"qwen2.5-vl": QWEN25_VL, "qwen3": QWEN3}


@pytest.mark.parametrize("form", [unmarked, marked])
@pytest.mark.parametrize("name", CUT_TEMPLATES)
def test_the_end_of_an_answer_that_was_cut_is_not_learnt(name, form, tmp_path):
    checkpoint = make_checkpoint("qwen3" if name == "qwen3" else "qwen2_5_vl", tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = form(CUT_TEMPLATES[name])
    tokenizer.save_pretrained(checkpoint)
    messages = [
        turn("user", "What is it?"),
        turn("assistant", "It is a"),
        turn("user", "Sure?"),
        turn("assistant", "I"),
    ]
    options = {"enable_thinking": False} if name == "qwen3" else {}
    processor = load_processor(str(checkpoint))
    learnt = {}
    for cut in ((), (False, False), (True, False), (False, True), (True, True)):
        encoded = ChatEncoder(processor, **options).encode(messages, cut=cut)
        learnt[cut] = tokenizer.decode(encoded.input_ids[encoded.loss_mask])
        assert encoded.loss_tokens == int(encoded.loss_mask.sum())
    last = ChatEncoder(processor, train_on="last", **options).encode(messages, cut=(False, True))
    assert "I" == tokenizer.decode(last.input_ids[last.loss_mask])
    end = "<|im_end|>"
    assert {
        (): f"It is a{end}I{end}",
        (False, False): f"It is a{end}I{end}",
        (True, False): f"It is aI{end}",
        (False, True): f"It is a{end}I",
        (True, True): "It is aI",
    } == learnt
