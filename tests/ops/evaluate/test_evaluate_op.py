"""The evaluation as a whole: what it reports, what it refuses, and what a stop leaves of it."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter

import attrs
import pytest
import torch
from evaluate_cases import BLOCK, evaluate_config, run_evaluate
from lively_target import make_lively
from overfit import overfit, with_answers
from safetensors.torch import load_file, save_file

from dsl.errors import ConfigError, DataError, StopRequested
from dsl.finding import Finding
from ops.artifacts import Draft, TargetModel, TokenShards
from ops.check_export.run import check_report
from ops.evaluate import turns
from ops.evaluate.lengths import spread_prompts
from ops.evaluate.prompts import Prompt
from ops.evaluate.show import report as evaluate_sections
from ops.evaluate.statistics import is_repetition
from ops.lib.data.files import read_json, read_jsonl, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import from_serving, to_serving
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.decoding.decode import decode_plain
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.report_sections import Section
from ops.lib.target.model import Target

CONTENT = ("report.json", "prompts.jsonl", "prompts.html")
KNOWN = 2 * BLOCK + 2  # tokens of an answer


@pytest.fixture(scope="module")
def target(target, tmp_path_factory) -> TargetModel:
    return make_lively(target, tmp_path_factory.mktemp("lively") / "target")


@pytest.fixture(scope="module")
def draft(target, tokens, tmp_path_factory) -> Draft:
    """It knows the first KNOWN tokens of each answer by heart, whatever rounding made of its training: the steps accept
    BLOCK - 1, BLOCK - 1 and 1 of them, and behind them what chance gives, next to nothing.
    """
    reader, loaded = TokenReader(tokens, "test"), Target.load(target)
    prompts = [prompt.sample() for prompt in spread_prompts(Prompt.held_out(reader), 2)]
    answers = [decode_plain(loaded, prompt, KNOWN - 1) for prompt in prompts]
    folder = tmp_path_factory.mktemp("draft")
    own = with_answers(folder / "tokens", reader.info, prompts, answers)
    capture = {"target_layer_ids": (1, 3, 5)}
    return overfit(folder, target, own, capture=capture, epochs=30, block_size=BLOCK, num_anchors=KNOWN)


@pytest.fixture(scope="module")
def stage(draft, target, tokens, tmp_path_factory):
    return run_evaluate(tmp_path_factory.mktemp("evaluated"), draft, target, tokens)


def content(stage) -> dict[str, bytes]:
    return {name: (stage.out_dir / name).read_bytes() for name in CONTENT}


def test_the_report_holds_tau_by_category_and_the_random_draft(stage):
    report = read_json(stage.out_dir / "report.json")
    rows = list(read_jsonl(stage.out_dir / "prompts.jsonl"))
    assert ["image", "image", "text", "text"] == sorted(row["category"] for row in rows)
    steps = sum(len(row["accepted"]) for row in rows)
    generated = sum(len(row["tokens"]) - 1 for row in rows)
    assert generated / steps == pytest.approx(report["tau"]["all"]["tau"])
    assert {"all", "image", "text"} == set(report["tau"]) == set(report["tau_random"])
    assert {"errors": 0, "ties": 0} == report["lossless"]
    assert [report["tau"]["image"]["tau"]] == stage.metric("eval/tau_image")
    assert (BLOCK, BLOCK, 0.0) == (report["block_size"], report["block_size_trained"], report["temperature"])
    assert ["acceptance_by_slot", "accepted_lengths", "tau_by_position"] == list(stage.figures)
    assert "tau_by_group" not in report
    assert [] == [row for row in rows if "topic" in row]


def test_tau_is_reported_by_the_category_of_the_users_rows(draft, target, tokens, tmp_path):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens.path, folder)
    topics = ["math", "Prüfung/2", "math"]
    records = list(read_jsonl(folder / "samples.jsonl"))
    texts = [row for row in records if (row["split"], row["category"]) == ("test", "text")]
    for place, row in enumerate(texts):
        row["topic"] = topics[place % 3]
    write_jsonl(folder / "samples.jsonl", records)
    stage = run_evaluate(tmp_path, draft, target, TokenShards(folder, "topics"), max_prompts=3)
    report, rows = read_json(stage.out_dir / "report.json"), list(read_jsonl(stage.out_dir / "prompts.jsonl"))
    assert {"all", "image", "text"} == set(report["tau"])
    asked = Counter(row["topic"] for row in rows if "topic" in row)
    of_group = report["tau_by_group"]
    assert asked | {"": 3} == {group: tau["prompts"] for group, tau in of_group.items()}
    assert asked == {"math": 2, "Prüfung/2": 1}
    assert report["tau"]["all"]["generated"] == sum(tau["generated"] for tau in of_group.values())
    of_math = [row for row in rows if row.get("topic") == "math"]
    tau = of_group["math"]
    assert tau["tau"] == sum(len(row["tokens"]) - 1 for row in of_math) / sum(len(row["accepted"]) for row in of_math)
    assert tau["low"] <= tau["tau"] <= tau["high"]
    assert [tau["low"]] == stage.metric("eval/tau_group_low/math")
    assert 1 == len([name for name in stage.logged[0][0] if name.startswith("eval/tau_group/Pr_fung_2-")])
    assert "tau_by_group" in stage.figures
    assert "text, Prüfung/2" in (stage.out_dir / "prompts.html").read_text("utf-8")
    sections = [part for part in evaluate_sections(stage.out_dir) if isinstance(part, Section)]
    [section] = [section for section in sections if section.title == "tau by group"]
    assert ["Prüfung/2", "all others", "math"] == sorted([row[0] for row in section.body.rows])


def test_the_draft_of_these_tests_is_accepted_now_and_then(stage):
    lengths = read_json(stage.out_dir / "report.json")["accepted_lengths"]
    assert [] == [accepted for accepted in (0, 1, BLOCK - 1) if not lengths[accepted]]


def test_the_parts_of_tau_add_up_to_all_steps(stage):
    report = read_json(stage.out_dir / "report.json")
    rows = list(read_jsonl(stage.out_dir / "prompts.jsonl"))
    steps = [len(row["accepted"]) for row in rows]
    assert sum(steps) == sum(part["steps"] for part in report["tau_by_position"]) == sum(report["accepted_lengths"])
    assert report["tau"]["all"]["generated"] == sum(part["generated"] for part in report["tau_by_position"])
    for part in ("generated", "steps"):
        for table in ("tau_by_context", "tau_by_kind"):
            assert report["tau"]["all"][part] == sum(tau[part] for tau in report[table].values())
    mean = report["mean_of_prompts"]
    assert sum(row["tau"] for row in rows) / len(rows) == pytest.approx(mean["tau"])
    assert (len(rows), sum(steps)) == (mean["prompts"], mean["steps"])
    assert mean["low"] <= mean["tau"] <= mean["high"]
    assert [mean["tau"]] == stage.metric("eval/mean_of_prompts")
    assert [(len(row["tokens"]) - 1) / len(row["accepted"]) for row in rows] == [row["tau"] for row in rows]
    shares = [sum(report["accepted_lengths"][slot:]) / sum(steps) for slot in range(1, BLOCK)]
    assert shares == pytest.approx(report["acceptance_by_slot"])


def test_the_time_is_split_into_parts_that_add_up(stage):
    measured = read_json(stage.out_dir / "measurements.json")
    assert measured["plain_seconds"] / measured["speculative_seconds"] == pytest.approx(measured["speedup"])
    assert measured["speedup_low"] <= measured["speedup_high"]
    assert (2, 2) == (measured["batches"], measured["batch_size"])
    ids = [row["id"] for row in read_jsonl(stage.out_dir / "prompts.jsonl")]
    assert sorted(ids) == sorted(each for batch in measured["times"] for each in batch["prompts"])
    for name in ("plain_seconds", "speculative_tokens"):
        assert measured[name] == pytest.approx(sum(batch[name] for batch in measured["times"]))
    for way in ("plain", "speculative"):
        parts = measured["parts"][way]
        assert {"prefill", "draft", "verify", "overhead"} == set(parts)
        assert sum(parts.values()) == pytest.approx(measured[f"{way}_seconds"])
        assert parts["prefill"] > 0
        assert parts["verify"] > 0
    assert 0 == measured["parts"]["plain"]["draft"] < measured["parts"]["speculative"]["draft"]


def test_every_way_to_cut_batches_gives_the_same_report(stage, draft, target, tokens, tmp_path):
    alone = run_evaluate(tmp_path, draft, target, tokens, batch_size=1)
    assert content(stage) == content(alone)


def test_a_stopped_evaluation_goes_on_with_the_next_batch_and_ends_with_the_same_bytes(
    stage, draft, target, tokens, tmp_path, monkeypatch
):
    with pytest.raises(StopRequested, match="2 of 4 prompts are decoded and kept"):
        run_evaluate(tmp_path, draft, target, tokens, stop_after=1)
    with (tmp_path / "work" / f"{turns.JOURNAL}.jsonl").open("a") as file:
        file.write('{"half": ')  # what kill -9 may leave
    decoded = []
    decode = turns.decode_plain_batch

    def counted(target, samples, *rest):
        decoded.append([sample.id for sample in samples])
        return decode(target, samples, *rest)

    monkeypatch.setattr(turns, "decode_plain_batch", counted)
    again = run_evaluate(tmp_path, draft, target, tokens)
    assert content(stage) == content(again)
    warm_up, batch = decoded
    assert (2, 2) == (len(warm_up), len(batch))
    assert [(2, 4), (4, 4)] == again.progressed
    run_evaluate(tmp_path, draft, target, tokens)
    assert 2 == len(decoded)


@pytest.mark.parametrize(("batch_size", "kinds"), [(1, {"image"}), (2, {"text", "image"}), (9, {"text", "image"})])
def test_the_warm_up_is_of_a_whole_batch_and_has_an_image(
    draft, target, tokens, tmp_path, monkeypatch, batch_size, kinds
):
    decoded = []
    decode = turns.decode_plain_batch

    def counted(target, samples, *rest):
        decoded.append([sample.category for sample in samples])
        return decode(target, samples, *rest)

    monkeypatch.setattr(turns, "decode_plain_batch", counted)
    run_evaluate(tmp_path, draft, target, tokens, batch_size=batch_size, max_new_tokens=2, random_draft=False)
    assert (min(batch_size, 4), kinds) == (len(decoded[0]), set(decoded[0]))
    assert len(decoded[0]) == len(decoded[1])


def test_what_other_prompts_left_is_decoded_again(draft, target, tokens, tmp_path):
    brief = {"max_new_tokens": 4, "random_draft": False}
    run_evaluate(tmp_path, draft, target, tokens, max_prompts=1, **brief)
    stage = run_evaluate(tmp_path, draft, target, tokens, **brief)
    assert 4 == len(list(read_jsonl(stage.out_dir / "prompts.jsonl")))


def test_smaller_blocks_than_in_training_give_the_same_answers_in_more_steps(stage, draft, target, tokens, tmp_path):
    small = run_evaluate(tmp_path, draft, target, tokens, block_size=3, random_draft=False)
    report = read_json(small.out_dir / "report.json")
    assert (3, BLOCK) == (report["block_size"], report["block_size_trained"])
    assert (2, 3) == (len(report["acceptance_by_slot"]), len(report["accepted_lengths"]))
    assert {"errors": 0, "ties": 0} == report["lossless"]
    rows = [list(read_jsonl(run.out_dir / "prompts.jsonl")) for run in (small, stage)]
    answers = [[row["tokens"] for row in of_run] for of_run in rows]
    assert answers[0] == answers[1]
    steps = [sum(len(row["accepted"]) for row in of_run) for of_run in rows]
    assert steps[0] > steps[1]


def test_larger_blocks_than_in_training_are_refused(draft, target, tokens, tmp_path):
    with pytest.raises(DataError, match=rf"block_size: must lie in 2\.\.{BLOCK}"):
        run_evaluate(tmp_path, draft, target, tokens, block_size=BLOCK + 1)
    with pytest.raises(DataError, match=rf"block_sizes: must lie in 2\.\.{BLOCK}"):
        run_evaluate(tmp_path, draft, target, tokens, block_sizes=(3, BLOCK + 1))


def test_sampled_answers_have_a_tau_and_are_not_called_lossless(draft, target, tokens, tmp_path, capsys):
    """At a temperature so low that most samples are the greedy tokens, which the draft knows."""
    changes = {"temperature": 0.1, "max_prompts": 1, "random_draft": False}
    stage = run_evaluate(tmp_path, draft, target, tokens, **changes)
    report = read_json(stage.out_dir / "report.json")
    assert (None, 0.1) == (report["lossless"], report["temperature"])
    assert 1 < report["tau"]["all"]["tau"] < BLOCK
    assert [] == stage.metric("eval/lossless_errors")
    assert "cannot be checked token by token" in capsys.readouterr().out
    assert "sampled, not comparable" in (stage.out_dir / "prompts.html").read_text()
    again = run_evaluate(tmp_path / "again", draft, target, tokens, **changes)
    assert content(stage) == content(again)


def test_temperatures_and_batch_sizes_are_measured_one_after_the_other(stage, draft, target, tokens, tmp_path):
    changes = {"temperatures": (0, 0.7, 1), "batch_sizes": (1, 2, 4)}
    several = run_evaluate(tmp_path, draft, target, tokens, **changes)
    report, measured = (read_json(several.out_dir / name) for name in ("report.json", "measurements.json"))
    before = read_json(stage.out_dir / "report.json")
    found = report.pop("tau_by_temperature")
    assert before == report
    assert before["tau"]["all"] | {"lossless": {"errors": 0, "ties": 0}} == found["0"]
    assert ["0", "0.7", "1"] == list(found)
    for temperature in (0.7, 1.0):
        alone = run_evaluate(tmp_path / "alone", draft, target, tokens, temperature=temperature, random_draft=False)
        alone_report = read_json(alone.out_dir / "report.json")
        assert alone_report["tau"]["all"] | {"lossless": None} == found[f"{temperature:g}"]
        shutil.rmtree(tmp_path / "alone")
    points = {point["batch_size"]: point for point in measured["load"]["points"]}
    assert [1, 2, 4] == list(points)
    assert measured["speedup"] == points[2]["speedup"]
    assert [points[4]["speedup"]] == several.metric("eval/speedup_batch_4")
    assert [found["0.7"]["low"]] == several.metric("eval/tau_temperature_0.7_low")
    shown = {section.title: section.body.rows for section in parts(several.out_dir) if section.title != "Answers"}
    assert [("0", 0, 0), ("0.7", None, None), ("1", None, None)] == [
        (row[0], *row[3:]) for row in shown["tau by temperature"]
    ]
    assert [1, 2, 4] == [row[0] for row in shown["Speed-up under load"]]
    again = run_evaluate(tmp_path, draft, target, tokens, **changes)  # all is in the journals
    assert content(several) == content(again)
    assert measured == read_json(again.out_dir / "measurements.json")


def test_each_batch_size_is_measured_in_blocks_of_each_size_beside_one_plain_decoding(
    stage, draft, target, tokens, tmp_path, monkeypatch
):
    counts = Counter()
    decode_plain, decode_speculative = turns.decode_plain_batch, turns.decode_speculative_batch

    def plain(target, samples, settings, *rest):
        counts["plain"] += settings.max_new_tokens > turns.WARM_UP_TOKENS
        return decode_plain(target, samples, settings, *rest)

    def speculative(target, draft, samples, settings, use, *rest):
        counts[len(samples), use.block_size] += settings.max_new_tokens > turns.WARM_UP_TOKENS
        return decode_speculative(target, draft, samples, settings, use, *rest)

    monkeypatch.setattr(turns, "decode_plain_batch", plain)
    monkeypatch.setattr(turns, "decode_speculative_batch", speculative)
    changes = {"block_sizes": (3, BLOCK, 4), "batch_sizes": (4,), "random_draft": False}
    with pytest.raises(StopRequested, match="2 of 4 prompts are decoded and kept"):
        run_evaluate(tmp_path, draft, target, tokens, stop_after=1, **changes)
    several = run_evaluate(tmp_path, draft, target, tokens, **changes)
    assert 2 + 1 == counts.pop("plain")
    assert {(2, 3): 2, (2, 4): 2, (2, BLOCK): 2, (4, 3): 1, (4, 4): 1, (4, BLOCK): 1} == counts
    report, measured = (read_json(several.out_dir / name) for name in ("report.json", "measurements.json"))
    of_block = report["tau_by_block"]
    before = read_json(stage.out_dir / "report.json")
    assert ["3", "4", str(BLOCK)] == list(of_block)
    assert before["tau"]["all"] | {"lossless": {"errors": 0, "ties": 0}} == of_block[str(BLOCK)]
    assert before["tau"] == report["tau"]
    small = run_evaluate(tmp_path / "small", draft, target, tokens, block_size=3, random_draft=False)
    small_report = read_json(small.out_dir / "report.json")
    assert small_report["tau"]["all"] | {"lossless": small_report["lossless"]} == of_block["3"]
    assert [of_block["3"]["tau"]] == several.metric("eval/tau_block_3")
    points = {(point["batch_size"], point["block_size"]): point for point in measured["load"]["points"]}
    assert [(2, 3), (2, 4), (2, BLOCK), (4, 3), (4, 4), (4, BLOCK)] == list(points)
    for batch in (2, 4):
        assert 1 == len({points[batch, block]["plain_tokens_per_second"] for block in (3, 4, BLOCK)})
        assert of_block["3"]["tau"] == points[batch, 3]["tau"] < points[batch, BLOCK]["tau"]
    for point in points.values():
        ratio = point["tokens_per_second"] / point["plain_tokens_per_second"]
        assert ratio == pytest.approx(point["speedup"])
    assert measured["speedup"] == points[2, BLOCK]["speedup"]
    assert None is points[4, 3]["speedup_low"] is measured["load"]["best"][1]["pays"]
    assert [points[4, 3]["speedup"]] == several.metric("eval/speedup_batch_4_block_3")
    assert "load" in several.figures
    shown = {section.title: section.body.rows for section in parts(several.out_dir) if section.title != "Answers"}
    assert [row[:2] for row in shown["Speed-up under load"]] == list(points)
    assert ["3", "4", str(BLOCK)] == [row[0] for row in shown["tau by block"]]
    again = run_evaluate(tmp_path, draft, target, tokens, **changes)
    assert content(several) == content(again)
    assert measured == read_json(again.out_dir / "measurements.json")


def test_an_answer_that_another_block_size_changes_is_a_loss(draft, target, tokens, tmp_path, monkeypatch):
    decode = turns.decode_speculative_batch

    def wrong(target, draft, samples, settings, use, *rest):
        answers = decode(target, draft, samples, settings, use, *rest)
        if use.block_size != 3:
            return answers
        return [attrs.evolve(one, tokens=(*one.tokens[:-1], 5)) for one in answers]

    monkeypatch.setattr(turns, "decode_speculative_batch", wrong)
    with pytest.raises(DataError, match=r"speculative decoding changed \d of 4 answers beyond a tie"):
        run_evaluate(tmp_path, draft, target, tokens, random_draft=False, block_sizes=(3,))


def test_an_answer_that_another_batch_size_changes_is_a_loss(draft, target, tokens, tmp_path, monkeypatch):
    decode = turns.decode_speculative_batch

    def wrong(target, draft, samples, *rest):
        answers = decode(target, draft, samples, *rest)
        if len(samples) != 4:
            return answers
        return [attrs.evolve(one, tokens=(*one.tokens[:-1], 5), accepted=one.accepted) for one in answers]

    monkeypatch.setattr(turns, "decode_speculative_batch", wrong)
    run_evaluate(tmp_path / "right", draft, target, tokens, random_draft=False)
    with pytest.raises(DataError, match=r"speculative decoding changed \d of 4 answers beyond a tie"):
        run_evaluate(tmp_path / "wrong", draft, target, tokens, random_draft=False, batch_sizes=(4,))
    assert [] == list((tmp_path / "wrong" / "work").glob("decoded*"))


def test_further_passes_are_those_that_differ_from_the_first():
    config = evaluate_config(temperature=0.7, temperatures=(0, 0.7, 1, 1), batch_sizes=(2, 8))
    assert ((0, 2), (1, 2), (0.7, 8)) == config.further_passes
    assert () == evaluate_config().further_passes
    for wrong in ({"temperatures": (1e-5,)}, {"temperatures": (-1,)}, {"batch_sizes": (0,)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            evaluate_config(**wrong)


def test_bfloat16_decodes_without_a_loss_beyond_ties(draft, target, tokens, tmp_path):
    stage = run_evaluate(tmp_path, draft, target, tokens, dtype="bfloat16", random_draft=False)
    assert [0] == stage.metric("eval/lossless_errors")
    report = read_json(stage.out_dir / "report.json")
    assert ("bfloat16", 0.5) == (report["dtype"], report["tie_margin"])
    largest = read_json(stage.out_dir / "measurements.json")["rounding"]["largest"]
    assert largest < 0.5
    assert 0 == largest % 2**-9  # as bfloat16's logits lie apart; 0 where a processor rounds a block as a single token


@pytest.mark.parametrize("changes", [{"benchmark": "b.jsonl"}, {"temperature": 0.5}, {"block_size": 3}])
def test_the_gate_refuses_an_evaluation_that_serving_cannot_repeat(stage, changes):
    report = read_json(stage.out_dir / "report.json")
    inputs = {"report": stage.inputs["draft"], **stage.inputs}
    check_report(report, inputs)
    with pytest.raises(DataError, match=next(iter(changes))):
        check_report(report | changes, inputs)


def parts(folder):
    """The sections without the verdicts of the first screen."""
    return [section for section in evaluate_sections(folder) if not isinstance(section.body, Finding)]


def test_the_report_shows_every_part(stage):
    sections = {section.title: section for section in parts(stage.out_dir)}
    assert ["tau", "Losslessness", "Speed", "Answers"] == list(sections)
    assert {"acceptance_by_slot", "accepted_lengths", "tau_by_position"} == set(stage.figures)
    assert ["all", "image", "text"] == sorted(row[0] for row in sections["tau"].body.rows)
    cut = read_json(stage.out_dir / "report.json")["tau"]["all"]["cut_steps"]
    assert f"{cut} steps accepted more than the answer contains" in sections["tau"].note
    (stage.out_dir / "measurements.json").rename(stage.work_dir / "away.json")
    assert "Speed" not in [section.title for section in evaluate_sections(stage.out_dir)]
    (stage.work_dir / "away.json").rename(stage.out_dir / "measurements.json")


@pytest.fixture(scope="module")
def confident(draft, tmp_path_factory) -> Draft:
    """The draft with the heads of DSpark, without a bias, whose confidence is 0.9 for every proposal."""
    folder = tmp_path_factory.mktemp("confident")
    plain = from_serving(read_json(draft.path / "config.json"))
    config = attrs.evolve(plain, algorithm=Dspark(rank=2, sample_from_anchor=False))
    heads = random_draft(config, seed=0)
    with torch.no_grad():
        heads.confidence_head.proj.bias.fill_(math.log(9))
    save_file(dict(heads.state_dict()) | load_file(draft.path / "model.safetensors"), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_serving(config)))
    return Draft(folder, "digest of the confident one")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_confidence_head_is_measured_by_what_was_accepted(confident, target, tokens, tmp_path, temperature):
    stage = run_evaluate(tmp_path, confident, target, tokens, temperature=temperature)
    rows = list(read_jsonl(stage.out_dir / "prompts.jsonl"))
    steps = [count for row in rows for count in row["accepted"]]
    share = sum(steps) / sum(min(count + 1, BLOCK - 1) for count in steps)
    measured = read_json(stage.out_dir / "measurements.json")["confidence"]
    assert (measured["confidence"], measured["accepted"]) == (pytest.approx(0.9), pytest.approx(share))
    assert stage.metric("eval/confidence_ece") == [pytest.approx(0.9 - share)]
    assert stage.metric("eval/confidence_brier") == [pytest.approx(share * 0.01 + (1 - share) * 0.81)]
    assert "confidence" in stage.figures
    sections = {section.title: section for section in parts(stage.out_dir)}
    assert f"{0.9 - share:.4f} (10 bins)" in sections["Confidence head"].note
    rows = sections["Confidence head"].body.rows
    assert (rows[-2][2:], rows[-1][2:]) == ((0.9, round(share, 3)), (0.9, round(share, 3)))


def test_without_a_confidence_head_nothing_of_it_appears(stage):
    assert "confidence" not in read_json(stage.out_dir / "measurements.json")
    assert "confidence" not in stage.figures and [] == stage.metric("eval/confidence_ece")


def test_nothing_that_was_measured_is_reported_as_not_a_number(stage):
    report = (stage.out_dir / "report.json").read_text()
    assert all(math.isfinite(value) for metrics, _ in stage.logged for value in metrics.values())
    json.loads(report, parse_constant=lambda name: pytest.fail(f"{name} in report.json"))


@pytest.fixture(scope="module")
def silent(target, tmp_path_factory) -> TargetModel:
    """A target that ends every answer with its first token."""
    return make_lively(target, tmp_path_factory.mktemp("silent") / "target", eos_token_ids=list(range(600)))


def test_answers_without_a_step_have_no_tau_and_no_file_holds_a_nan(draft, silent, tokens, tmp_path, capsys):
    stage = run_evaluate(tmp_path, draft, silent, tokens)
    for name in ("report.json", "measurements.json"):
        text = (stage.out_dir / name).read_text()
        json.loads(text, parse_constant=lambda found, name=name: pytest.fail(f"{found} in {name}"))
    report = read_json(stage.out_dir / "report.json")
    assert (None, None, None, 0) == tuple(report["tau"]["all"][name] for name in ("tau", "low", "high", "steps"))
    assert [[], []] == [stage.metric(name) for name in ("eval/tau", "eval/acceptance_slot_01")]
    assert [4] == stage.metric("eval/prompts")
    assert {} == stage.figures
    assert "no tau: the target's answer to each of the 4 prompts is one token" in capsys.readouterr().out
    shown = parts(stage.out_dir)
    assert ["tau", "Losslessness", "Speed", "Answers"] == [section.title for section in shown]
    assert ("all", 4, None, "no step", None) == tuple(shown[0].body.rows[0])


def test_a_target_that_repeats_one_token_is_told(draft, target, tokens, tmp_path, capsys):
    stuck = make_lively(target, tmp_path / "target")
    file = stuck.path / "model" / "model.safetensors"
    save_file({name: weight * 0 for name, weight in load_file(file).items()}, file, {"format": "pt"})
    told = "answers of the target repeat the same few tokens: any draft predicts those"
    run_evaluate(tmp_path / "stuck", draft, stuck, tokens)
    assert f"warning: 4 of 4 {told}" in capsys.readouterr().out
    run_evaluate(tmp_path / "lively", draft, target, tokens)
    assert told not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([7] * 12, True),
        ([*range(20), *[5, 6, 7] * 8], True),
        ([1] * 11, False),
        (range(12), False),
        ([], False),
        ([*range(300), *[*range(50, 90)] * 4], True),  # a sentence, four times
        ([*range(300), *[*range(50, 90)] * 4, 50, 51], True),  # cut within it
        ([*range(300), *[*range(50, 90)] * 3], False),
        ([*range(300), *[*range(50, 90)] * 4, 2], False),  # it ended
        ([*range(300), *[8, 9] * 32], True),
        ([*range(300), *[8, 9] * 31], False),  # a line of a table, a ruler
        ([*range(20), *[5, 6, 7, 8] * 5], True),  # half of a short answer
        ([*range(20), *[5, 6, 7, 8] * 4], False),
    ],
)
def test_an_answer_repeats_itself_where_its_second_half_has_hardly_any_other_tokens_or_it_ends_in_a_loop(
    answer, expected
):
    assert expected == is_repetition(tuple(answer))


def test_one_prompt_has_a_tau_without_an_interval(draft, target, tokens, tmp_path, capsys):
    stage = run_evaluate(tmp_path, draft, target, tokens, max_prompts=1)
    tau = read_json(stage.out_dir / "report.json")["tau"]
    assert tau["all"]["low"] <= tau["all"]["tau"] <= tau["all"]["high"]
    assert [None, None] == [tau["image"][name] for name in ("low", "high")]
    assert [[], []] == [stage.metric(name) for name in ("eval/tau_image_low", "eval/tau_text_high")]
    assert [tau["image"]["tau"]] == stage.metric("eval/tau_image")
    rows = {row[0]: row[3] for row in evaluate_sections(stage.out_dir)[0].body.rows}
    assert "none for one prompt" == rows["image"] == rows["text"]
    assert f"({tau['all']['low']:.2f} to " in capsys.readouterr().out


def test_a_target_with_a_weight_that_is_no_number_gets_no_score(draft, target, tokens, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(target.path, folder)
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "layers.3" in name and "language" in name and weights[name].ndim == 1)
    weights[name][0] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(DataError, match="token 0 of the answer: the target's logits are not finite numbers"):
        run_evaluate(tmp_path, draft, TargetModel(folder, target.digest), tokens)


def test_a_split_without_samples_is_refused(draft, target, tokens, tmp_path):
    empty = tmp_path / "tokens"
    empty.mkdir()
    info = json.loads((tokens.path / "tokens.json").read_text())
    (empty / "tokens.json").write_text(json.dumps(info | {"shards": []}))
    (empty / "samples.jsonl").write_text("")
    (empty / "processor").symlink_to(tokens.path / "processor")
    with pytest.raises(DataError, match='the split "val" has no samples'):
        run_evaluate(tmp_path, draft, target, attrs.evolve(tokens, path=empty), split="val")


@pytest.mark.parametrize("temperature", [1e-309, 1e-4, math.inf, math.nan])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        evaluate_config(temperature=temperature)
    assert [0.0, 0.001, 2.0] == [evaluate_config(temperature=usual).temperature for usual in (0.0, 0.001, 2.0)]


def test_the_margin_of_a_tie_follows_the_dtype_unless_given():
    margins = [evaluate_config(dtype=dtype).largest_tie for dtype in ("float32", "float16", "bfloat16")]
    assert [1e-4, 0.0625, 0.5] == margins
    assert 0.25 == evaluate_config(dtype="bfloat16", tie_margin=0.25).largest_tie
