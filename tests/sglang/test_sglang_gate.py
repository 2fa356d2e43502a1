"""The gate's live stage on SGLang's real code: it passes sound drafts, and tells what is wrong with the others.

The drafts are noisy ones where an error has to show: a draft that knows the answers hides wrong features.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from dflash_cases import NEW_TOKENS, changed, written
from fake_stage import FakeStage
from gate_cases import check
from safetensors.torch import load_file

from dsl.errors import DataError
from dsl.finding import block
from dsl.op import Ref
from ops.artifacts import Draft, Report
from ops.check_export.live import check_live, choose_dtype
from ops.check_export.op import CheckExport
from ops.check_export.served_prompts import LiveUnavailable, Prompt
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.evaluate.statistics import acceptance_length
from ops.lib.data.files import read_json, read_jsonl, write_json
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.decoding.decode import decode_speculative
from ops.lib.target.model import Target
from ops.load_draft.op import LoadDraft
from ops.load_draft.run import load_draft as load_foreign

WORKER = "sglang.srt.speculative.dflash_worker_v2"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the live stage reads of a report."""
    folder = tmp_path_factory.mktemp("report")
    write_json(folder / "report.json", {"dtype": "float32", "tie_margin": 1e-4})
    return Report(folder, "report")


def config(**changes):
    return CheckExport(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), report=Ref("d"), **changes)


@pytest.fixture(scope="module")
def half_report(tmp_path_factory):
    """The same of an evaluation in bfloat16, the only dtype of a draft on a GPU."""
    folder = tmp_path_factory.mktemp("half")
    write_json(folder / "report.json", {"dtype": "bfloat16", "tie_margin": 1e-4})
    return Report(folder, "report")


def prompts_in_bfloat16(case, draft: Draft):
    """What `evaluate` makes of a case in bfloat16, on this machine's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.from_directory(case.checkpoint, case.loaded.info, device, torch.bfloat16)
    model = load_draft(draft.path).to(device, torch.bfloat16)
    decoded = [decode_speculative(target, model, prompt, NEW_TOKENS) for prompt in case.prompts]
    return [
        Prompt(prompt, answer.tokens, answer.accepted, NEW_TOKENS)
        for prompt, answer in zip(case.prompts, decoded, strict=True)
    ]


@pytest.fixture
def live_in_bfloat16(half_report, tmp_path):
    """Runs the live stage in bfloat16 beside an evaluation in bfloat16."""

    def run(case, draft: Draft, device="cpu"):
        stage = FakeStage(tmp_path, {"target": case.target, "report": half_report}, device=device)
        result = check_live(draft.path, case.checkpoint, prompts_in_bfloat16(case, draft), config(), stage)
        print(f"{result.details}, {len(result.mistakes)} mistakes")
        return result

    return run


@pytest.fixture
def live(report, tmp_path):
    """Runs the live stage on a draft of a case, whose accepted lengths are those of another, sound one."""

    def run(case, sound: Draft, served: Path | None = None, **changes):
        prompts = [
            Prompt(prompt, plain.tokens, answer.accepted, NEW_TOKENS)
            for prompt, plain, answer in zip(case.prompts, case.plain, case.reference(sound.path), strict=True)
        ]
        stage = FakeStage(tmp_path, {"target": case.target, "report": report})
        result = check_live(served or sound.path, case.checkpoint, prompts, config(**changes), stage)
        for mistake in result.mistakes:
            print(mistake)
        print(f"{result.details}, ties {result.ties}")
        return result

    return run


def told(result):
    return "\n".join(map(block, result.mistakes))


@pytest.mark.parametrize("name", ["text_case", "vision_case"])
def test_a_sound_draft_passes(request, live, name):
    case = request.getfixturevalue(name)
    result = live(case, case.drafts["noisy"])
    assert ((), 0) == (result.mistakes, result.ties)
    distance = result.details["feature_distance"]
    assert 1e-4 > distance
    assert {
        "dtype": "float32",
        "equal_steps": 1.0,
        "equal_answers": len(case.prompts),
        "replayed_steps": 1.0,
        "feature_distance": distance,
    } == result.details
    assert 1e-5 > max(result.forward.values())
    assert len(case.prompts) == len(result.answers)


def layers_one_higher(patch):
    """The setter of the text model counts one further."""
    model = importlib.import_module("sglang.srt.models.qwen3").Qwen3ForCausalLM
    right = model.set_dflash_layers_to_capture
    patch.setattr(model, "set_dflash_layers_to_capture", lambda self, ids: right(self, [k + 1 for k in ids]))


def another_mask_token(patch):
    worker = importlib.import_module(WORKER).DFlashWorkerV2
    patch.setattr(worker, "_resolve_mask_token_id", lambda _self, **_options: 9)


def another_theta(patch):
    draft = importlib.import_module("sglang.srt.models.dflash")
    right = draft.get_rope_config
    patch.setattr(draft, "get_rope_config", lambda config: (2 * right(config)[0], right(config)[1]))


def features_of_the_token_before(patch):
    """What is kept of the accepted tokens is shifted; the prompt's features are right."""
    worker = importlib.import_module(WORKER).DFlashWorkerV2
    append = worker._append_target_hidden_to_draft_kv_by_loc

    def shifted(self, *, target_hidden, commit_lens=None, **others):
        if commit_lens is not None:
            target_hidden = target_hidden.roll(1, dims=0)
        append(self, target_hidden=target_hidden, commit_lens=commit_lens, **others)

    patch.setattr(worker, "_append_target_hidden_to_draft_kv_by_loc", shifted)


