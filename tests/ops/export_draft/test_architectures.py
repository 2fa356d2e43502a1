"""The ends of every architecture that can be a target: its head as a teacher, and a draft that is exported for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import OFTEN, OTHER_ROWS, OTHERS, config_of
from attrs import evolve
from fake_stage import FakeStage
from safetensors.torch import save_file

from dsl.op import Ref
from ops.artifacts import Draft, DraftCheckpoint, TargetModel
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import load_draft, random_draft
from ops.lib.drafts.backbone.serving_contract import check_serving
from ops.lib.drafts.losses.head import head_cross_entropy
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.target.cache_trial import sample_of
from ops.lib.target.embedding_and_head import Head, frozen_ends
from ops.lib.target.model import Target, complete_config, describe_target, read_config, write_target_json
from ops.lib.target.small_copy import small_copy
from ops.lib.vision.family_config import text_part
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.shape import forecast_shape

LAYERS, MASK, EOS = (0, 2), 7, 3
EXACT, FLOAT32 = 1e-11, 1e-6  # but for rounding
DIGEST = "0" * 64
# Its small copy has square experts, which no file of the family may have.
NOT_SAVED = ("qwen3_vl_moe",)
CAUGHT = {"target_layer_ids": list(LAYERS), "mask_token_id": MASK}


def saved(kind: str, folder: Path, **fields: Any) -> TargetModel:
    """The artifact of a small random copy of an architecture, as load_target writes it. fields: of its config.json."""
    model = folder / "target" / "model"
    small_copy(config_of(kind) | fields).model.save_pretrained(model)
    info = describe_target(model, MASK, [EOS])
    complete_config(model)
    write_target_json(folder / "target", info, {})
    return TargetModel(folder / "target", DIGEST)


def exported(target: TargetModel, folder: Path) -> Draft:
    """A random draft of this target, exported as a trained one is."""
    config = read_config(target.path / "model")
    fields = {"block_size": 4, "num_layers": 1, "num_anchors": 4}
    if "intermediate_size" not in text_part(config):  # OPT, and MLPs that are experts only
        fields["intermediate_size"] = 96
    training = TrainDflash(features=Ref("f"), batches=Ref("b"), target=Ref("t"), **fields)
    shape = evolve(forecast_shape(training, config, len(LAYERS), LAYERS), mask_token_id=MASK)
    draft = DraftCheckpoint(folder / "trained", DIGEST)
    draft.path.mkdir()
    write_json(draft.path / "config.json", to_serving(shape))
    save_file(random_draft(shape, 0).state_dict(), draft.path / "model.safetensors", {"format": "pt"})
    captured = {**CAUGHT, "hidden_size": shape.hidden_size, "num_target_layers": shape.num_target_layers}
    captured |= {"positions": shape.positions, "dtype": "float32", "tokens": DIGEST, "backend": "huggingface"}
    counts = dict.fromkeys(("samples", "tokens", "anchors", "final_steps", "steps"), 1)
    record = {"captured": captured, "features": DIGEST, "final_loss": 1.0, "val_metrics": {}, "recipe": {}, **counts}
    write_json(draft.path / "training.json", {**record, "target": DIGEST})
    stage = FakeStage(folder / "export", {"draft": draft, "target": target})
    export_draft(ExportDraft(draft=Ref("a"), target=Ref("b")), stage)
    return stage.artifact(Draft)


def check_ends_and_export(kind: str, folder: Path, **fields: Any) -> Head:
    """In float64 the teacher's logits, log-probabilities and rows are transformers' own; the export passes the static
    gate. Returns the head.
    """
    artifact = saved(kind, folder, **fields)
    target = Target.load(artifact, dtype=torch.float64)
    target.model.set_experts_implementation("eager")  # products of grouped experts do not support float64
    ids_S = torch.arange(11, 40)
    embed_VM, head = frozen_ends(artifact, dtype=torch.float64)
    inputs = target.inputs([sample_of(ids_S.tolist())])
    with torch.inference_mode():
        output = target.forward(inputs, output_hidden_states=True, use_cache=False)
        final_SM = target.hidden(inputs)[0]
    logits_SV = output.logits[0]
    assert torch.float64 == logits_SV.dtype == final_SM.dtype
    torch.testing.assert_close(head.logits(final_SM), logits_SV, rtol=0, atol=EXACT * float(logits_SV.abs().max()))
    expected_S = logits_SV[:-1].log_softmax(-1).gather(1, ids_S[1:, None])[:, 0]
    states_SM = final_SM[:-1].clone()
    cross_entropy_S, _ = head_cross_entropy(states_SM, head, ids_S[1:])
    torch.testing.assert_close(-cross_entropy_S, expected_S, rtol=EXACT, atol=EXACT)
    found_S = token_log_probs(target, inputs)[0]  # of which only the result is float32
    torch.testing.assert_close(found_S, expected_S.float(), rtol=FLOAT32, atol=FLOAT32)
    draft = exported(artifact, folder)
    check_serving(draft.path, artifact)
    loaded = load_draft(draft.path)
    if kind not in OTHER_ROWS:
        rows_SM = output.hidden_states[0][0]
        torch.testing.assert_close(loaded.embedded(embed_VM[ids_S]), rows_SM, rtol=EXACT, atol=EXACT)
    teacher = head.beside(loaded.config.head_settings)
    of_states = head if isinstance(teacher, torch.Tensor) else evolve(teacher, settings=teacher.teacher)
    assert torch.equal(of_states.logits(final_SM), head.logits(final_SM))
    return head


@pytest.mark.filterwarnings("ignore:.*fast path is not available")
@pytest.mark.parametrize("kind", [kind for kind in (*OFTEN, *OTHERS) if kind not in NOT_SAVED])
def test_a_draft_of_every_architecture_is_exported_and_taught(kind: str, tmp_path: Path) -> None:
    check_ends_and_export(kind, tmp_path)


def test_a_head_that_is_the_embedding_and_has_a_bias_is_taught_and_exported(tmp_path: Path) -> None:
    head = check_ends_and_export("phi", tmp_path, tie_word_embeddings=True)
    info = read_json(tmp_path / "target" / "target.json")
    assert info["tied"] and info["embed_key"] == info["lm_head_key"]
    assert head.bias_V is not None and 0.1 < float(head.bias_V.abs().max())
