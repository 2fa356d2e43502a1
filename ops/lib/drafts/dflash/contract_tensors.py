"""The model.safetensors of a serving directory: every tensor of the contract, of the right shape, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dsl.errors import DataError
from ops.lib.drafts.dflash.contract_fields import DTYPES
from ops.lib.drafts.dflash.contract_mistake import REWRITE, Mistake

Stored = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, safetensors dtype

PREFIX = "model."
RANDOM = (
    "says nothing of a missing tensor, leaves what happens to stand in its memory, and accepts about 1 token a step"
)
IGNORED = "ignores a tensor that it does not know, without a word"
PREFIXED = "accepts the prefix; the reference implementation does not, and leaves every one of these tensors random"
FC_WIDTH = "refuses to start (ValueError: fc.weight does not fit the number of target layers)"
SHAPE = "stops while it loads the weights, with an error that may name no tensor"
CAST = "casts it to the server's dtype without a word"
NOT_FINITE = (
    "says nothing: logits that are no numbers propose one and the same token, and about 1 token a step is accepted"
)
REPLACED = (
    "loads what fits by name and shape without a word: swapped or other weights propose other tokens, and about 1 "
    "token a step is accepted"
)
_SIZE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)


def stored_tensors(path: Path) -> Stored:
    """Shape and dtype of every tensor, from the file's header. Raises DataError for a file that is cut or broken."""
    try:
        with safe_open(path, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot be read ({error})") from error


def tensor_mistakes(config: Mapping[str, Any], stored: Stored) -> list[Mistake]:
    """What is wrong with the tensors beside a config.json.

    Where the config lacks a size there is nothing to compare with, and the config's own mistakes say so.
    """
    nest = config.get("dflash_config")
    ids = nest.get("target_layer_ids") if isinstance(nest, Mapping) else None
    if not isinstance(ids, list) or not all(type(config.get(name)) is int for name in _SIZE_FIELDS):
        return []
    expected = expected_shapes(config)
    prefixed = {name for name in stored if name.removeprefix(PREFIX) in expected and name.startswith(PREFIX)}
    known = {name.removeprefix(PREFIX) if name in prefixed else name: entry for name, entry in stored.items()}
    mistakes = {name: _mistake(name, "is missing", RANDOM) for name in expected if name not in known}
    mistakes |= {name: _mistake(name, "does not belong here", IGNORED) for name in known if name not in expected}
    dtype = DTYPES.get(config["dtype"]) if isinstance(config.get("dtype"), str) else None
    for name in expected.keys() & known.keys():
        shape, stored_dtype = known[name]
        if shape != expected[name]:
            wrong = f"must be {list(expected[name])}, got {list(shape)}"
            mistakes[name] = _mistake(name, wrong, FC_WIDTH if name == "fc.weight" else SHAPE)
        elif dtype is not None and stored_dtype != dtype:
            mistakes[name] = _mistake(name, f"must be of dtype {dtype}, got {stored_dtype}", CAST)
    listed = [mistakes[name] for name in sorted(mistakes)]
    if prefixed:
        some = ", ".join(sorted(prefixed)[:3]) + (", ..." if len(prefixed) > 3 else "")
        wrong = f'{len(prefixed)} names begin with "{PREFIX}" ({some})'
        listed.append(Mistake(f"model.safetensors: {wrong}", PREFIXED, REWRITE))
    return listed


def value_mistakes(path: Path) -> list[Mistake]:
    """The tensors that hold a value which is no finite number. Reads them all, one after the other."""
    mistakes = []
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            count = int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else 0
            if count:
                wrong = f"holds {count} values of {tensor.numel()} that are not finite"
                mistakes.append(_mistake(name, wrong, NOT_FINITE, "train again from a checkpoint before they appeared"))
    return mistakes


def tensors_digest(path: Path) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def digest_mistakes(config: Mapping[str, Any], path: Path) -> list[Mistake]:
    """Whether the tensors are those that were exported; nothing where the config holds no digest of them."""
    record = config.get("dflow")
    digests = record.get("digest") if isinstance(record, Mapping) else None
    if not isinstance(digests, Mapping) or "tensors" not in digests:
        return []  # the config's own mistakes say so
    found, written = tensors_digest(path), str(digests["tensors"])
    if found == written:
        return []
    what = f"the tensors are not those of the export: {found[:12]}, but dflow.digest.tensors is {written[:12]}"
    return [Mistake(f"model.safetensors: {what}", REPLACED, REWRITE)]


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the serving contract for a config.json, with their shapes."""
    hidden, head_dim, mlp = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layers = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (hidden, layers * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    projections = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    projections["o_proj"] = (hidden, q_size)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{norm}.weight"] = (head_dim,)
        for name, shape in projections.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{layer}.self_attn.{name}.bias"] = shape[:1]
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}.mlp.{name}.weight"] = (mlp, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, mlp)
    return shapes


def _mistake(name: str, wrong: str, sglang: str, remedy: str = REWRITE) -> Mistake:
    return Mistake(f"model.safetensors: {name} {wrong}", sglang, remedy)
