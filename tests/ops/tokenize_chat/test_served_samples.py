"""The samples of conversations whose answers are learnt in the contexts of a server: ids, counts, limits, images."""

from __future__ import annotations

import re

import pytest
from agent_rows import ASK, ASK_AGAIN, NAME, RAINY, SAMPLES, SUN, SUNNY, TOOLS, calls, conversation, say
from agent_templates import EXTENDS, NO_TOOLS, STRIPS, text_of, with_parts
from attrs import evolve
from chat_samples import SERVED, png, row, run_tokenize, summary_of, write_rows
from fake_stage import folder_digest
from safetensors import safe_open
from safetensors.torch import save_file
from shard_workers import run_workers

from dsl.errors import ConfigError, DataError
from dsl.estimate import PlanContext, Trial
from dsl.launch import Launch
from dsl.op import Ref
from ops.artifacts import TokenShards
from ops.lib.data.files import json_line, read_jsonl
from ops.lib.data.token_shards import KIND_TENSOR, TokenReader
from ops.lib.forecasts import Counts, SamplesForecast
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.encode import ChatEncoder, asked
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.plan import estimate
from ops.tokenize_chat.records import conversation_of


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    for name, text in {"strips": STRIPS, "extends": EXTENDS, "no tools": NO_TOOLS}.items():
        (folder / name).write_text(with_parts(text))
    return lambda name: str(folder / name)


ROWS = [
    row("chat", [ASK, SUNNY, ASK_AGAIN, RAINY]),
    row("one", [ASK, SUNNY]),
    row("chain", SAMPLES["two queries"], tools=TOOLS, topic="agents"),
    row("seen", [ASK, SUNNY, ASK_AGAIN, RAINY], png(24, 32), label="fine"),
]


@pytest.fixture(scope="module")
def several(tmp_path_factory, templates):
    """The stage of rows whose answers have several contexts, for a template that strips thoughts."""
    folder = tmp_path_factory.mktemp("several")
    samples = write_rows(folder / "in", ROWS)
    return run_tokenize(folder, samples, chat_template=templates("strips"), **SERVED)


def records(stage):
    return list(read_jsonl(stage.out_dir / "samples.jsonl"))


def test_each_context_is_a_sample_named_by_its_first_answer(several):
    found = records(several)
    ids = ["chat@1", "chat@2", "one", "chain@1", "chain@2", "chain@3", "chain@4", "seen@1", "seen@2"]
    assert ids == [record["id"] for record in found]
    assert ["Sunny.", "Rain, sadly.", "Sunny.", "", "Sunny.", "", "Rain, sadly.", "fine", "fine"] == [
        record["label"] for record in found
    ]
    assert ["agents"] * 4 == [record["topic"] for record in found if "topic" in record]
    summary = summary_of(several)
    assert (4, 4, 9) == (summary["in"], summary["kept"], summary["splits"]["train"])


def test_every_sample_learns_its_own_answer_and_has_its_images(several):
    reader = TokenReader(several.artifact(TokenShards))
    samples = [reader.sample(place) for place in range(len(reader))]
    assert all(sample.loss_mask.any() and not sample.loss_mask[: sample.prompt_tokens].any() for sample in samples)
    assert [False] * 7 + [True] * 2 == [sample.has_images for sample in samples]
    assert len(samples[7].input_ids) < len(samples[8].input_ids)


def test_the_messages_that_a_context_asks_with_are_found_again_from_its_sample(several):
    """As the comparison with an engine's own preprocessing needs them."""
    rows = {each["id"]: each for each in read_jsonl(several.inputs["samples"].path / "samples.jsonl")}
    reader = TokenReader(several.artifact(TokenShards))
    encoder = ChatEncoder(load_processor(str(several.out_dir / "processor")))
    for place in range(len(reader)):
        sample = reader.sample(place)
        row = rows[sample.id if sample.id in rows else conversation_of(sample.id)]
        prompt = encoder.prompt(asked(sample, row), tools=row.get("tools", ()))
        if not sample.has_images:
            assert prompt.tolist() == sample.input_ids[: sample.prompt_tokens].tolist()


def test_the_log_says_samples_and_repeated_tokens_and_warns_of_empty_thoughts(several):
    logged = {name: value for metrics, _ in several.logged for name, value in metrics.items()}
    lengths = {record["id"]: record["tokens"] for record in records(several)}
    longest = sum(lengths[each] for each in ("chat@2", "one", "chain@4", "seen@2"))
    assert 9 / 4 == logged["tokenize/samples_per_conversation"]
    assert sum(lengths.values()) / longest == logged["tokenize/repeated_tokens"]
    assert 9 == logged["tokenize/empty_thoughts"]
    assert ["9 answers begin with an empty thought"] == [text[:37] for text in several.warnings]


