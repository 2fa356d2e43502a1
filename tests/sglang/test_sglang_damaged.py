"""What SGLang does with exports of DFlash2, DSpark and LiLiCorr that are damaged or misnamed: what the gate says.

tests/ops/check_export/test_damaged_algorithms.py has the gate's side of each.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from algorithm_cases import grown
from dflash_cases import NEW_TOKENS
from safetensors.torch import load_file, save_file

from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.decoding.decode import decode_speculative
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.drafts.lilicorr.config import OLD_ENGINE, SERVED, Lilicorr, contract_name, stored_name
from ops.lib.sglang.dflash_worker import DflashEngine, DraftRefused
from ops.lib.sglang.version import installed_version

pytestmark = pytest.mark.slow
CPU = {"device": "cpu", "dtype": "float32"}
NEST = "dflash_config"
DRAFTS = {
    "dflash2": Dflash2(taps=2, group=8, rank=8, candidates=8),
    "dspark": Dspark(rank=8, sample_from_anchor=False),
    "lilicorr": Lilicorr(candidates=8, width=24, layers=1, heads=2, factors=8, taps=2, group=8),
}
ENGINE = f"sglang-{installed_version()}"
CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
Change = Callable[[dict[str, Any]], object]


def without(*names: str, nest: str | None = None) -> Change:
    return lambda table: [(table[nest] if nest else table).pop(name) for name in names]


def other(nest: str | None = None, **fields: Any) -> Change:
    return lambda table: (table[nest] if nest else table).update(fields)


def no_tensors(part: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


def renamed(old: str, new: str) -> Change:
    return lambda tensors: [
        tensors.update({name.replace(old, new): tensors.pop(name)}) for name in list(tensors) if old in name
    ]


def of_other_engine(*parts: str) -> Change:
    """Name the tensors with one of these parts in their names as the other version of SGLang does."""
    other_engine = None if ENGINE == OLD_ENGINE else OLD_ENGINE
    return lambda tensors: [
        tensors.update({stored_name(contract_name(name), other_engine): tensors.pop(name)})
        for name in list(tensors)
        if any(part in name for part in parts)
    ]


def plain(config: dict[str, Any]) -> None:
    """Named and served as plain DFlash."""
    config["architectures"] = ["DFlashDraftModel"]
    del config["dflow"]["algorithm"]


def up(name: str) -> Change:
    return lambda config: config.update({name: config[name] + 1})


# (algorithm, what is damaged): served all the same, and accepted otherwise than as trained.
IN_SILENCE_FIELDS = {
    ("dflash2", "architectures"): other(architectures=["DFlashDraftModel"]),
    ("dflash2", "both conv fields"): without(*CONVOLUTIONS, nest=NEST),
    ("dflash2", "candidates"): other(NEST, selector_top_k=1),
    ("dflash2", "as plain DFlash"): plain,
    ("dspark", "as plain DFlash"): plain,
    ("lilicorr", "as plain DFlash"): plain,
    ("lilicorr", "least length"): other(NEST, lilicorr_vector_eps=30.0),
    ("dspark", "layout"): other(sample_from_anchor=True),
    ("dspark", "no layout"): without("sample_from_anchor"),
    ("dspark", "block_size"): up("block_size"),
    ("dspark", "no block_size"): without("block_size"),
    ("dspark", "layers"): lambda config: config.update(target_layer_ids=[1, 2, 4, 5]),
    ("dspark", "mask token"): other(mask_token_id=9),
    ("dspark", "head"): other(markov_head_type="gated"),
}
IN_SILENCE_TENSORS = {
    ("dflash2", "no kernels made of the slot"): no_tensors("kernel_projection"),
    ("dflash2", "no codebooks"): no_tensors("codebook"),
    ("dflash2", "codebooks named as layers"): renamed("codebook", "codebook.weight"),
    ("dspark", "no tables"): no_tensors("markov_head"),
    ("dspark", "tables without their prefix"): renamed("markov_head.", ""),
}
REFUSED = {
    ("dflash2", "one conv field"): (
        without("conv_group_size", nest=NEST),
        "needs conv_kernel_size and conv_group_size",
    ),
    ("dflash2", "selector fields"): (without("selector_rank", "selector_top_k", nest=NEST), "requires .*selector_rank"),
    ("dflash2", "rank"): (other(NEST, selector_rank=4), "Attempted to load weight"),
    ("dspark", "no rank"): (without("markov_rank"), "requires markov_rank > 0"),
    ("dspark", "rank"): (other(markov_rank=4), "Attempted to load weight"),
    ("dspark", "no kind of head"): (without("markov_head_type"), "requires markov_head_type"),
    ("dspark", "no mask token"): (without("mask_token_id"), "requires mask_token_id"),
    **{
        ("lilicorr", f"no {served}"): (without(served, nest=NEST), f"{served} is required to rebuild the LiLiCorr head")
        for served in SERVED.values()
        if served not in CONVOLUTIONS
    },
    ("lilicorr", "3 candidates"): (other(NEST, lilicorr_candidate_topk=3), "must be a power of two, got 3"),
    ("lilicorr", "32 candidates"): (other(NEST, lilicorr_candidate_topk=32), "lilicorr_candidate_topk=32 exceeds"),
    ("lilicorr", "other candidates"): (other(NEST, lilicorr_candidate_topk=4), "Attempted to load weight"),
    ("lilicorr", "other layers"): (other(NEST, lilicorr_num_layers=2), "is missing 10 head parameters"),
    ("lilicorr", "other heads"): (other(NEST, lilicorr_num_heads=3), "Attempted to load weight"),
    ("lilicorr", "block_size"): (up("block_size"), "Attempted to load weight"),
    ("lilicorr", "not enabled"): (other(NEST, lilicorr_enabled=False), "requires the lilicorr_.* geometry fields"),
    ("lilicorr", "both conv fields"): (without(*CONVOLUTIONS, nest=NEST), "built no convolution modules"),
    ("lilicorr", "no convolutions"): (other(NEST, conv_kernel_size=0, conv_group_size=0), "no convolution modules"),
    ("lilicorr", "one conv field"): (
        without("conv_group_size", nest=NEST),
        "needs conv_kernel_size and conv_group_size",
    ),
}
REFUSED_TENSORS = {  # LiLiCorr's are compared by their names, in both directions
    "no lattice": (no_tensors("lilicorr."), "is missing [0-9]+ head parameters"),
    "no head of vectors": (no_tensors("anchor_out_head"), "is missing 2 head parameters"),
    "one more": (
        lambda tensors: tensors.update({"lilicorr.table.weight": tensors["lilicorr.output_norm.weight"].clone()}),
        "carries 1 head tensors",
    ),
    "names of the other engine": (of_other_engine("lilicorr."), "is missing 10 head parameters"),
    "some names of the other engine": (of_other_engine("lilicorr.layers."), "is missing 4 head parameters"),
    "no kernels made of the slot": (no_tensors("kernel_projection"), "do not correspond to the built ones"),
    "no convolutions": (no_tensors("_conv."), "the checkpoint carries none"),
}
UNREAD = {  # DSpark's as long as the verification is static, LiLiCorr's scale as long as its walk is greedy
    ("lilicorr", "enabled unsaid"): without("lilicorr_enabled", nest=NEST),
    ("lilicorr", "scale of the cosines"): other(NEST, lilicorr_logit_scale=2.0),
    ("dspark", "confidence"): other(enable_confidence_head=False),
    ("dspark", "the confidence's input"): other(confidence_head_with_markov=False),
}


@pytest.fixture(scope="module")
def sound(text_case, tmp_path_factory):
    """The sound drafts by algorithm, with the accepted lengths of `evaluate`."""
    folder = tmp_path_factory.mktemp("sound")
    drafts = {
        name: grown(text_case.drafts["trained"].path, folder / name, algorithm, ENGINE)
        for name, algorithm in DRAFTS.items()
    }
    return {name: (path, lengths_of_dflow(text_case, path)) for name, path in drafts.items()}


def lengths_of_dflow(case, draft: Path) -> list[tuple[int, ...]]:
    model = load_draft(draft)
    return [decode_speculative(case.loaded, model, prompt, NEW_TOKENS).accepted for prompt in case.prompts]


def served(case, draft: Path) -> list[tuple[int, ...]]:
    """SGLang's accepted lengths; its answers are the target's, whatever the draft is."""
    with DflashEngine.start(case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        answers = engine.decode(case.prompts, NEW_TOKENS, case.eos)
    assert [answer.tokens for answer in case.plain] == [answer.tokens for answer in answers]
    return [answer.accepted for answer in answers]


def damaged(draft: Path, folder: Path, config: Change | None = None, tensors: Change | None = None) -> Path:
    shutil.copytree(draft, folder)
    if config is not None:
        table = read_json(folder / "config.json")
        config(table)
        write_json(folder / "config.json", table)
    if tensors is not None:
        weights = load_file(folder / "model.safetensors")
        tensors(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("case", IN_SILENCE_FIELDS, ids=", ".join)
def test_a_wrong_field_is_served_in_silence_as_another_draft(text_case, sound, tmp_path, case):
    draft, expected = sound[case[0]]
    assert expected != served(text_case, damaged(draft, tmp_path / "draft", config=IN_SILENCE_FIELDS[case]))


@pytest.mark.parametrize("case", IN_SILENCE_TENSORS, ids=", ".join)
def test_a_missing_tensor_is_served_in_silence_as_another_draft(text_case, sound, tmp_path, case):
    draft, expected = sound[case[0]]
    assert expected != served(text_case, damaged(draft, tmp_path / "draft", tensors=IN_SILENCE_TENSORS[case]))


@pytest.mark.parametrize("case", UNREAD, ids=", ".join)
def test_what_is_not_read_changes_nothing(text_case, sound, tmp_path, case):
    draft, expected = sound[case[0]]
    assert expected == served(text_case, damaged(draft, tmp_path / "draft", config=UNREAD[case]))


@pytest.mark.parametrize("case", REFUSED, ids=", ".join)
def test_the_others_are_refused(text_case, sound, tmp_path, case):
    draft, _ = sound[case[0]]
    change, message = REFUSED[case]
    with pytest.raises(DraftRefused, match=re.compile(message, re.DOTALL)):
        served(text_case, damaged(draft, tmp_path / "draft", config=change))


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_lilicorrs_tensors_under_other_names_or_missing_are_refused(text_case, sound, tmp_path, case):
    draft, _ = sound["lilicorr"]
    change, message = REFUSED_TENSORS[case]
    with pytest.raises(DraftRefused, match=re.compile(message, re.DOTALL)):
        served(text_case, damaged(draft, tmp_path / "draft", tensors=change))
