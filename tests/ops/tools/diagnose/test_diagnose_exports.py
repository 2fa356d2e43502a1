"""`dflow diagnose` of exports that cannot be read or do not fit the target, and of runs without the split asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from attrs import evolve
from diagnose_cases import AGAIN, BLOCK, LAYER, causes, diagnosed, finding, make_chain, with_config
from evaluate_cases import make_draft, small_draft
from lively_target import make_lively
from safetensors.torch import save_file

from dsl.errors import DataError
from ops.artifacts import Draft, DraftCheckpoint
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import from_serving, to_serving
from ops.lib.drafts.backbone.contract import training_record
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.target.model import Target
from ops.tools.diagnose.chain import Chain

ALGORITHMS = {
    "sample_from_anchor": (Dspark(rank=3), Dspark(rank=3, sample_from_anchor=False)),
    "group": (Dflash2(group=4, rank=3, candidates=4), Dflash2(group=8, rank=3, candidates=4)),
}
UNMEASURED_TAU = {"exported": None, "low": None, "high": None}
BEYOND = {"dflash_config": {"target_layer_ids": [LAYER + 8]}, "num_target_layers": 16}


@pytest.fixture(scope="module")
def chain(target, tokens, tmp_path_factory) -> Chain:
    folder = tmp_path_factory.mktemp("exports")
    return make_chain(folder / "healthy", make_lively(target, folder / "target"), tokens)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_half_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def with_null_for_the_mask_token(folder: Path) -> None:
    config = read_json(folder / "config.json")
    config["dflash_config"]["mask_token_id"] = None
    write_json(folder / "config.json", config)


def without_both(folder: Path) -> None:
    without_config(folder)
    without_weights(folder)


@pytest.mark.parametrize(
    ("damage", "wrong", "instead"),
    [
        (without_weights, ["model.safetensors is missing. "], "the weights"),
        (with_half_the_weights, ["model.safetensors is damaged: "], "the weights"),
        (without_config, ["config.json is missing. "], "the config"),
        (with_half_a_config, ["config.json:1:2: not valid JSON: "], "the config"),
        (with_null_for_the_mask_token, ["dflash_config.mask_token_id: must be a number, got null. "], "the config"),
        (without_both, ["config.json is missing; ", "model.safetensors is missing. "], "the config and the weights"),
    ],
)
def test_a_damaged_export_is_named_with_the_file_and_the_training_measured(chain, tmp_path, damage, wrong, instead):
    spoilt = with_config(chain, tmp_path / "spoilt")
    damage(spoilt.draft.path)
    result = diagnosed(spoilt)
    assert ["export"] == causes(result)
    measured = finding(result, "export")["what"]
    assert measured.startswith("cannot be loaded: ")
    assert [True] * len(wrong) == [part in measured for part in wrong]
    assert f"measured with {instead} of the training" in measured
    assert UNMEASURED_TAU.items() <= result["tau"].items()
    assert result["tau"]["corrected"] > BLOCK / 2


def test_a_damaged_export_without_a_training_to_measure_is_refused(chain, tmp_path):
    spoilt = evolve(with_config(chain, tmp_path / "spoilt"), training=None)
    without_weights(spoilt.draft.path)
    with pytest.raises(
        DataError, match=r"the draft cannot be loaded: .*model\.safetensors is missing; write it again: "
    ):
        diagnosed(spoilt)
    without_config(spoilt.draft.path)
    with pytest.raises(DataError, match=r"config\.json is missing; .*model\.safetensors is missing; write it again: "):
        diagnosed(spoilt)


@pytest.mark.parametrize(
    ("wrong", "name", "told"),
    [
        (BEYOND, "layer ids", f"target_layer_ids [{LAYER + 8}], and the target has 0..6 to read. "),
        ({"vocab_size": 800}, "config", "vocab_size 800, and the target's is 600. "),
        ({"num_target_layers": 9}, "config", "num_target_layers 9, and the target's is 8. "),
    ],
)
def test_what_the_export_alone_names_beyond_the_target_is_a_cause(chain, tmp_path, wrong, name, told):
    result = diagnosed(with_config(chain, tmp_path / "spoilt", **wrong))
    assert [name] == causes(result)
    assert told in finding(result, name)["what"]
    assert AGAIN in finding(result, name)["advice"]
    assert UNMEASURED_TAU.items() <= result["tau"].items()
    assert result["tau"]["corrected"] > BLOCK / 2
    names = [each["code"] for each in result["findings"]]
    assert len(names) == len(set(names))


def test_an_export_of_another_model_is_named_and_the_training_measured(chain, tmp_path):
    other = make_draft(evolve(small_draft(Target.load(chain.target)), hidden_size=64), tmp_path)
    result = diagnosed(evolve(chain, draft=other))
    assert "export" in causes(result)
    measured = finding(result, "export")["what"]
    assert measured.startswith("does not fit the target: hidden_size 64, and the target's is 128. ")
    assert "measured with the config and the weights of the training" in measured


def test_a_draft_that_was_trained_for_another_target_is_refused_with_what_differs(chain, tmp_path):
    spoilt = with_config(chain, tmp_path / "spoilt", **BEYOND)
    deeper = tmp_path / "training"
    shutil.copytree(chain.training.path, deeper)
    for file, table in (("config.json", "dflash_config"), ("training.json", "captured")):
        said = read_json(deeper / file)
        said[table]["target_layer_ids"] = [LAYER + 8]
        (said if file == "config.json" else said[table])["num_target_layers"] = 16
        write_json(deeper / file, said)
    refused = (
        r"does not fit the target: num_target_layers 16, and .*; target_layer_ids .*; give train_dflash, export_draft"
    )
    with pytest.raises(DataError, match=refused):
        diagnosed(evolve(spoilt, training=DraftCheckpoint(deeper, "deeper")))
    with pytest.raises(DataError, match=refused):
        diagnosed(with_config(evolve(spoilt, training=None), tmp_path / "unknown", dflow={"trained": 0}))


def test_where_the_split_holds_no_prompts_another_is_decoded_and_told(chain):
    result = diagnosed(evolve(chain, split="empty"))
    assert ("val", "empty") == (result["split"], result["instead_of"])
    assert [] == causes(result)
    assert ("test", None) == tuple(diagnosed(chain)[name] for name in ("split", "instead_of"))


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (("none",), "in the split empty or none: raise test_fraction or val_fraction of ingest"),
        ((), "in the split empty: leave --split out, or raise test_fraction"),
    ],
)
def test_where_no_split_holds_prompts_it_is_told_what_to_do(chain, others, told):
    with pytest.raises(DataError, match=f"no prompts to decode {told}"):
        diagnosed(evolve(chain, split="empty", other_splits=others))


@pytest.mark.parametrize("is_recorded", [False, True], ids=["by its training", "by the record in the export"])
@pytest.mark.parametrize("field", ALGORITHMS)
def test_an_algorithm_with_another_field_than_in_training_is_named(chain, tmp_path, field, is_recorded):
    trained, exported = ALGORITHMS[field]
    plain = from_serving(read_json(chain.training.path / "config.json"))
    model = random_draft(evolve(plain, algorithm=trained), 0)
    folders = {"training": model.config, "export": evolve(plain, algorithm=exported)}
    for name, config in folders.items():
        (tmp_path / name).mkdir()
        written = to_serving(config)
        written["dflow"] |= training_record(model.config, chain.target.digest, "tensors")
        write_json(tmp_path / name / "config.json", written)
        save_file(random_draft(config, 0).state_dict(), tmp_path / name / "model.safetensors")
    shutil.copy(chain.training.path / "training.json", tmp_path / "training")
    training = None if is_recorded else DraftCheckpoint(tmp_path / "training", "training")
    result = diagnosed(evolve(chain, draft=Draft(tmp_path / "export", "export"), training=training))
    assert f"{field}={getattr(trained, field)}" in finding(result, "config")["what"]