def test_the_plan_says_how_many_samples_conversations_make_and_what_that_costs(several, tmp_path, templates):
    """By a trial, or by the artifact once it exists; the numbers are those of the log."""
    logged = {name: value for metrics, _ in several.logged for name, value in metrics.items()}
    repeated = logged["tokenize/repeated_tokens"]
    config = TokenizeChat(samples=Ref("inject"), **SERVED)
    source = SamplesForecast(samples=Counts({("text", "train"): 4}, {("text", "train"): 400}))
    context = PlanContext(
        launch=Launch(), inputs={"samples": source, "target": None}, artifact=None, root=tmp_path, free_disk=0
    )
    tried = estimate(config, evolve(context, trial=Trial(config=config, artifact=several.out_dir, inputs={})))
    made = estimate(config, evolve(context, artifact=several.out_dir))
    [note] = made.notes
    assert (note,) == tried.growth.notes and () == tried.notes
    assert note.startswith("4 conversations make 9 samples, 2.2 each") and f"{repeated:.1f} times the tokens" in note

    samples = write_rows(tmp_path / "in", ROWS)
    one_each = run_tokenize(tmp_path, samples, chat_template=templates("extends"), **SERVED).out_dir
    assert () == estimate(config, evolve(context, artifact=one_each)).notes


def test_many_repeated_tokens_are_a_warning_that_names_the_other_way(tmp_path, templates):
    chain = [ASK]
    for _ in range(8):
        chain += [calls("Paris"), SUN]
    samples = write_rows(tmp_path / "in", [row("long", conversation(*chain, SUNNY), tools=TOOLS)])
    options = SERVED | {"chat_template": templates("strips"), "enable_thinking": False}
    stage = run_tokenize(tmp_path, samples, **options)
    assert 9 == len(records(stage))
    [warning] = stage.warnings
    assert 'contexts = "whole" gives one sample each' in warning


def without_kinds(folder):
    """The artifact without what only contexts of a server have: kinds and answers."""
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as tensors:
            kept = {name: tensors.get_tensor(name) for name in tensors.keys() if name != KIND_TENSOR}  # noqa: SIM118
        save_file(kept, shard)
    file = folder / "samples.jsonl"
    lines = [{key: value for key, value in line.items() if key != "answers"} for line in read_jsonl(file)]
    file.write_text("".join(map(json_line, lines)), encoding="utf-8")
    page = folder / "preview.html"
    plain = re.sub(r'title="(?:text|end), ', 'title="', page.read_text())
    legend = ': text and end of an answer, <span class="reasoning">reasoning</span>, <span class="call">call</span>.'
    heading = " and each mix of reasoning, text and calls"
    assert legend in plain and heading in plain
    counted, times = re.subn(
        r"(learnt in \d+ answers?) \([^)]*\)", r"\1", plain.replace(legend, "").replace(heading, "")
    )
    assert times == len(lines)
    page.write_text(counted)
    return folder


def test_templates_that_extend_give_the_artifact_of_whole_conversations(tmp_path, templates):
    rows = [ROWS[0], ROWS[1], ROWS[3], row("none", [ASK]), row("marked", [say("user", "<|im_end|>"), SUNNY])]
    samples = write_rows(tmp_path / "in", rows)
    folders = {}
    for contexts in ("served", "whole"):
        options = SERVED | {"contexts": contexts, "chat_template": templates("extends")}
        folders[contexts] = run_tokenize(tmp_path / contexts, samples, **options).out_dir
    assert folder_digest(folders["whole"]) == folder_digest(without_kinds(folders["served"]))


def test_workers_write_the_bytes_of_one_process(several, tmp_path, templates):
    samples = write_rows(tmp_path / "in", ROWS)
    config = TokenizeChat(samples=Ref("inject"), chat_template=templates("strips"), **SERVED)
    small = {"ops.tokenize_chat.pieces:PIECE_ROWS": 2}
    run = "ops.tokenize_chat.run:tokenize_chat"
    assert [0, 0] == run_workers(run, config, tmp_path, {"samples": samples}, 2, constants=small)
    assert folder_digest(several.out_dir) == folder_digest(tmp_path / "out")


