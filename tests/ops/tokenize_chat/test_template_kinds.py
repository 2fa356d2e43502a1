"""Templates that write the day, with a fixed one, and those of gpt-oss, whose answers are in channels."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from any_targets import any_checkpoint
from attrs import evolve
from chat_samples import conversation, write_samples
from fake_stage import FakeStage
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils
from written_files import HEAD, write

from dsl.errors import ConfigError, DataError
from dsl.estimate import PlanContext
from dsl.launch import Launch
from dsl.op import Ref
from dsl.read_toml import read_graph
from executor.keys.node_key import key_config
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.files import read_json
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.model import target_info
from ops.lib.vision.template_kinds import day_warning, thought_warning, with_day
from ops.load_target.op import LoadTarget
from ops.load_target.plan import estimate, missing_here
from ops.load_target.run import load_target
from ops.regenerate_answers.conversations import SPECIAL_IN_ANSWER, Conversation, Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import estimate as estimate_answers
from ops.regenerate_answers.shards import Answer
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.rendering import render
from ops.tokenize_chat.run import tokenize_chat
from ops.tools.init.target import measured, read_target

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOCK = 'Today: {{ strftime_now("%Y-%m-%d") }}\n' + TURNS
LLAMA = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- endif %}\n{%- endif %}\n'
    '{{- "Today: " + date_string + "\\n" }}\n' + TURNS
)
ASK = {"role": "user", "content": [{"type": "text", "text": "What is it?"}]}
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
HARMONY = """{%- for m in messages %}
    {%- if m.role == "assistant" %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if "thinking" in m %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}
        {%- endif %}
    {%- else %}
        {{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant" }}
{%- endif %}"""
SHORT = {"max_prompt_tokens": 200, "max_new_tokens": 100}
CONTEXT = PlanContext(launch=Launch(), inputs={}, artifact=None, root=Path(), free_disk=0)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return any_checkpoint("llama", tmp_path / "checkpoint", vocab_size=400)


def with_template(checkpoint: Path, template: str) -> Path:
    (checkpoint / "chat_template.jinja").write_text(template)
    return checkpoint


def loaded(checkpoint: Path, folder: Path, **config) -> TargetModel:
    stage = FakeStage(folder)
    load_target(LoadTarget(checkpoint=str(checkpoint), **config), stage)
    return stage.artifact(TargetModel)


def prompts_of(target: TargetModel) -> Prompts:
    return Prompts.load(RegenerateAnswers(samples=Ref("inject"), target=Ref("target"), **SHORT), target, target.path)


def on_day(monkeypatch, day: int) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 5, day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize("template", [CLOCK, LLAMA], ids=["clock", "date_string"])
def test_a_template_that_writes_the_day_gives_the_same_on_two_days_and_what_template_date_says(
    template, checkpoint, tmp_path, monkeypatch
):
    with_template(checkpoint, template)
    fixed = loaded(checkpoint, tmp_path / "default")
    assert "2025-01-01" == target_info(fixed)["template_date"]
    dated = loaded(checkpoint, tmp_path / "dated", template_date="2026-01-31")
    days = {"2025-01-01", "01 Jan 2025"}, {"2026-01-31", "31 Jan 2026"}
    ids = []
    for target, expected in zip((fixed, dated), days, strict=True):
        prompts = prompts_of(target)
        text = prompts.encoder.template.render([ASK], prompt=True)
        assert text.partition("Today: ")[2].partition("\n")[0] in expected
        ids.append(prompts.encoder.prompt([ASK]).tolist())
        assert [] == prompts.warnings

        own = AutoTokenizer.from_pretrained(target.path / "model")
        shared = (own.chat_template, dict(own.special_tokens_map))
        here, served = set(), set()
        for day in (1, 2):
            on_day(monkeypatch, day)
            messages = [{"role": "user", "content": "What is it?"}]
            item = {
                "messages": messages,
                "tools": None,
                "documents": None,
                "renderings": [[[0], {"add_generation_prompt": True}, False]],
            }
            here.add(render(shared, item)["texts"][0][1])
            served.add(own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        assert {text} == here
        assert served == here
    assert ids[0] != ids[1]


def test_plan_init_and_the_node_say_which_day_a_template_has(checkpoint, tmp_path, capsys):
    config = LoadTarget(checkpoint=str(with_template(checkpoint, CLOCK)))
    [note] = estimate(config, CONTEXT).notes
    said = f"the chat template of {checkpoint} writes today's date; template_date = 2025-01-01 is used"
    assert note.startswith(said) and "warning" not in note
    assert f"target: {note}" in measured(read_target(str(checkpoint))).lines
    loaded(checkpoint, tmp_path / "default")
    assert note in capsys.readouterr().out

    assert () == estimate(evolve(config, template_date="2026-01-31"), CONTEXT).notes
    loaded(checkpoint, tmp_path / "dated", template_date="2026-01-31")
    assert said not in capsys.readouterr().out


def test_a_server_that_writes_its_own_day_is_warned_of(checkpoint):
    with_template(checkpoint, CLOCK)
    server = {"backend": "endpoint", "endpoint": "http://host/v1", "model": "m", "processor": str(checkpoint)}
    answers = RegenerateAnswers(samples=Ref("inject"), **server)
    [note] = estimate_answers(answers, evolve(CONTEXT, inputs={"target": None, "samples": None})).notes
    assert "all that is rendered here has 2025-01-01, and a server writes the day on which it answers" in note


@pytest.mark.parametrize("several", [False, True], ids=["by_a_variable", "several_templates"])
def test_a_template_in_which_no_day_can_be_put_is_warned_of_and_kept(several, checkpoint, tmp_path, capsys):
    template = CLOCK if several else "{% set f = '%Y' %}{{ strftime_now(f) }}" + TURNS
    with_template(checkpoint, template)
    if several:
        (checkpoint / "additional_chat_templates").mkdir()
        (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text(TURNS)
    [note] = estimate(LoadTarget(checkpoint=str(checkpoint)), CONTEXT).notes
    assert note.startswith("warning: the chat template writes today's date")
    target = loaded(checkpoint, tmp_path / "target")
    assert note in capsys.readouterr().out
    assert "template_date" not in target_info(target)
    assert template == (target.path / "model" / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("template", "config", "day"),
    [(CLOCK, {}, "2025-01-01"), (CLOCK, {"template_date": "2026-01-31"}, "2026-01-31"), (TURNS, {}, None)],
    ids=["default", "set", "none"],
)
def test_tokens_name_the_day_that_their_template_writes(template, config, day, checkpoint, tmp_path):
    target = loaded(with_template(checkpoint, template), tmp_path / "target", **config)
    samples = write_samples(tmp_path / "samples", [conversation(("user", "What is it?"), ("assistant", "A ball."))])
    by_target = FakeStage(tmp_path / "tokens", {"samples": samples, "target": target})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), target=Ref("target"), min_loss_tokens=1), by_target)
    assert day == read_json(by_target.out_dir / "tokens.json").get("template_date")
    by_processor = FakeStage(tmp_path / "of_checkpoint", {"samples": samples})
    config = TokenizeChat(samples=Ref("inject"), processor=str(checkpoint), min_loss_tokens=1)
    tokenize_chat(config, by_processor)
    own = "2025-01-01" if template is CLOCK else None
    assert own == read_json(by_processor.out_dir / "tokens.json").get("template_date")


def test_a_template_date_that_no_template_takes_is_a_mistake(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="template_date must be a day like 2026-01-31"):
        LoadTarget(checkpoint="x", template_date="31.1.2026")
    config = LoadTarget(checkpoint=str(with_template(checkpoint, TURNS)), template_date="2026-01-31")
    message = "writes no day: remove template_date"
    assert message in missing_here(config)["template_date"]
    with pytest.raises(DataError, match=message):
        load_target(config, FakeStage(tmp_path / "stage"))
    with_template(checkpoint, "{% set f = '%Y' %}{{ strftime_now(f) }}" + TURNS)
    assert "something else than a plain text" in missing_here(config)["template_date"]
    day = datetime(2026, 1, 31)
    assert '{{ "2026" }}' == with_day("{{ strftime_now( '%Y' ) }}", day, "x")


def test_a_template_date_is_in_the_key_and_its_default_leaves_keys_as_they_were(tmp_path):
    (tmp_path / "model").mkdir()
    target = '[node.target]\nop = "load_target"\ncheckpoint = "model"\n'
    plain = key_config(read_graph(write(tmp_path, HEAD + target)).nodes["target"])
    before = ("revision", "mask_token_id", "chat_template", "embed_key", "lm_head_key")
    assert {**dict.fromkeys(before), "trust_remote_code": False} == plain
    dated = key_config(read_graph(write(tmp_path, HEAD + target + 'template_date = "2026-01-31"\n')).nodes["target"])
    assert {**plain, "template_date": "2026-01-31"} == dated


@pytest.fixture
def harmony(checkpoint) -> Path:
    """A checkpoint with the special tokens and a template of gpt-oss, in which only <|return|> ends an answer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHANNELS[:-1]), "eos_token": CHANNELS[-1]})
    tokenizer.chat_template = HARMONY
    tokenizer.save_pretrained(checkpoint)
    config = read_json(checkpoint / "config.json")
    (checkpoint / "config.json").write_text(json.dumps({**config, "eos_token_id": tokenizer.eos_token_id}))
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    return checkpoint


