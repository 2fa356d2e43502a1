"""Exports of every algorithm, each damaged in a way that SGLang serves in silence, or that other projects write."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from damaged_cases import RANDOM, REWRITE, edit_config, edit_tensors, mistakes
from gate_cases import ALGORITHMS, check, with_algorithm

from dsl.errors import DataError
from ops.lib.drafts.backbone.load import load_draft, stored_tensors
from ops.lib.drafts.lilicorr.config import OLD_ENGINE, SERVED, contract_name, stored_name

NEST = "dflash_config"
CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
SELECTOR = ("selector_rank", "selector_top_k")
OF_DSPARK = (
    *("markov_rank", "markov_head_type", "sample_from_anchor"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)


def drop(*names: str, nest: str | None = None):
    def change(config: dict[str, Any]) -> None:
        for name in names:
            del (config[nest] if nest else config)[name]

    return change


def put(nest: str | None = None, **fields: Any):
    return lambda config: (config[nest] if nest else config).update(fields)


def drop_tensors(part: str):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def rename_tensors(old: str, new: str):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def flat(config: dict[str, Any]) -> None:
    """Write the fields of DFlash2 at the top level, as speculators does."""
    for name in (*CONVOLUTIONS, *SELECTOR):
        config[name] = config["dflash_config"].pop(name)


def flat_lattice(config: dict[str, Any]) -> None:
    """Write the sizes of LiLiCorr at the top level."""
    for name in SERVED.values():
        config[name] = config[NEST].pop(name)


def nested(config: dict[str, Any]) -> None:
    """Write the fields of DSpark into a table, as SpecForge does."""
    names = ("block_size", "mask_token_id", "target_layer_ids", *OF_DSPARK)
    config["dflash_config"] = {name: config.pop(name) for name in names}


def plain(config: dict[str, Any]) -> None:
    """Name the class of a DSpark draft as ModelOpt does."""
    config["architectures"] = ["DFlashDraftModel"]


def up(name: str):
    """Counts one more, as speculators counts layers and blocks."""

    def change(config: dict[str, Any]) -> None:
        value = config[name]
        config[name] = [each + 1 for each in value] if isinstance(value, list) else value + 1

    return change


def both(config: dict[str, Any]) -> None:
    config["dflash_config"] = {"block_size": 4}


WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}
UNKNOWN, TRAINED, IN_SILENCE = "is not a field of the contract", "but the draft was trained with", "in silence"
OTHERS = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
NO_FORMULA = "by the formula for the number of draft layers"
BOTH_CONV = "without both conv fields it serves the draft as less than it is, in silence"
# What is damaged, of which algorithm: how, the fields that the gate names with what is wrong, and SGLang's behaviour
# as measured with 0.5.21 and 0.5.23 (tests/sglang/test_sglang_damaged.py).
FIELDS = {
    "the name of plain DFlash": ("dflash2", plain, ["architectures must be"], f"{IN_SILENCE}: without its selector"),
    "no convolutions": (
        "dflash2",
        drop(*CONVOLUTIONS, nest=NEST),
        [f"{NEST}.{n} is missing" for n in CONVOLUTIONS],
        BOTH_CONV,
    ),
    "no selector": (
        "dflash2",
        drop(*SELECTOR, nest=NEST),
        [f"{NEST}.{n} is missing" for n in SELECTOR],
        "refuses to start",
    ),
    "fewer candidates": (
        "dflash2",
        put(NEST, selector_top_k=2),
        [f"selector_top_k is 2, {TRAINED} 4"],
        "fewer candidates",
    ),
    "scales and a cap of other logits": (
        "dflash2",
        put(NEST, **OTHERS),
        [f"{NEST}.{n} is {value}, {TRAINED}" for n, value in OTHERS.items()],
        None,
    ),
    "flat fields": (
        "dflash2",
        flat,
        [f"{NEST}.{n} is missing" for n in (*CONVOLUTIONS, *SELECTOR)]
        + [f"{n} {UNKNOWN}" for n in sorted((*CONVOLUTIONS, *SELECTOR))],
        None,
    ),
    "another algorithm's projector": (
        "dflash2",
        put(NEST, projector_type="domino"),
        [f"{NEST}.projector_type {UNKNOWN}"],
        "silently change",
    ),
    "an algorithm that there is not": (
        "dflash2",
        put("dflow", algorithm="domino"),
        ['there is no algorithm "domino"'],
        "does not read it",
    ),
    "an algorithm that is no name": (
        "dspark",
        put("dflow", algorithm=3),
        ['there is no algorithm "3"'],
        "does not read it",
    ),
    "DSpark as plain DFlash": ("dspark", plain, ["architectures must be"], "drops both heads, in silence"),
    "the other layout": (
        "dspark",
        put(sample_from_anchor=False),
        [f"sample_from_anchor is false, {TRAINED} true"],
        "by one",
    ),
    "no layout": (
        "dspark",
        drop("sample_from_anchor"),
        ["sample_from_anchor is missing"],
        "takes it for true, in silence",
    ),
    "a block counted otherwise": (
        "dspark",
        up("block_size"),
        [f"block_size is 4, {TRAINED} 3"],
        "another number of tokens",
    ),
    "no block": ("dspark", drop("block_size"), ["block_size is missing"], "silently proposes 7 tokens"),
    "layers counted from one": (
        "dspark",
        up("target_layer_ids"),
        [f"target_layer_ids is [2, 3, 4, 5, 6], {TRAINED}"],
        "other layers",
    ),
    "no layers": ("dspark", drop("target_layer_ids"), ["target_layer_ids is missing"], NO_FORMULA),
    "no mask token": ("dspark", drop("mask_token_id"), ["mask_token_id is missing"], "refuses to start"),
    "another mask token": (
        "dspark",
        put(mask_token_id=9),
        [f"mask_token_id is 9, {TRAINED}"],
        "silently embeds any other",
    ),
    "no rank": ("dspark", drop("markov_rank"), ["markov_rank is missing"], "refuses to start"),
    "rank 0": ("dspark", put(markov_rank=0), ["markov_rank: must be at least 1, got 0"], "refuses to start"),
    "no kind of head": ("dspark", drop("markov_head_type"), ["markov_head_type is missing"], "refuses to start"),
    "another head": (
        "dspark",
        put(markov_head_type="gated"),
        [f'markov_head_type is "gated", {TRAINED}'],
        "another bias",
    ),
    "confidence unsaid": (
        "dspark",
        drop("enable_confidence_head"),
        ["enable_confidence_head is missing"],
        "does not read it",
    ),
    "the confidence's input unsaid": (
        "dspark",
        drop("confidence_head_with_markov"),
        ["confidence_head_with_markov is missing"],
        "takes it for true",
    ),
    "nested fields": (
        "dspark",
        nested,
        [f"{n} is missing" for n in ("block_size", "mask_token_id", "target_layer_ids", *OF_DSPARK)]
        + [f"dflash_config {UNKNOWN}"],
        None,
    ),
    "a nested field beside its own": ("dspark", both, [f"dflash_config {UNKNOWN}"], "silently change"),
    "causal without windows": ("dspark", put(is_causal=False), [f"is_causal {UNKNOWN}"], "silently change"),
    "windows that are not causal": (
        "dflash2",
        put(**WINDOWS, is_causal=False),
        [
            "is_causal: false does not fit these layer_types",
            f"layer_types is {json.dumps(WINDOWS['layer_types'])}, {TRAINED}",
            f"sliding_window is 8, {TRAINED} null",
        ],
        None,
    ),
    "LiLiCorr as plain DFlash": ("lilicorr", plain, ["architectures must be"], f"{IN_SILENCE}: without its lattice"),
    **{
        f"LiLiCorr without {name}": (
            "lilicorr",
            drop(name, nest=NEST),
            [f"{NEST}.{name} is missing"],
            "refuses to start",
        )
        for name in SERVED.values()
    },
    "LiLiCorr without lilicorr_enabled": (
        "lilicorr",
        drop("lilicorr_enabled", nest=NEST),
        [f"{NEST}.lilicorr_enabled is missing"],
        "takes it for true",
    ),
    "LiLiCorr without both fields of its convolutions": (
        "lilicorr",
        drop(*CONVOLUTIONS, nest=NEST),
        [f"{NEST}.{n} is missing" for n in CONVOLUTIONS],
        "refuses to start (ValueError) where there are convolutions",
    ),
    "another scale of the cosines": (
        "lilicorr",
        put(NEST, lilicorr_logit_scale=2.0),
        [f"{NEST}.lilicorr_logit_scale is 2.0, {TRAINED} 8.0"],
        "silently draws from a distribution",
    ),
    "another least length": (
        "lilicorr",
        put(NEST, lilicorr_vector_eps=0.5),
        [f"{NEST}.lilicorr_vector_eps is 0.5, {TRAINED} 0.0001"],
        "another length",
    ),
    **{
        f"scales and a cap of logits that {name} has plain": (
            name,
            put(nest, **OTHERS),
            [
                f"output_multiplier: engines {reason} the plain product with the head",
                f"final_logit_softcapping: engines {reason} the plain product with the head",
                f"input_embedding_scale is 2.0, {TRAINED}",
            ],
            None,
        )
        for name, nest, reason in (("lilicorr", NEST, "give LiLiCorr"), ("dspark", None, "add DSpark's bias to"))
    },
    "flat fields of LiLiCorr": (
        "lilicorr",
        flat_lattice,
        [f"{NEST}.{n} is missing" for n in SERVED.values()] + [f"{n} {UNKNOWN}" for n in sorted(SERVED.values())],
        None,
    ),
    "a lattice switched off": (
        "lilicorr",
        put(NEST, lilicorr_enabled=False),
        [f"{NEST}.lilicorr_enabled is false, {TRAINED} true"],
        "refuses to start",
    ),
}
# Of LiLiCorr, each another one than in ALGORITHMS.
OTHER_SIZES = {
    "candidates": 2,
    "width": 4,
    "layers": 2,
    "heads": 1,
    "mlp_ratio": 1.0,
    "factors": 3,
    "taps": 3,
    "group": 4,
}
MISSING, STRAY = "is missing", "does not belong here"
LAYERS = [f"layers.{layer}.{conv}_conv" for layer in (0, 1) for conv in ("attention", "mlp")]
CODEBOOKS = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]
TABLES = ("markov_w1.weight", "markov_w2.weight")
TENSORS = {
    "no kernels made of the slot": (
        "dflash2",
        drop_tensors("kernel_projection"),
        {f"{name}.kernel_projection.weight": MISSING for name in LAYERS},
    ),
    "no kernels": ("dflash2", drop_tensors("base_kernel"), {f"{name}.base_kernel": MISSING for name in LAYERS}),
    "no codebooks": ("dflash2", drop_tensors("codebook"), dict.fromkeys(CODEBOOKS, MISSING)),
    "codebooks named as layers": (
        "dflash2",
        rename_tensors("codebook", "codebook.weight"),
        {name + suffix: wrong for name in CODEBOOKS for suffix, wrong in (("", MISSING), (".weight", STRAY))},
    ),
    "no bias": ("dspark", drop_tensors("markov_head"), {f"markov_head.{name}": MISSING for name in TABLES}),
    "tables without their prefix": (
        "dspark",
        rename_tensors("markov_head.", ""),
        {f"markov_head.{name}": MISSING for name in TABLES} | dict.fromkeys(TABLES, STRAY),
    ),
    "no confidence": (
        "dspark",
        drop_tensors("confidence_head"),
        {f"confidence_head.proj.{name}": MISSING for name in ("bias", "weight")},
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_undamaged_export_passes(tmp_path, gate_inputs, name):
    check(tmp_path / "gate", with_algorithm(tmp_path, gate_inputs, ALGORITHMS[name]))


@pytest.mark.parametrize("label", FIELDS)
def test_every_wrong_field_is_named_alone_with_what_sglang_does(tmp_path, gate_inputs, label):
    name, change, wrong, sglang = FIELDS[label]
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS[name])
    edit_config(inputs, change)
    found = mistakes(tmp_path / "gate", inputs)
    assert [True] * len(wrong) == [each in what for each, (what, _, _) in zip(wrong, found, strict=True)], found
    assert sglang is None or all(sglang in does for _, does, _ in found)


@pytest.mark.parametrize("label", TENSORS)
def test_every_tensor_that_is_missing_or_named_otherwise_is_told(tmp_path, gate_inputs, label):
    name, change, wrong = TENSORS[label]
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS[name])
    edit_tensors(inputs, change)
    found = mistakes(tmp_path / "gate", inputs)
    assert [f"model.safetensors: {tensor} {wrong[tensor]}" for tensor in sorted(wrong)] == [
        what for what, _, _ in found
    ]
    for what, does, remedy in found:
        assert (RANDOM if what.endswith(MISSING) else "silently ignores an unknown tensor") in does
        assert REWRITE in remedy


@pytest.mark.parametrize("part", ["lilicorr.", "rank_embedding", "kernel_projection", "base_kernel"])
def test_every_tensor_of_lilicorr_that_is_missing_is_named_with_sglangs_refusal(tmp_path, gate_inputs, part):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["lilicorr"])
    dropped = [name for name in stored_tensors(inputs["draft"].path / "model.safetensors") if part in name]
    edit_tensors(inputs, drop_tensors(part))
    found = mistakes(tmp_path / "gate", inputs)
    assert [f"model.safetensors: {name} {MISSING}" for name in sorted(dropped)] == [what for what, _, _ in found]
    assert all("refuses to start (ValueError): it compares the names" in does for _, does, _ in found)


@pytest.mark.parametrize(("size", "value"), OTHER_SIZES.items())
def test_every_other_size_of_lilicorr_is_named_with_what_sglang_does(tmp_path, gate_inputs, size, value):
    algorithm, served = ALGORITHMS["lilicorr"], SERVED[size]
    inputs = with_algorithm(tmp_path, gate_inputs, algorithm)
    edit_config(inputs, put(NEST, **{served: value}))
    found = mistakes(tmp_path / "gate", inputs)
    stated = f"config.json: {NEST}.{served} is {value}, {TRAINED} {getattr(algorithm, size)}"
    (does,) = [does for what, does, _ in found if what == stated]
    assert "refuses to start" in does or "stops at the weights' shapes" in does


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("lilicorr_candidate_topk", 3, "must be a power of two up to 16, or engines refuse to start, got 3"),
        ("lilicorr_candidate_topk", 32, "must be a power of two up to 16, or engines refuse to start, got 32"),
        ("lilicorr_num_heads", 3, "3 does not divide width = 8"),
    ],
)
def test_sizes_that_no_lattice_can_have_are_named(tmp_path, gate_inputs, field, value, wrong):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["lilicorr"])
    edit_config(inputs, put(NEST, **{field: value}))
    assert f"config.json: {NEST}.{field}: {wrong}" in [what for what, _, _ in mistakes(tmp_path / "gate", inputs)]


def test_convolutions_of_lilicorr_that_the_config_denies_are_named_with_their_tensors(tmp_path, gate_inputs):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["lilicorr"])
    kernels = [name for name in stored_tensors(inputs["draft"].path / "model.safetensors") if "_conv." in name]
    edit_config(inputs, put(NEST, **dict.fromkeys(CONVOLUTIONS, 0)))
    found = {what: does for what, does, _ in mistakes(tmp_path / "gate", inputs)}
    wrong = [
        f"config.json: {NEST}.{name} is 0, {TRAINED} {value}" for name, value in zip(CONVOLUTIONS, (2, 8), strict=True)
    ]
    wrong += [f"model.safetensors: {name} {STRAY}" for name in kernels]
    assert set(wrong) == set(found) and len(kernels) == 8
    assert all("refuses to start" in does for does in found.values())


def test_a_block_of_another_size_is_named_with_the_tensors_of_lilicorr_that_have_a_row_for_each_slot(
    tmp_path, gate_inputs
):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["lilicorr"])
    edit_config(inputs, up("block_size"))
    assert [
        f"config.json: block_size is 5, {TRAINED} 4",
        "model.safetensors: lilicorr.relative_slot_bias must be [2, 9], got [2, 7]",
        "model.safetensors: lilicorr.slot_embedding must be [1, 1, 4, 1, 8], got [1, 1, 3, 1, 8]",
    ] == [what for what, _, _ in mistakes(tmp_path / "gate", inputs)]


def test_a_tensor_of_lilicorr_that_it_does_not_have_is_named_with_sglangs_refusal(tmp_path, gate_inputs):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["lilicorr"])
    edit_tensors(inputs, lambda tensors: tensors.update({"lilicorr.table.weight": torch.zeros(3, 2)}))
    ((what, does, remedy),) = mistakes(tmp_path / "gate", inputs)
    assert f"model.safetensors: lilicorr.table.weight {STRAY}" == what
    assert "refuses to start (ValueError): it compares the names" in does and REWRITE in remedy


def test_names_of_both_engines_in_one_export_of_lilicorr_are_told(tmp_path, gate_inputs):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["lilicorr"])
    new, old = "lilicorr.layers.0.mlp.up_proj.weight", "lilicorr.layers.0.mlp.0.weight"
    edit_tensors(inputs, rename_tensors(new, old))
    assert [
        f"model.safetensors: {old} {STRAY}: only SGLang 0.5.21 has this name",
        f"model.safetensors: {new} {MISSING}",
    ] == [what for what, _, _ in mistakes(tmp_path / "gate", inputs)]
    load_draft(inputs["draft"].path)
    edit_tensors(inputs, lambda tensors: tensors.update({new: tensors[old] + 1}))
    with pytest.raises(DataError, match=f"{old}: the same tensor is there under another name, too"):
        load_draft(inputs["draft"].path)


@pytest.mark.parametrize("engine", [None, OLD_ENGINE])
def test_lilicorrs_tensors_under_the_names_of_another_engine_are_told_as_such(tmp_path, gate_inputs, engine):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["lilicorr"], engine)
    check(tmp_path / "undamaged", inputs)
    other, reader = (OLD_ENGINE, "SGLang 0.5.21") if engine is None else (None, "SGLang 0.5.23 and vLLM 0.33")
    renamed = {}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            renamed[name] = stored_name(contract_name(name), other)
            tensors[renamed[name]] = tensors.pop(name)

    edit_tensors(inputs, change)
    differ = {old: new for old, new in renamed.items() if old != new}
    assert 10 == len(differ)  # weight and bias of five modules
    misnamed = f"{STRAY}: only {reader} has this name"
    expected = dict.fromkeys(differ, MISSING) | dict.fromkeys(differ.values(), misnamed)
    found = mistakes(tmp_path / "gate", inputs)
    assert [f"model.safetensors: {name} {expected[name]}" for name in sorted(expected)] == [
        what for what, _, _ in found
    ]
    assert all("refuses to start (ValueError): it compares the names" in does for _, does, _ in found)


def test_an_export_of_lilicorr_is_the_same_draft_for_every_engine(tmp_path, gate_inputs):
    folders = [
        with_algorithm(tmp_path / str(engine), gate_inputs, ALGORITHMS["lilicorr"], engine)["draft"].path
        for engine in (None, "sglang-0.5.23", OLD_ENGINE)
    ]
    names = [set(stored_tensors(folder / "model.safetensors")) for folder in folders]
    assert names[0] == names[1] != names[2]
    drafts = [load_draft(folder) for folder in folders]
    assert drafts[0].config == drafts[2].config
    for name, weight in drafts[0].state_dict().items():
        assert torch.equal(weight, drafts[2].state_dict()[name])


def test_sizes_of_other_tensors_are_told_with_them(tmp_path, gate_inputs):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["dflash2"])
    edit_config(inputs, put(NEST, selector_rank=3, conv_group_size=4))
    found = [what for what, does, _ in mistakes(tmp_path / "gate", inputs) if "stops at the weights' shapes" in does]
    assert [f"config.json: {NEST}.conv_group_size is 4", f"config.json: {NEST}.selector_rank is 3"] == [
        what.partition(",")[0] for what in found
    ]