def moved_by_the_mrope_delta(patch):
    """Keys of the prompt at mRoPE's distance from the block: where images shorten the positions."""
    module = importlib.import_module(WORKER)
    generate, positions_of = module.DFlashWorkerV2.forward_batch_generation, module.compute_position
    deltas = []

    def forward(self, batch, *arguments, **options):
        inputs = batch.multimodal_inputs or [None] * len(batch.reqs)
        deltas[:] = [0 if images is None else int(images.mrope_position_delta) for images in inputs]
        return generate(self, batch, *arguments, **options)

    def moved(backend, prefix_lens, lengths, total):
        positions, starts = positions_of(backend, prefix_lens, lengths, total)
        return positions - torch.repeat_interleave(torch.tensor(deltas, device=lengths.device), lengths), starts

    patch.setattr(module.DFlashWorkerV2, "forward_batch_generation", forward)
    patch.setattr(module, "compute_position", moved)


def features_before_deepstack(patch):
    """SGLang's other order of the additions captures a layer's input before the visual features come to it."""
    decoder = importlib.import_module("sglang.srt.models.qwen3_vl").Qwen3LLMModel
    make = decoder.__init__

    def init(self, **options):
        make(self, **options)
        self.use_hf_deepstack_order = True

    patch.setattr(decoder, "__init__", init)


def slot_0_is_not_asked(patch):
    """The other layout of DSpark."""
    draft = importlib.import_module("sglang.srt.models.dspark")
    patch.setattr(draft, "get_dspark_sample_from_anchor", lambda _config: False)


def context_of_the_token_before(patch):
    """As `features_of_the_token_before`, of DSpark's worker."""
    draft = importlib.import_module("sglang.srt.models.dspark").Qwen3DSparkModel
    write = draft.write_target_hidden_kv

    def shifted(self, *, target_hidden, commit_lens=None, **others):
        if commit_lens is not None:
            target_hidden = target_hidden.roll(1, dims=0)
        write(self, target_hidden=target_hidden, commit_lens=commit_lens, **others)

    patch.setattr(draft, "write_target_hidden_kv", shifted)


def no_bias(patch):
    """The heads are dropped."""
    head = importlib.import_module("sglang.srt.models.dspark").VanillaMarkov
    patch.setattr(head, "get_prev_embeddings", lambda self, ids: torch.zeros(*ids.shape, self.markov_rank))


ERRORS = {
    layers_one_higher: ("text_case", r"states for layer 0 that differ by .* and are those of layer 1; .* of layer 2; "),
    another_mask_token: ("text_case", r"mask_token_id is \d+\n    SGLang: reads 9\n"),
    another_theta: ("text_case", r"forward pass in float32 \(1 layers, block 6, context \d+\) differs by"),
    features_of_the_token_before: ("text_case", "states for layer 0 that .* match no layer's answer"),
    moved_by_the_mrope_delta: ("vision_case", r"the draft gets position \d+ for token 0 of the prompt"),
    features_before_deepstack: ("vision_case", "states for layer 0 that .* are those before deepstack's"),
}


