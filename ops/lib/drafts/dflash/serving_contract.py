"""The serving contract of a draft, checked on the files: what SGLang would not check, or would only notice late.

An engine that misses a tensor serves random weights without a word, so nothing here is a warning. The contract is
closed: what it does not name is refused, because SGLang reads many fields that change what a draft computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.files import read_json
from ops.lib.drafts.dflash.contract_fields import config_mistakes
from ops.lib.drafts.dflash.contract_mistake import REWRITE, Mistake, refuse
from ops.lib.drafts.dflash.contract_tensors import digest_mistakes, stored_tensors, tensor_mistakes, value_mistakes
from ops.lib.target.model import target_info, text_config

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
NEEDED = {
    CONFIG: "cannot tell what kind of model this is and refuses to start",
    WEIGHTS: "finds no weights and refuses to start",
    CARD: "does not need it, but nobody learns how to serve the draft, and for which target",
}
NOT_PLAIN = "refuses to start, or follows a link that leads elsewhere, or nowhere, where the draft is shipped to"
OF_THE_STORE = "manifest.json"  # beside the files of every committed artifact; it is not shipped
MASK_EMBEDDING = "mask_embedding.pt"


@frozen
class ServedTarget:
    """What the contract has to know of the target. pad_token_ids: those of its config and of the prompts' tokens."""

    info: Mapping[str, Any]
    digest: str
    pad_token_ids: frozenset[int]

    @classmethod
    def of(cls, target: TargetModel, tokens: TokenShards | None = None) -> ServedTarget:
        pads = {text_config(target).get("pad_token_id")}
        if tokens is not None:
            pads.add(read_json(tokens.path / "tokens.json")["pad_token_id"])
        return cls(target_info(target), target.digest, frozenset(pad for pad in pads if pad is not None))


def check_serving(directory: Path, target: TargetModel, tokens: TokenShards | None = None) -> None:
    """Check a serving directory against the contract and its target; tokens: of the prompts, for their pad id.

    Reads everything, the tensors' values included. Raises DataError that lists all mistakes, each with what SGLang
    would do about it and with its remedy.
    """
    refuse(directory, serving_mistakes(directory, ServedTarget.of(target, tokens)))


def serving_mistakes(directory: Path, target: ServedTarget) -> list[Mistake]:
    """What is wrong with a serving directory: its files, then config.json, then the tensors."""
    names = {path.name for path in directory.iterdir()} - {OF_THE_STORE}
    present = names & NEEDED.keys()
    mistakes = [Mistake(f"{name}: is missing", NEEDED[name], REWRITE) for name in sorted(NEEDED.keys() - names)]
    mistakes += [_stray(name) for name in sorted(names - NEEDED.keys())]
    names = {name for name in names & NEEDED.keys() if _is_plain(directory / name)}
    mistakes += [_not_plain(name, directory) for name in sorted(present - names)]
    config: dict[str, Any] = {}
    if CARD in names:
        mistakes += _card_mistakes(directory / CARD)
    if CONFIG in names:
        config, unreadable = _read_config(directory / CONFIG)
        mistakes += unreadable or config_mistakes(config, target.info, target.digest, target.pad_token_ids)
    if WEIGHTS in names:
        mistakes += _weight_mistakes(directory / WEIGHTS, config)
    return mistakes


def _is_plain(path: Path) -> bool:
    """Whether it is a file of its own: a link may lead nowhere, here or where the draft is shipped to."""
    return path.is_file() and not path.is_symlink()


def _not_plain(name: str, directory: Path) -> Mistake:
    kind = "a link" if (directory / name).is_symlink() else "a directory"
    return Mistake(f"{name}: is no plain file but {kind}", NOT_PLAIN, REWRITE)


def _card_mistakes(path: Path) -> list[Mistake]:
    try:
        path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [Mistake(f"{CARD}: cannot be read as text in UTF-8 ({error})", "does not read it", REWRITE)]
    return []


def _read_config(path: Path) -> tuple[dict[str, Any], list[Mistake]]:
    try:
        config = read_json(path)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        return {}, [Mistake(f"{CONFIG}: not valid JSON ({error})", "refuses to start", REWRITE)]
    if not isinstance(config, dict):
        return {}, [Mistake(f"{CONFIG}: holds no object", "refuses to start", REWRITE)]
    return config, []


def _weight_mistakes(path: Path, config: Mapping[str, Any]) -> list[Mistake]:
    try:
        stored = stored_tensors(path)
    except DataError as error:
        return [Mistake(f"{WEIGHTS}: {error}", "refuses to start, or loads what is left of the file", REWRITE)]
    # What is wrong with single tensors says more than that their digest is another one.
    return [*tensor_mistakes(config, stored), *value_mistakes(path)] or digest_mistakes(config, path)


def _stray(name: str) -> Mistake:
    what, remedy = f"{name}: does not belong here", "remove the file"
    if name == MASK_EMBEDDING:
        return Mistake(
            what,
            "overwrites the target's embedding of the mask token with it when it starts, and the draft was trained "
            "with the target's own",
            remedy,
        )
    if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json")):
        return Mistake(what, "may load it instead of, or over, the draft's own weights", remedy)
    return Mistake(what, "may read it: what it finds beside config.json decides how a model is loaded", remedy)
