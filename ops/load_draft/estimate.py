"""Needs of `load_draft`: the disk for the draft."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import ConfigError, DataError
from dsl.estimate import Estimate, Outlook
from ops.lib.drafts.backbone.footprint import draft_parameters
from ops.lib.estimates import DraftForeseen, TargetForeseen, identity_of, read_config
from ops.lib.target.sizes import ITEM_SIZES
from ops.load_draft.op import LoadDraft
from ops.load_draft.read_config import read_draft_config


def estimate(config: LoadDraft, outlook: Outlook) -> Estimate:
    """By the draft's config.json; nothing is known of a model id before its download."""
    if outlook.artifact is not None:
        return Estimate(foreseen=DraftForeseen.read(outlook.artifact, outlook.identity))
    directory = Path(config.source)
    if not directory.is_dir():
        return Estimate()
    written = read_config(directory / "config.json")
    target: TargetForeseen | None = outlook.inputs.get("target")
    sizes = None if target is None else target.info
    try:
        shape = read_draft_config(written, sizes, config.partial_rotary_factor).config
    except (ConfigError, DataError):
        return Estimate()  # `unmet` and `unfit` say why
    named = written.get("dtype") or written.get("torch_dtype")
    dtype = named if isinstance(named, str) and named in ITEM_SIZES else "bfloat16"
    return Estimate(
        disk={"draft": draft_parameters(shape) * ITEM_SIZES[dtype]},
        foreseen=DraftForeseen(
            shape=shape,
            dtype=dtype,
            knows_layers=target is not None,
            mask_token_id=None if target is None else shape.mask_token_id,
            identity=outlook.identity,
            target=identity_of(target),
        ),
    )