def departs_in_accepted_lengths_only(case, sound, result, text):
    """Answers are the target's; the gate counts every prompt that is accepted otherwise, and there is one."""
    assert len(case.prompts) == result.details["equal_answers"]
    served, expected = [answer.accepted for answer in result.answers], case.reference(sound.path)
    departed = sum(ours.accepted != theirs for ours, theirs in zip(expected, served, strict=True))
    print(f"{departed} prompts depart; {sum(map(len, served))} steps, {sum(one.steps for one in expected)} expected")
    assert departed > 0 == result.ties
    assert 1 > result.details["equal_steps"]
    assert (
        f"{departed} of {len(case.prompts)} prompts are accepted differently than in evaluate:\n      sample " in text
    )


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_a_server_that_gives_the_draft_something_else_is_caught_and_the_cause_named(request, live, monkeypatch, error):
    name, expected = ERRORS[error]
    case = request.getfixturevalue(name)
    sound = case.drafts["noisy"]
    error(monkeypatch)
    result = live(case, sound)
    text = told(result)
    departs_in_accepted_lengths_only(case, sound, result, text)
    assert "so the answers are still right" in text
    assert re.search(expected, text)


ERRORS_OF_DSPARK = {
    slot_0_is_not_asked: r"the number of slots of a block is 5\n    SGLang: reads 6\n",
    context_of_the_token_before: "states for layer 0 that .* match no layer's answer",
    no_bias: "features and positions are correct, so the difference arises after them",
    layers_one_higher: ERRORS[layers_one_higher][1],
    another_theta: ERRORS[another_theta][1],
}


@pytest.mark.parametrize("error", ERRORS_OF_DSPARK, ids=lambda error: error.__name__)
def test_so_it_is_for_a_draft_of_dspark(anchor_first, live, monkeypatch, error):
    case, sound = anchor_first("text_case")
    error(monkeypatch)
    result = live(case, sound)
    text = told(result)
    departs_in_accepted_lengths_only(case, sound, result, text)
    assert re.search(ERRORS_OF_DSPARK[error], text)


@pytest.fixture(scope="module")
def bound_to_context(trained_lilicorr, tmp_path_factory) -> Draft:
    """A LiLiCorr draft that proposes other tokens without the end of a context, which one that knows the answers hardly
    needs: with noise in what its lattice makes of it.
    """
    generator = torch.Generator().manual_seed(0)
    weights = load_file(trained_lilicorr.path / "model.safetensors")
    for name in ("lilicorr.context_proj.weight", "lilicorr.factor_input_proj.weight"):
        weights[name] += torch.randn(weights[name].shape, generator=generator) * 0.3
    return written(trained_lilicorr, weights, tmp_path_factory.mktemp("bound") / "draft")


def test_a_sound_draft_of_lilicorr_passes_though_requests_end_at_different_steps(text_case, bound_to_context, live):
    result = live(text_case, bound_to_context)
    assert ((), 0) == (result.mistakes, result.ties)
    assert (1.0, 1.0) == (result.details["equal_steps"], result.details["replayed_steps"])
    assert len({len(answer.accepted) for answer in result.answers}) > 1


def passes_in_bfloat16(case, result):
    figures = result.details
    assert () == result.mistakes
    assert "bfloat16" == figures["dtype"]
    assert 0.15 > figures["feature_distance"] > 0
    assert figures["replayed_steps"] > 0.9
    assert len(case.prompts) == len(result.answers)


@pytest.mark.parametrize("quality", ["noisy", "trained"])
@pytest.mark.parametrize("name", ["text_case", "vision_case"])
def test_a_sound_draft_passes_in_bfloat16(request, live_in_bfloat16, name, quality):
    case = request.getfixturevalue(name)
    passes_in_bfloat16(case, live_in_bfloat16(case, case.drafts[quality]))