@pytest.fixture
def by_processor(harmony, tmp_path) -> Prompts:
    server = {"backend": "endpoint", "endpoint": "http://host/v1", "model": "m", "processor": str(harmony), **SHORT}
    return Prompts.load(RegenerateAnswers(samples=Ref("inject"), **server), None, tmp_path)


ANALYSIS = "<|channel|>analysis<|message|>It is round.\n\nSo a ball.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>A ball."


def judged(prompts: Prompts, written: str, *earlier: str) -> tuple[Answer, Conversation]:
    """The answer after others that consists of the tokens of a text, EOS included."""
    turns = [ASK, {"role": "assistant", "content": []}] * (1 + len(earlier))
    conversation = Conversation({"id": "s", "messages": turns, "images": []})
    for text in earlier:
        conversation.take(Answer(text, "stop", 9))
    encode = prompts.encoder.processor.tokenizer.encode
    tokens = encode(written + "<|return|>", add_special_tokens=False)
    answer = Answer(prompts.text(tokens[:-1]), "stop", len(tokens), ids=tokens)
    return conversation.judged(answer, lambda _: prompts.takes(answer.text, tokens)), conversation


@pytest.mark.parametrize("written", [ANALYSIS + FINAL, FINAL], ids=["analysis", "final"])
@pytest.mark.parametrize("earlier", [(), ("<think>First.</think>A cat.",)], ids=["first", "second"])
def test_the_analysis_of_gpt_oss_is_kept_as_a_thought_and_gives_the_same_tokens(by_processor, written, earlier):
    answer, conversation = judged(by_processor, written, *earlier)
    assert ("", False) == (answer.reason, answer.retokenised_differently)
    thought = "<think>It is round.\n\nSo a ball.</think>" if written != FINAL else ""
    assert thought + "A ball." == answer.text
    sent = by_processor.shown(conversation.messages)
    assert ["A cat."] * len(earlier) == [m["content"][0]["text"] for m in sent if m["role"] == "assistant"]