@pytest.mark.parametrize("image", [None, png(24, 32)])
def test_a_sample_ends_behind_its_last_answer_that_fits(tmp_path, templates, image):
    turns = [ASK, SUNNY, ASK_AGAIN, RAINY, say("user", "Very long. " * 60), say("assistant", "Yes, " * 20)]
    samples = write_rows(tmp_path / "in", [row("a", turns, image), row("b", [turns[4], turns[5]]), row("c", turns[:2])])
    options = SERVED | {"chat_template": templates("extends")}
    whole = run_tokenize(tmp_path / "whole", samples, **options)
    all_of_it = TokenReader(whole.artifact(TokenShards)).sample(0)
    ends = [
        place
        for place, pair in enumerate(zip(all_of_it.loss_mask[:-1], all_of_it.loss_mask[1:], strict=True), 1)
        if pair == (True, False)
    ]
    for longest, answers in ((ends[1] + 5, 2), (ends[1], 2), (ends[1] - 1, 1)):
        stage = run_tokenize(tmp_path / str(longest), samples, **options, max_length=longest)
        reader = TokenReader(stage.artifact(TokenShards))
        assert ["a", "c"] == [record["id"] for record in reader.records]
        shorter = reader.sample(0)
        length = ends[answers - 1]
        assert all_of_it.input_ids[:length].tolist() == shorter.input_ids.tolist()
        assert all_of_it.loss_mask[:length].tolist() == shorter.loss_mask.tolist()
        assert shorter.has_images == bool(image)
        assert {"longer than max_length": 1} == summary_of(stage)["dropped"]
        logged = {name: value for metrics, _ in stage.logged for name, value in metrics.items()}
        assert (1, 0) == (logged["tokenize/shortened"], logged["tokenize/left_out"])
        assert text_of((SUNNY, RAINY)[answers - 1]) == reader.records[0]["label"]


def test_contexts_without_an_answer_that_fits_are_left_out_and_counted(tmp_path, templates):
    turns = [ASK, SUNNY, say("user", "Very long. " * 60), RAINY]
    samples = write_rows(tmp_path / "in", [row("a", turns)])
    stage = run_tokenize(tmp_path, samples, **SERVED, chat_template=templates("strips"), max_length=60)
    assert ["a@1"] == [record["id"] for record in records(stage)]
    logged = {name: value for metrics, _ in stage.logged for name, value in metrics.items()}
    assert (0, 1) == (logged["tokenize/shortened"], logged["tokenize/left_out"])


def test_min_loss_tokens_counts_all_samples_of_a_conversation(tmp_path, templates):
    samples = write_rows(tmp_path / "in", [ROWS[2], ROWS[1]])
    options = SERVED | {"chat_template": templates("strips"), "enable_thinking": False}
    counts = [record["loss_tokens"] for record in records(run_tokenize(tmp_path / "all", samples, **options))]
    assert max(counts) < sum(counts[:4])
    stage = run_tokenize(tmp_path / "some", samples, **options | {"min_loss_tokens": sum(counts[:4])})
    assert 4 == len(records(stage))
    assert {"fewer than min_loss_tokens": 1} == summary_of(stage)["dropped"]


def test_a_template_without_tools_ends_the_node(tmp_path, templates):
    samples = write_rows(tmp_path / "in", [ROWS[2]] * 3)
    with pytest.raises(DataError, match=r"shows no tools: none of 3 samples with tools can be used; use a template"):
        run_tokenize(tmp_path, samples, **SERVED, chat_template=templates("no tools"))


def test_prompts_have_tools_and_end_with_the_last_question_or_result(tmp_path, templates):
    samples = write_rows(tmp_path / "in", [ROWS[2]])
    options = SERVED | {"chat_template": templates("strips"), "prompts_only": True}
    stage = run_tokenize(tmp_path, samples, **options)
    reader = TokenReader(stage.artifact(TokenShards))
    text = load_processor(str(stage.out_dir / "processor")).tokenizer.decode(reader.sample(0).input_ids)
    assert NAME in text and text.endswith("result: wet</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert 0 == reader.sample(0).loss_mask.sum()


def test_marks_of_a_template_are_not_used_and_the_log_says_so(tmp_path, capsys):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{% for p in m.content %}{{ p.text }}"
    template += "{% endfor %}<|im_end|>{% endgeneration %}{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (tmp_path / "marked").write_text(template)
    samples = write_rows(tmp_path / "in", [ROWS[1]])
    run_tokenize(tmp_path, samples, **SERVED, chat_template=str(tmp_path / "marked"))
    assert "marks of the chat template are not used" in capsys.readouterr().out


def test_dropped_reasoning_needs_contexts_of_a_server():
    with pytest.raises((ConfigError, ValueError), match="needs contexts"):
        TokenizeChat(samples=Ref("inject"), history_reasoning="dropped")
    assert "served" == TokenizeChat(samples=Ref("inject"), history_reasoning="dropped", contexts="served").contexts