def test_a_sound_draft_of_dspark_passes_in_bfloat16(anchor_first, live_in_bfloat16):
    case, draft = anchor_first("vision_case")
    passes_in_bfloat16(case, live_in_bfloat16(case, draft))


IN_THE_CONTEXT = (
    layers_one_higher,
    features_of_the_token_before,
    features_before_deepstack,
    moved_by_the_mrope_delta,
)


@pytest.mark.parametrize("quality", ["noisy", "trained"])
@pytest.mark.parametrize("error", IN_THE_CONTEXT, ids=lambda error: error.__name__)
def test_in_bfloat16_too_a_server_that_gives_the_draft_something_else_is_caught(
    request, live_in_bfloat16, monkeypatch, error, quality
):
    name, expected = ERRORS[error]
    case = request.getfixturevalue(name)
    error(monkeypatch)
    result = live_in_bfloat16(case, case.drafts[quality])
    (mistake,) = result.mistakes
    assert re.search(expected, str(mistake))
    assert "so the answers are still right" in mistake.what


@pytest.mark.parametrize("error", [another_mask_token, another_theta], ids=lambda error: error.__name__)
def test_in_bfloat16_too_a_draft_that_is_computed_otherwise_is_caught(text_case, live_in_bfloat16, monkeypatch, error):
    error(monkeypatch)
    assert re.search(
        ERRORS[error][1].replace("float32", "bfloat16"), told(live_in_bfloat16(text_case, text_case.drafts["noisy"]))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["text_case", "vision_case"])
