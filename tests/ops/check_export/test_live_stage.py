"""The gate's live stage without SGLang: what counts as a departure, a tie or a cause, and what is said about it."""

from __future__ import annotations

import attrs
import pytest
import torch
from dflash_cases import LAYERS, NEW_TOKENS, changed, make_case
from fake_stage import FakeStage

from dsl.finding import Finding
from dsl.op import Ref
from ops.artifacts import Report
from ops.check_export.live import Setting, check_live, judge
from ops.check_export.live_cause import (
    OTHER_REPORT,
    UNKNOWN,
    Comparison,
    Watched,
    compare_watched,
    find_cause,
    is_tie,
    prompts_to_watch,
    replay,
)
from ops.check_export.op import CheckExport
from ops.check_export.served_prompts import (
    Departure,
    LiveUnavailable,
    Prompt,
    departure_mistakes,
    departures,
    equal_steps,
    is_below,
    served_tau,
    tau_of,
)
from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding import decode
from ops.lib.drafts.decoding.decode import Decoded, decode_speculative
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dflash2.model import propose as propose_walk
from ops.lib.drafts.dflash2.model import selector_of
from ops.lib.sglang.version import installed_version


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A tiny Qwen3-VL and its drafts."""
    return make_case("qwen3_vl", tmp_path_factory.mktemp("case"), images=True)


@pytest.fixture(scope="module")
def draft(case):
    return load_draft(case.drafts["noisy"].path)


@pytest.fixture(scope="module")
def prompts(case):
    """The prompts that the gate makes from an evaluation with the noisy draft."""
    reference = case.reference(case.drafts["noisy"].path)
    return [
        Prompt(prompt, plain.tokens, answer.accepted, NEW_TOKENS)
        for prompt, plain, answer in zip(case.prompts, case.plain, reference, strict=True)
    ]


def as_evaluated(prompt):
    return Decoded(prompt.tokens, prompt.accepted)


def left_at_step(prompt, step):
    """SGLang accepts one draft token less, or more, in this step."""
    ours = prompt.accepted[step]
    theirs = ours - 1 if ours else 1
    served = Decoded(prompt.tokens, (*prompt.accepted[:step], theirs, *prompt.accepted[step + 1 :], 0))
    return departures([prompt], [served])[0]


def test_equal_answers_and_lengths_are_no_departure(prompts):
    assert [] == departures(prompts, [as_evaluated(prompt) for prompt in prompts])
    assert 1.0 == equal_steps(prompts, [as_evaluated(prompt) for prompt in prompts])


def test_a_departure_names_the_sample_the_place_and_both_sides():
    prompt = Prompt(attrs.make_class("Sample", {"id": attrs.field(default="a")})(), (5, 6, 7, 8), (1, 0), 3)
    served = [Decoded((5, 6, 9, 8), (1, 0)), Decoded((5, 6, 7, 8), (1, 1)), Decoded((5, 6, 7), (1,))]
    found = [departures([prompt], [answer])[0] for answer in served]
    assert [(2, None), (None, 1), (3, 1)] == [(one.position, one.step) for one in found]
    assert [
        "sample a: token 2 of the answer is 9 in SGLang, and 7 by the target itself",
        "sample a: step 1 accepts 1 draft tokens in SGLang, 0 in evaluate; in all 2 steps instead of 2",
        "sample a: token 3 of the answer is none in SGLang, and 8 by the target itself",
    ] == [str(one) for one in found]
    assert [1.0, 0.5, 0.5] == [equal_steps([prompt], [answer]) for answer in served]
    answers, lengths = departure_mistakes(found, 9, Finding("it is so", advice="do this"))
    assert answers.what.startswith("2 of 9 answers are not the target's own:\n  sample a: token 2")
    assert lengths.what.startswith("1 of 9 prompts are accepted differently than in evaluate:\n  sample a: step 1")
    assert ("do this", True) == (lengths.advice, lengths.what.endswith("; it is so"))


def test_many_departures_are_counted_and_some_are_shown(prompts):
    found = [left_at_step(prompts[0], 0)] * 12
    (mistake,) = departure_mistakes(found, 20, Finding("why", advice="what to do"))
    assert (8, "  and 7 more") == (len(mistake.what.splitlines()), mistake.what.splitlines()[-2])


def test_a_token_is_tied_where_the_targets_two_best_logits_are_close(case, draft, prompts):
    for place, position in ((0, 0), (2, 1), (3, 11)):
        tokens = list(prompts[place].tokens)
        tokens[position] += 1
        departure = departures([prompts[place]], [Decoded(tuple(tokens), prompts[place].accepted)])[0]
        margin = case.plain[place].margins[position]
        assert is_tie(case.loaded, draft, departure, margin * 1.01 + 1e-4)
        assert not is_tie(case.loaded, draft, departure, margin * 0.99 - 1e-4)


def test_a_step_is_tied_where_the_drafts_two_best_logits_are_close_at_the_slot_in_question(
    case, draft, prompts, monkeypatch
):
    for place, step in ((0, 0), (0, len(prompts[0].accepted) // 2), (2, 1), (4, 2)):
        prompt = prompts[place]
        departure = left_at_step(prompt, step)
        slot = min(prompt.accepted[step], departure.served.accepted[step])
        margins = []

        def watched(target, draft, context, anchor, _use, slot=slot, margins=margins):
            embeds = target.embed_weight[[anchor, draft.config.mask_token_id]]
            logits = draft.propose(*embeds, context.kv) @ target.head_weight.T
            best = logits[slot].topk(2).values
            margins.append(float(best[0] - best[1]))
            return logits.argmax(-1).tolist()

        with monkeypatch.context() as patch:
            patch.setattr(decode, "propose", watched)
            decode_speculative(case.loaded, draft, prompt.sample, NEW_TOKENS)
        assert is_tie(case.loaded, draft, departure, margins[step] * 1.01 + 1e-3)
        assert not is_tie(case.loaded, draft, departure, margins[step] * 0.99 - 1e-3)


def test_a_step_of_dflash2_is_tied_where_its_selectors_two_best_scores_are_close(case, draft, monkeypatch):
    own = DraftModel(attrs.evolve(draft.config, algorithm=Dflash2(group=4, rank=4, candidates=4))).eval()
    own.initialise(0)
    own.load_state_dict(draft.state_dict(), strict=False)
    with torch.no_grad():
        for table in (selector_of(own).predecessor_codebook, selector_of(own).successor_codebook):
            table.normal_(generator=torch.Generator().manual_seed(1))
    choices: list[Scored] = []

    def watched(target, draft, context, anchor, _use):
        hidden_DM = draft.propose(*target.embed_weight[[anchor, draft.config.mask_token_id]], context.kv)
        choices.append(Scored([]))
        logits_DV = hidden_DM @ target.head_weight.T
        proposal = propose_walk(draft, hidden_DM[None], logits_DV[None], torch.tensor([anchor]), choices[-1])
        return proposal.tokens_BD[0].tolist()

    for sample, plain in zip(case.prompts[:3], case.plain, strict=False):
        choices.clear()
        with monkeypatch.context() as patch:
            patch.setattr(decode, "propose", watched)
            answer = decode_speculative(case.loaded, own, sample, NEW_TOKENS)
        departure = left_at_step(Prompt(sample, plain.tokens, answer.accepted, NEW_TOKENS), 1)
        margin = choices[1].margins[min(answer.accepted[1], departure.served.accepted[1])]
        assert is_tie(case.loaded, own, departure, margin * 1.01 + 1e-3)
        assert not is_tie(case.loaded, own, departure, margin * 0.99 - 1e-3)


@attrs.frozen
class Scored:
    """A greedy choice that keeps by how much each token was better than the next one."""

    margins: list[float]

    def among(self, scores_BC, candidates_BC, _size, _place):
        best = scores_BC[0].topk(2).values
        self.margins.append(float(best[0] - best[1]))
        return candidates_BC.gather(1, scores_BC.argmax(-1, keepdim=True))[:, 0]


def test_what_evaluate_itself_could_decode_in_two_ways_is_tied(case, draft, prompts):
    tokens = (*prompts[0].tokens[:-1], prompts[0].tokens[-1] + 1)
    prompt = attrs.evolve(prompts[0], tokens=tokens)
    assert is_tie(case.loaded, draft, left_at_step(prompt, 0), 0.0)


def given(case, prompt, layer_ids=LAYERS, outputs=False):
    """Features of these layers, or of their outputs, and the positions, as SGLang would hand them to its draft."""
    done = sum(prompt.accepted) + len(prompt.accepted)
    ids = torch.cat([prompt.sample.input_ids[: prompt.sample.prompt_tokens], torch.tensor(prompt.tokens[:done])])
    whole = attrs.evolve(prompt.sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    with torch.no_grad(), case.loaded.capture_inputs(layer_ids) as captured:
        states = case.loaded.forward(case.loaded.inputs([whole]), output_hidden_states=True).hidden_states
    features = torch.cat([states[k + 1][0] for k in layer_ids], dim=-1) if outputs else captured.features()[0]
    return features, torch.arange(len(ids))


def watched(case, prompt, features_SF=None, positions_S=None):
    """The inputs with which SGLang would have run the noisy draft, unless others are given."""
    features, positions = given(case, prompt)
    return Watched(
        prompt,
        features if features_SF is None else features_SF,
        positions if positions_S is None else positions_S,
        as_evaluated(prompt),
    )


def test_the_cause_is_named_from_what_the_draft_was_given(case, draft, prompts):
    image = prompts[1]
    features, positions = given(case, image)

    def cause(**changes):
        compared = compare_watched(case.loaded, draft, [watched(case, prompts[0]), watched(case, image, **changes)])
        return find_cause(case.loaded, draft, left_at_step(image, 0), compared).what

    assert "position 3 for token 0 of the prompt" in cause(positions_S=positions + 3)
    late = positions + (positions >= image.sample.prompt_tokens + 2)
    assert f"position {image.sample.prompt_tokens + 3} for token 2 of the answer" in cause(positions_S=late)
    shifted = cause(features_SF=given(case, image, [k + 1 for k in LAYERS])[0])
    assert [f"states for layer {k} that differ by" for k in LAYERS] == [
        f"states for layer {part.split('layer ')[1].split(' ')[0]} that differ by" for part in shifted.split("; ")
    ]
    assert [f"are those of layer {k + 1}" for k in LAYERS] == [
        part[part.index("are those") :] for part in shifted.split("; ")
    ]
    early = cause(features_SF=given(case, image, outputs=True)[0])
    assert 2 == early.count("before deepstack's visual features are added")
    assert "layer 3" not in early
    assert 4 == cause(features_SF=features.flip(0)).count("match no layer's")
    assert 4 == cause(features_SF=features * torch.nan).count("differ by nan of their size and match no layer's")
    start = image.sample.prompt_tokens
    moved = torch.cat([features[:start], features[start:].roll(1, dims=0)])
    assert 4 == cause(features_SF=moved).count("match no layer's answer")
    assert UNKNOWN.what == cause()


def test_states_that_lie_closer_to_another_layers_are_told_though_the_limit_of_the_dtype_holds(case, draft, prompts):
    """Layers of a deep target may differ by less than bfloat16 is allowed to."""
    features = given(case, prompts[0])[0]
    shifted = given(case, prompts[0], [k + 1 for k in LAYERS])[0]
    half = case.loaded.from_directory(case.checkpoint, case.loaded.info, "cpu", torch.bfloat16)
    for weight in (0.0, 0.02, 1.0):
        states = features + weight * (shifted - features)
        compared = compare_watched(half, draft, [watched(case, prompts[0], features_SF=states)])
        print(f"{weight} of the way to the next layer: distance {compared.feature_distance:.3f}, {compared.cause}")
        assert (weight == 1.0) == (compared.cause is not None)


def test_dflows_draft_on_an_answer_has_as_many_tokens_right_as_it_had_in_decoding(case, draft, prompts):
    other = load_draft(case.drafts["random"].path)
    shares = []
    for model in (draft, other):
        found = []
        for prompt in prompts:
            features = given(case, prompt)[0]
            found.append(replay(case.loaded, model, watched(case, prompt), features))
        shares.append(sum(equal for equal, _ in found) / sum(steps for _, steps in found))
    print(f"replayed: {shares[0]:.2f} with the draft that was served, {shares[1]:.2f} with another")
    assert 1.0 == shares[0]
    assert 0.7 > shares[1]


def test_below_float32_a_draft_that_has_other_tokens_right_is_told(case, prompts):
    half = case.loaded.from_directory(case.checkpoint, case.loaded.info, "cpu", torch.bfloat16)
    seen = [watched(case, prompt) for prompt in prompts]
    causes = []
    for quality in ("noisy", "random"):
        compared = compare_watched(half, load_draft(case.drafts[quality].path).to(torch.bfloat16), seen)
        print(f"{quality}: {compared.replayed:.2f} of the steps, features differ by {compared.feature_distance:.3f}")
        causes.append(compared.cause)
    assert causes[0] is None
    assert "dflow's draft has as many tokens right in" in causes[1].what
    assert "85% are expected" in causes[1].what


def test_prompts_with_and_without_images_and_departures_are_watched(prompts):
    names = [prompt.sample.id for prompt in prompts]
    assert names[:3] == [prompt.sample.id for prompt in prompts_to_watch(prompts, [])]
    assert [*names[:3], names[4]] == [
        prompt.sample.id for prompt in prompts_to_watch(prompts, [left_at_step(prompts[4], 0)])
    ]


def test_lengths_that_dflow_gets_from_the_same_directory_point_at_the_report(case, prompts, tmp_path):
    other = load_draft(changed(case.drafts["noisy"], tmp_path / "other", mask_token_id=9))
    prompt = prompts[0]
    served = decode_speculative(case.loaded, other, prompt.sample, NEW_TOKENS)
    departure = departures([prompt], [served])[0]
    assert "the report is of other weights or of another config.json" in OTHER_REPORT.what
    assert OTHER_REPORT == find_cause(case.loaded, other, departure, Comparison(None, 1.0, 0.0))


def setting(case, **changes):
    values = {
        "draft_dir": case.drafts["noisy"].path,
        "target_dir": case.checkpoint,
        "info": case.loaded.info,
        "device": "cpu",
        "dtype": "float32",
        "evaluated_in": "float32",
        "tie_margin": 1e-4,
        "forward_tolerance": 1e-4,
    }
    return Setting(**values | changes)


def test_ties_are_counted_and_are_no_mistakes(case, draft, prompts):
    left = [left_at_step(prompts[0], 1), left_at_step(prompts[2], 0)]
    served = [as_evaluated(prompt) for prompt in prompts]
    seen = [watched(case, departure.prompt) for departure in left]
    tied = judge(setting(case, tie_margin=1e9), draft, prompts, served, left, seen)
    assert (2, ()) == (tied.ties, tied.mistakes)
    judged = judge(setting(case), draft, prompts, served, left, seen)
    assert (0, 1) == (judged.ties, len(judged.mistakes))
    assert "2 of 5 prompts" in judged.mistakes[0].what and UNKNOWN.what in judged.mistakes[0].what


def test_below_float32_tau_decides(case, draft, prompts):
    left = [left_at_step(prompts[0], 1)]
    seen = [watched(case, left[0].prompt)]
    half = setting(case, dtype="bfloat16", evaluated_in="float32")
    worse = [Decoded(prompt.tokens, (0,) * (len(prompt.tokens) - 1)) for prompt in prompts]
    assert () == judge(half, draft, prompts, [as_evaluated(prompt) for prompt in prompts], left, seen).mistakes
    (mistake,) = judge(half, draft, prompts, worse, left, seen).mistakes
    tau = sum(len(prompt.tokens) - 1 for prompt in prompts) / sum(len(prompt.accepted) for prompt in prompts)
    assert mistake.what.startswith(f"tau is 1.00 in SGLang, and {tau:.2f} in evaluate on the same 5 prompts")
    assert "SGLang serves in bfloat16 and evaluate decoded in float32" in mistake.what


def test_tau_is_below_the_interval_only_beyond_the_slack(prompts):
    measured = tau_of(prompts)
    assert measured.low <= served_tau([as_evaluated(prompt) for prompt in prompts]) <= measured.high
    assert not is_below(measured.low * 0.96, measured)
    assert is_below(measured.low * 0.94, measured)
    assert not is_below(1.0, tau_of(prompts[:1]))
    assert not is_below(None, measured)
    assert not is_below(measured.high * 2, measured)


@pytest.mark.skipif(installed_version() is not None, reason="SGLang is installed here")
def test_where_sglang_cannot_be_imported_the_stage_is_unavailable(case, prompts, tmp_path):
    write_json(tmp_path / "report.json", {"dtype": "float32", "tie_margin": 1e-4})
    stage = FakeStage(tmp_path, {"target": case.target, "report": Report(tmp_path, "report")})
    config = CheckExport(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), report=Ref("d"))
    with pytest.raises(LiveUnavailable, match="is installed, but cannot be imported here: No module named 'sglang"):
        check_live(case.drafts["noisy"].path, case.checkpoint, prompts, config, stage)


def test_a_departure_is_compared_by_value(prompts):
    assert left_at_step(prompts[0], 1) == left_at_step(prompts[0], 1)
    assert Departure(prompts[0], as_evaluated(prompts[0]), None, 0) != left_at_step(prompts[0], 1)
