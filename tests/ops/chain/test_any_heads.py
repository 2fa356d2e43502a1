"""Targets whose logits are not the plain product with their head, or whose embeddings are scaled, through the chain."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from any_targets import any_checkpoint, numbered_rows
from attrs import frozen
from fake_stage import FakeStage

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import (
    BatchPlan,
    CheckedDraft,
    Draft,
    DraftCheckpoint,
    ImageSamples,
    Report,
    Samples,
    TargetFeatures,
    TargetModel,
    TokenShards,
)
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.check_export.op import CheckExport
from ops.check_export.run import check_export
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, write_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.backbone.reference import reference_slot_losses
from ops.lib.drafts.backbone.serving_contract import check_serving
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.drafts.losses.loss import slot_losses
from ops.lib.target.embedding_and_head import frozen_ends
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import Target
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

# Fields of the target's config, and what the draft's config.json holds of them; the hidden size is 64.
KINDS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "gemma2": (
        {"final_logit_softcapping": 2.0},
        {"input_embedding_scale": 8.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3_text": ({}, {"input_embedding_scale": 8.0}),
    "cohere": ({}, {"output_multiplier": 0.0625}),
    "granite": ({}, {"input_embedding_scale": 3.0, "output_multiplier": 0.25}),
    "phi": ({}, {}),
}


@frozen
class Chain:
    kind: str
    target: TargetModel
    tokens: TokenShards
    features: TargetFeatures
    draft: Draft
    report: Report
    checked: CheckedDraft
    warnings: tuple[str, ...]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSamples:
    folder = tmp_path_factory.mktemp("data")
    read = FakeStage(folder / "ingest")
    ingest(Ingest(source=str(numbered_rows(folder / "data.jsonl", 6)), seed=0), read)
    injected = FakeStage(folder / "inject", {"samples": read.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("a")), injected)
    return injected.artifact(ImageSamples)


@pytest.fixture(scope="module", params=KINDS)
def chain(request: pytest.FixtureRequest, images: ImageSamples, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A draft that was trained some steps to the target's distribution, exported, evaluated and checked."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    fields = KINDS[kind][0]
    checkpoint = str(any_checkpoint(kind, folder / "checkpoint", **fields))
    stages: dict[str, FakeStage] = {}

    def made(name: str, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
        stages[name] = FakeStage(folder / name, inputs)
        run(config, stages[name])
        return stages[name].artifact(output)

    target = made("target", LoadTarget(checkpoint=checkpoint), load_target, TargetModel)
    config = TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=8)
    tokens = made("tokens", config, tokenize_chat, TokenShards, samples=images, target=target)
    config = CaptureTargets(tokens=Ref("a"), target=Ref("b"), target_layer_ids=(0, 2), final_hidden=True)
    features = made("capture", config, capture_targets, TargetFeatures, tokens=tokens, target=target)
    config = ShardSequence(features=Ref("a"), tokens_per_step=256, epochs=2, seed=0)
    plan = made("shard", config, shard_sequence, BatchPlan, features=features)
    sizes = {"block_size": 4, "num_layers": 1, "num_anchors": 8, "seed": 0}
    config = TrainDflash(features=Ref("a"), batches=Ref("b"), target=Ref("c"), loss="kl", **sizes)
    given = {"features": features, "batches": plan, "target": target, "tokens": tokens}
    trained = made("train", config, train_dflash, DraftCheckpoint, **given)
    config = ExportDraft(draft=Ref("a"), target=Ref("b"))
    draft = made("export", config, export_draft, Draft, draft=trained, target=target)
    config = Evaluate(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), max_new_tokens=8, max_prompts=1, seed=0)
    given = {"draft": draft, "target": target, "tokens": tokens}
    report = made("evaluate", config, evaluate, Report, **given)
    config = CheckExport(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), report=Ref("d"), live="off")
    checked = made("check", config, check_export, CheckedDraft, report=report, **given)
    return Chain(kind, target, tokens, features, draft, report, checked, tuple(stages["check"].warnings))


def logits_of_transformers(target: Target, ids_S: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return target.model(input_ids=ids_S[None]).logits[0]


def test_the_teachers_distribution_is_that_of_transformers(chain: Chain) -> None:
    target = Target.load(chain.target)
    reader = FeatureReader(chain.features, "train")
    sample = TokenReader(chain.tokens, "train").sample(0)
    logits_SV = logits_of_transformers(target, sample.input_ids)
    states_SM = reader.final_hidden(0, 0, len(sample.input_ids))
    _, head = frozen_ends(chain.target)
    for one in (head, target.head):
        torch.testing.assert_close(one.logits(states_SM), logits_SV, rtol=1e-4, atol=1e-4)
    found_BS = token_log_probs(target, target.inputs([sample]))
    expected_S = logits_SV[:-1].log_softmax(-1).gather(1, sample.input_ids[1:, None])[:, 0]
    torch.testing.assert_close(found_BS[0], expected_S, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dflash", "kl", "l1", "lk", "nla"])
def test_losses_and_gradients_are_those_of_the_plain_formula(chain: Chain, kind: str) -> None:
    target = Target.load(chain.target, dtype=torch.float64)
    draft = from_serving(read_json(chain.draft.path / "config.json"))
    ids_S = TokenReader(chain.tokens, "train").sample(0).input_ids[:24]
    logits_SV = logits_of_transformers(target, ids_S)[:-1]
    with torch.no_grad():
        states_SM = target.model.base_model(input_ids=ids_S[None]).last_hidden_state[0, :-1]
    embed_VM, head = frozen_ends(chain.target, dtype=torch.float64)
    hidden_SM = torch.randn(states_SM.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden_SM.requires_grad_()
    found = slot_losses(kind, hidden_SM, head.beside(draft.head_settings), ids_S[1:], states_SM).values_W.sum()
    product_SV = hidden_SM @ head.weight_VM.T * draft.output_multiplier
    if draft.final_logit_softcapping is not None:
        product_SV = draft.final_logit_softcapping * torch.tanh(product_SV / draft.final_logit_softcapping)
    expected = reference_slot_losses(kind, product_SV, ids_S[1:], logits_SV).sum()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(each, hidden_SM)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        rows_SM = target.model(input_ids=ids_S[None], output_hidden_states=True).hidden_states[0][0]
    torch.testing.assert_close(load_draft(chain.draft.path).embedded(embed_VM[ids_S]), rows_SM)


def test_the_export_holds_scales_and_cap_and_passes_the_gate(chain: Chain) -> None:
    written = read_json(chain.checked.path / "draft" / "config.json")
    unread = "Whether SGLang serves a draft for this target was not checked."
    assert (
        "Serving\n\nWhether SGLang serves a draft for this target, `check_export` reads"
        in (chain.draft.path / "README.md").read_text()
    )
    for folder in (chain.draft.path, chain.checked.path / "draft"):  # the gate was told not to look
        card = (folder / "README.md").read_text()
        assert 1 == card.count(unread)
        assert "\n- sglang\n" not in card
    expected = KINDS[chain.kind][1]
    ends = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    assert expected == {name: written["dflash_config"][name] for name in ends if name in written["dflash_config"]}
    assert expected == {name: written["dflow"]["trained"][name] for name in ends if name in written["dflow"]["trained"]}
    report = read_json(chain.report.path / "report.json")
    assert {"errors": 0, "ties": 0} == report["lossless"]
    scale = expected.get("input_embedding_scale")
    named = {engine for engine in ("SGLang", "vLLM") for text in chain.warnings if f"{engine} would embed" in text}
    assert named == ({"SGLang", "vLLM"} if scale and chain.kind != "gemma3_text" else set())


def test_a_wrong_scale_and_a_missing_one_are_found(chain: Chain, tmp_path: Path) -> None:
    for number, name in enumerate(("input_embedding_scale", "output_multiplier", "final_logit_softcapping")):
        folder = shutil.copytree(chain.draft.path, tmp_path / str(number))
        written = read_json(folder / "config.json")
        was = written["dflash_config"].get(name)
        written["dflash_config"][name] = 5.0
        write_json(folder / "config.json", written)
        with pytest.raises(DataError, match=rf"dflash_config\.{name} is 5\.0, but the draft was trained with"):
            check_serving(folder, chain.target)
        if was is not None:
            del written["dflash_config"][name]
            write_json(folder / "config.json", written)
            with pytest.raises(DataError, match=rf"dflash_config\.{name} is missing"):
                check_serving(folder, chain.target)
            del written["dflow"]["trained"][name]
            write_json(folder / "config.json", written)
            with pytest.raises(DataError, match=r"dflow\.trained is not that of the export"):
                check_serving(folder, chain.target)