def test_on_a_gpu_a_sound_draft_passes_in_bfloat16(request, live_in_bfloat16, name):
    case = request.getfixturevalue(name)
    passes_in_bfloat16(case, live_in_bfloat16(case, case.drafts["noisy"], device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("error", IN_THE_CONTEXT, ids=lambda error: error.__name__)
def test_on_a_gpu_a_server_that_gives_the_draft_something_else_is_caught(request, live_in_bfloat16, monkeypatch, error):
    name, expected = ERRORS[error]
    case = request.getfixturevalue(name)
    error(monkeypatch)
    assert re.search(expected, told(live_in_bfloat16(case, case.drafts["noisy"], device="cuda")))


DAMAGED = {
    "a tensor missing": ({"without": "layers.0.mlp.up_proj.weight"}, 'Missing key.*"layers.0.mlp.up_proj.weight"'),
    "another mask token": ({"mask_token_id": 9}, "the report is of other weights or of another config.json"),
    "other layers": ({"target_layer_ids": [1, 2, 4, 5]}, "the report is of other weights or of another config.json"),
    "another block size": ({"block_size": 8}, "the report is of other weights or of another config.json"),
    "a short context": ({"max_position_embeddings": 64}, "refuses to start: .* derived context_length \\(64\\)"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_export_that_is_not_the_draft_that_was_evaluated_is_caught(text_case, live, tmp_path, name):
    damage, expected = DAMAGED[name]
    sound = text_case.drafts["noisy"]
    result = live(text_case, sound, changed(sound, tmp_path / "export", **damage))
    assert re.search(expected, told(result))
    assert "what to do: write the export again: dflow resume RUN --from export" in told(result)
    if result.answers:
        assert len(text_case.prompts) == result.details["equal_answers"]
        assert "prompts are accepted differently than in evaluate" in told(result)


def test_half_precision_is_measured_by_tau_and_tells_the_share_of_equal_steps(text_case, live):
    sound = text_case.drafts["trained"]
    result = live(text_case, sound, dtype="bfloat16")
    tau = acceptance_length(text_case.reference(sound.path), 1, 0).tau
    assert "bfloat16" == result.details["dtype"]
    assert 0 < result.details["equal_steps"] < 1
    assert all(" layers, block 6, context " in name for name in result.forward)
    # Answers without a rule are another text once a token is: tau falls, and the gate says by how much.
    assert re.search(rf"^tau is \d\.\d\d in SGLang, and {tau:.2f} in evaluate on the same 5 prompts", told(result))
    assert "SGLang serves in bfloat16 and evaluate decoded in float32" in told(result)


def evaluated(case, draft, folder):
    inputs = {"draft": draft, "target": case.target, "tokens": case.tokens}
    stage = FakeStage(folder, inputs)
    options = {"max_new_tokens": NEW_TOKENS, "random_draft": False, "bootstrap": 50, "seed": 0}
    evaluate(Evaluate(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), **options), stage)
    return {**inputs, "report": stage.artifact(Report)}


def test_the_gate_passes_a_real_chain_and_refuses_it_where_sglang_serves_otherwise(
    vision_case, tmp_path, monkeypatch, capsys
):
    inputs = evaluated(vision_case, vision_case.drafts["noisy"], tmp_path / "eval")
    stage = check(tmp_path / "gate", inputs, live="required")
    checked = read_json(stage.out_dir / "check.json")
    assert ("passed", "passed") == (checked["static"], checked["live"]["status"])
    assert checked["tau"]["evaluate"] == checked["tau"]["served"]
    assert stage.metric("check/tau_evaluate") == stage.metric("check/tau_served")
    print(checked["tau"])
    rows = list(read_jsonl(stage.out_dir / "served.jsonl"))
    assert [row["accepted_evaluate"] for row in rows] == [row["accepted"] for row in rows]
    assert [prompt.id for prompt in vision_case.prompts] == [row["id"] for row in rows]
    features_before_deepstack(monkeypatch)
    with pytest.raises(
        DataError, match=r"breaks the serving contract:\n  . of 5 prompts are accepted differently"
    ) as error:
        check(tmp_path / "refused", inputs)
    print(error.value)
    assert "are those before deepstack's visual features are added" in str(error.value)


@pytest.mark.parametrize(("case_name", "imported"), [("text_case", False), ("vision_case", False), ("text_case", True)])
def test_the_gate_passes_a_real_chain_of_dspark(anchor_first, tmp_path, case_name, imported):
    case, draft = anchor_first(case_name)
    if imported:
        loading = FakeStage(tmp_path / "import", {"target": case.target})
        load_foreign(LoadDraft(source=str(draft.path), target=Ref("target")), loading)
        draft = loading.artifact(Draft)
    stage = check(tmp_path / "gate", evaluated(case, draft, tmp_path / "eval"), live="required")
    checked = read_json(stage.out_dir / "check.json")
    assert ("passed", "DSPARK", 1.0) == (checked["live"]["status"], checked["engine"], checked["live"]["equal_steps"])
    assert checked["tau"]["evaluate"] == checked["tau"]["served"]
    print(checked["tau"])
    rows = list(read_jsonl(stage.out_dir / "served.jsonl"))
    assert [row["accepted_evaluate"] for row in rows] == [row["accepted"] for row in rows]


def test_where_sglang_refuses_a_cpu_the_live_stage_is_skipped_or_required_in_vain(
    text_case, tmp_path, monkeypatch, capsys
):
    inputs = evaluated(text_case, text_case.drafts["random"], tmp_path / "eval")
    hook = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    monkeypatch.setattr(hook, "current_platform", hook.current_platform.platform)
    checked = read_json(check(tmp_path / "auto", inputs).out_dir / "check.json")
    assert ("passed", "skipped") == (checked["static"], checked["live"]["status"])
    assert checked["live"]["reason"].startswith("SGLang refuses DFLASH on a CPU")
    assert "SKIPPED" in capsys.readouterr().out
    with pytest.raises(DataError, match="SGLang refuses DFLASH on a CPU"):
        check(tmp_path / "required", inputs, live="required")


def test_on_a_gpu_the_draft_is_checked_in_bfloat16(text_case, report, tmp_path):
    stage = FakeStage(tmp_path, {"target": text_case.target, "report": report}, device="cuda")
    with pytest.raises(LiveUnavailable, match="casts a draft's inputs to bfloat16 on a GPU"):
        check_live(text_case.drafts["noisy"].path, text_case.checkpoint, [], config(dtype="float32"), stage)
    asked = [(None, "float32"), ("bfloat16", "float32"), (None, "bfloat16")]
    chosen = [choose_dtype(config(dtype=dtype), {"dtype": evaluated}, "cuda") for dtype, evaluated in asked]
    assert ["bfloat16"] * 3 == chosen
    assert "float32" == choose_dtype(config(), {"dtype": "float32"}, "cpu")
