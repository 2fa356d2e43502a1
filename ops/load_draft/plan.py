"""What loading a draft needs, and why its directory cannot be imported."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import ConfigError, DataError
from dsl.estimate import Estimate, PlanContext
from ops.lib.drafts.backbone.sizes import draft_parameters
from ops.lib.forecasts import DraftForecast, TargetForecast, identity_of, read_config
from ops.lib.target.sizes import ITEM_SIZES
from ops.load_draft.conflicts import refused
from ops.load_draft.op import LoadDraft
from ops.load_draft.read_config import read_draft_config


def estimate(config: LoadDraft, context: PlanContext) -> Estimate:
    """Estimate a draft's needs by its config.json; nothing is known of a model id before its download."""
    if context.artifact is not None:
        return Estimate(forecast=DraftForecast.read(context.artifact, context.identity))
    directory = Path(config.source)
    if not directory.is_dir():
        return Estimate()
    written = read_config(directory / "config.json")
    target: TargetForecast | None = context.inputs.get("target")
    sizes = None if target is None else target.info
    try:
        shape = read_draft_config(written, sizes, config.partial_rotary_factor).config
    except (ConfigError, DataError):
        return Estimate()  # `missing_here` and `conflicts` say why
    named = written.get("dtype") or written.get("torch_dtype")
    dtype = named if isinstance(named, str) and named in ITEM_SIZES else "bfloat16"
    return Estimate(
        disk={"draft": draft_parameters(shape) * ITEM_SIZES[dtype]},
        forecast=DraftForecast(
            shape=shape,
            dtype=dtype,
            knows_layers=target is not None,
            mask_token_id=None if target is None else shape.mask_token_id,
            identity=context.identity,
            target=identity_of(target),
        ),
    )


def missing_here(config: LoadDraft) -> dict[str, str]:
    """Mistakes, by field, in a draft's files, config.json and weight headers that show without the target.

    A model id is not looked up. An altered export of dflow is found here, except one with altered values of weights or
    their digest. Altered fields for target, engine or server arguments are never found, as other drafts lack them.
    """
    return refused(config, None)