@pytest.mark.parametrize("written", ["<|channel|>commentary<|message|>{}", ANALYSIS.removesuffix("<|start|>assistant")])
def test_an_answer_with_other_channels_than_analysis_and_final_is_dropped(by_processor, written):
    assert SPECIAL_IN_ANSWER == judged(by_processor, written)[0].reason


def test_the_learnt_stretch_of_gpt_oss_is_all_that_it_writes_by_either_form_of_a_thought(harmony, tmp_path):
    target = loaded(harmony, tmp_path / "target")
    samples = write_samples(
        tmp_path / "samples",
        [conversation(("user", "What is it?"), ("assistant", "<think>It is round.\n\nSo a ball.</think>A ball."))] * 2,
    )
    rows = [json.loads(line) for line in (samples.path / "samples.jsonl").read_text().splitlines()]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A ball."}]}
    rows[1]["messages"][-1] = {**answer, "reasoning_content": "It is round.\n\nSo a ball."}
    (samples.path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = FakeStage(tmp_path / "tokens", {"samples": samples, "target": target})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), target=Ref("target"), min_loss_tokens=1), stage)
    reader = TokenReader(stage.artifact(TokenShards))
    tokenizer = AutoTokenizer.from_pretrained(target.path / "model")
    for place in range(2):
        sample = reader.sample(place)
        assert ANALYSIS + FINAL + "<|return|>" == tokenizer.decode(sample.input_ids[sample.loss_mask])


def test_what_remains_possible_with_thoughts_in_special_tokens_is_said_by_plan_and_at_the_start(
    harmony, by_processor, tmp_path, capsys
):
    [note] = [note.removeprefix("warning: ") for note in estimate(LoadTarget(checkpoint=str(harmony)), CONTEXT).notes]
    assert "writes answers in channels (gpt-oss)" in note and 'train_on = "last"' in note
    assert [note] == by_processor.warnings
    loaded(harmony, tmp_path / "target")
    assert f"warning: {note}" in capsys.readouterr().out
    for template, token in (("[INST]x[THINK]", "[THINK]"), ("<|channel>thought", "<|channel>")):
        said = thought_warning([template], [token])
        assert f"thoughts in special tokens ({token})" in said and 'answers = "data"' in said
        assert "" == thought_warning([template], ["[INST]"])
    assert ("", "") == (thought_warning([TURNS]), day_warning([TURNS]))


def test_a_special_token_in_a_message_is_still_refused(by_processor):
    asked = {"role": "user", "content": [{"type": "text", "text": "Say <|channel|>final"}]}
    with pytest.raises(Unusable):
        by_processor.encoder.prompt([asked])
