"""What a training needs of its inputs, as promised and as they are. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dsl.errors import ConfigError
from ops.capture_targets.layers import check_layers, spread_layers
from ops.evaluate.lengths import stored_lengths_mistake
from ops.lib.drafts.algorithms import Algorithm, StartsFromOthers, plain
from ops.lib.drafts.backbone.config import LAYER_IDS, POSITIONS, SCALES, DraftConfig, DraftConfigError
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.forecasts import (
    PROMPTS_ONLY,
    DraftForecast,
    FeaturesForecast,
    StepsForecast,
    TargetStated,
    TokensForecast,
    are_different,
    by_field,
    identity_of,
    is_promised,
    length_misfit,
    tokens_misfit,
)
from ops.lib.target.sizes import context_length, positions_field
from ops.lib.target.token_ids import mask_of_texts
from ops.train_dflash.op import ONLINE_SPLITS, PAUSE, TrainDflash
from ops.train_dflash.shape import expected_shape, started_shape

# What decides the shape of a draft -> the field of train_dflash, None for what the target decides.
DRAFT_SHAPE = {
    "hidden_size": None,
    "vocab_size": None,
    "num_target_layers": None,
    "block_size": "block_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "layer_types": "sliding_layers",
    "sliding_window": "sliding_window",
}
FIELDS = {**DRAFT_SHAPE, "partial_rotary_factor": "head_dim", "rope_theta": "rope_theta", LAYER_IDS: None}
NO_VAL = {
    "tau": 'select = "tau" decodes prompts of the split val, which has none: raise val_fraction of ingest, give '
    'samples "split": "val" in the JSONL file, or set select = "last"',
    "loss": 'select = "loss" measures the split val, which has no sample with an anchor: raise val_fraction of ingest, '
    'capture the split val too, or set select = "last"',
    "last": "measures on the split val, which has no samples: raise val_fraction of ingest, or leave eval_every out",
}
NO_TRAIN = (
    "no sample in the split train; was everything dropped by tokenize_chat? If not, check split of ingest and splits "
    "of capture_targets"
)
MASK = "mask_token_id"
Mistakes = Iterator[tuple[str, str]]


def conflicts(config: TrainDflash, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field between the config and its inputs.

    They are: features of another target, of other tokens or without what the loss reads; splits without samples; a
    pause behind the last step; a mask token that occurs in texts; an impossible draft; sizes that differ from a warm
    start's.
    """
    target: TargetStated | None = forecast["target"]
    tokens: TokensForecast | None = forecast.get("tokens")
    features: FeaturesForecast | None = forecast.get("features")
    found = by_field(
        (
            *_origin(config, target, features, tokens, forecast.get("batches")),
            *(_captured(target, features) if target is not None and features is not None else ()),
            *_of_teacher(config, features),
            *_splits(config, features, tokens),
            *_pause(config, forecast.get("batches")),
            *(_of_target(config, target, features, tokens) if target is not None else ()),
        )
    )
    if target is None:
        return found
    wrong_layers = [*_online_layers(config, target)]
    if wrong_layers:
        return found | dict(wrong_layers)
    shape = _shape(config, target, features)
    found |= _eval_lengths(config, target, tokens, shape if isinstance(shape, DraftConfig) else None)
    if isinstance(shape, DraftConfig):
        layers_known = config.capture == "online" or features is not None
        warm_start = _warm_start(
            config, forecast.get("warm_start"), shape, _mask(config, target, features), layers_known
        )
        return found | warm_start
    return found | {field: "\n".join(filter(None, (found.get(field), text))) for field, text in shape.items()}


def _origin(
    config: TrainDflash,
    target: TargetStated | None,
    features: FeaturesForecast | None,
    tokens: TokensForecast | None,
    batches: StepsForecast | None,
) -> Mistakes:
    """Mistakes if features, tokens and plan do not have the same origin."""
    online = config.capture == "online"
    what = "tokens" if online else "features"
    dealt = identity_of(tokens) if online else getattr(features, "of_tokens", None)
    if features is not None:
        yield from _captured_from("target", features.target, identity_of(target))
        yield from _captured_from("tokens", features.of_tokens, identity_of(tokens))
    if batches is not None and are_different(batches.of_tokens, dealt):
        yield "batches", f"the plan was made for other {what}: give shard_sequence and train_dflash the same {what}"
    if (online or config.measures_tau) and (misfit := tokens_misfit(tokens, target)):
        yield "tokens", misfit
    if online and (misfit := length_misfit(tokens, target, ONLINE_SPLITS)):
        yield "tokens", misfit


def _captured_from(edge: str, captured: str | None, own: str | None) -> Mistakes:
    """A mistake if two identities of a target, or of tokens, differ; digests are shown if there are any."""
    if not are_different(captured, own):
        return
    theirs, ours = ("of another node", "not that one")
    if not is_promised(own):
        theirs, ours = str(captured)[:12], str(own)[:12]
    verb = "is" if edge == "target" else "are"
    yield (
        "features",
        f"these features were captured from the {edge} {theirs}, but the node's {edge} {verb} {ours}; give "
        f"capture_targets and train_dflash the same {edge}",
    )


def _captured(target: TargetStated, features: FeaturesForecast) -> Mistakes:
    """Mistakes for contradictions between features and target."""
    info, of_target = features.info or {}, target.info
    for name, size in (("hidden_size", "hidden_size"), ("num_target_layers", "num_layers")):
        if info.get(name, of_target[size]) != of_target[size]:
            remedy = "capture again from this target"
            yield "features", f"{name}: {info[name]} in the features, {of_target[size]} in the target; {remedy}"
    beyond = [layer for layer in features.target_layer_ids or () if layer >= of_target["num_layers"] - 1]
    if beyond:
        layers = of_target["num_layers"]
        yield "features", f"{LAYER_IDS}: {beyond} are no inner layers of a target of {layers} layers"
    positions = info.get("positions", POSITIONS)
    if positions != POSITIONS:
        yield "features", f'positions: "{positions}" in the features, must be "{POSITIONS}"; capture again'


def _of_teacher(config: TrainDflash, features: FeaturesForecast | None) -> Mistakes:
    """A mistake if stored features lack the states that the target's distribution is computed from."""
    if not config.needs_teacher or features is None or features.final_hidden is not False:
        return
    of_kind = needs_teacher(config.loss)
    what = f'loss = "{config.loss}"' if of_kind else f'the loss of algorithm = "{config.algorithm}"'
    remedy = "set final_hidden = true in capture_targets"
    yield "loss" if of_kind else "algorithm", f"{what} needs the target's final hidden states: {remedy}"


def _splits(config: TrainDflash, features: FeaturesForecast | None, tokens: TokensForecast | None) -> Mistakes:
    """Mistakes if there are no samples to train on, or to measure on."""
    edge, source = ("tokens", tokens) if config.capture == "online" else ("features", features)
    if source is None:
        return
    if "train" in source.empty:
        yield edge, NO_TRAIN
    read = tokens if isinstance(source, TokensForecast) else source.tokens
    if read is not None and read.prompts_only:
        yield edge, PROMPTS_ONLY
    no_loss = "val" in source.empty
    no_tau = config.measures_tau and tokens is not None and "val" in tokens.empty
    if (config.select == "tau" and no_tau) or (config.select == "loss" and no_loss):
        yield "select", NO_VAL[config.select]
    elif config.eval_every and config.select == "last" and no_loss and (no_tau or not config.measures_tau):
        # a split that its samples left empty is passed over
        by_samples = not is_promised(source.identity) or (read is not None and read.is_found and "val" in read.empty)
        yield from [] if by_samples else [("eval_every", NO_VAL["last"])]


def _pause(config: TrainDflash, batches: StepsForecast | None) -> Mistakes:
    """A mistake if the training has fewer steps than those after which it pauses."""
    if config.pause_after is None:
        return
    total = config.max_steps
    if (total is None or config.pause_after <= total) and batches is not None:
        planned = batches.count()
        total = total if planned is None else min(planned, total or planned)
    if total is not None and config.pause_after > total:
        yield PAUSE, f"{config.pause_after} is more than the {total} steps of the training: lower it"


def _of_target(
    config: TrainDflash, target: TargetStated, features: FeaturesForecast | None, tokens: TokensForecast | None
) -> Mistakes:
    """Mistakes in the mask token, in lengths beyond the target's positions, and a target that cannot be run here."""
    if config.measures_tau and (mistake := target.verifying_mistake):
        yield "target", f"{mistake}; with eval_prompts = 0 the training does not decode"
    stored = ['capture = "stored" (the features by backend = "sglang")'] if config.capture == "online" else []
    without = [*stored, *(["eval_prompts = 0"] if config.measures_tau else [])]
    if without and (mistake := target.running_mistake(f"set {' and '.join(without)}")):
        yield "target", mistake
    mask = _mask(config, target, features)
    if mask is not None:
        field = "target" if config.mask_token_id is None else MASK
        pads = {target.pad_token_id, None if tokens is None else tokens.pad_token_id}
        if wrong := mask_of_texts(mask, target.eos_token_ids or (), pads):
            yield field, f"{wrong}: set mask_token_id of train_dflash to another"
        elif not 0 <= mask < target.info["vocab_size"]:
            yield field, f"mask_token_id: {mask} is no id below vocab_size = {target.info['vocab_size']}"
    limit = context_length(target.text)
    if limit is None:
        return
    for field, value in (("block_size", config.block_size), ("sliding_window", config.sliding_window)):
        if value is not None and value > limit:
            yield (
                field,
                f"{value} is more than the {limit} positions of the target ({positions_field(target.text)}): lower it",
            )


def _eval_lengths(
    config: TrainDflash, target: TargetStated, tokens: TokensForecast | None, shape: DraftConfig | None
) -> dict[str, str]:
    """The conflict if val prompts and their answers exceed the positions of target or draft, by field."""
    if not config.measures_tau:
        return {}
    length, field = config.eval_new_tokens, "eval_new_tokens"
    mistake = stored_lengths_mistake(tokens, "val", "last", config.eval_prompts, target.text, shape, length, field)
    return {field: mistake} if mistake else {}


def _online_layers(config: TrainDflash, target: TargetStated) -> Mistakes:
    """Mistakes in the layers that a training captures itself."""
    if config.capture != "online":
        return
    layers, field = target.info["num_layers"], "target_layer_ids"
    try:
        if config.target_layer_ids is None:
            field = "capture_layers"
            spread_layers(layers, config.capture_layers, field=field)
        else:
            check_layers(config.target_layer_ids, layers)
    except ConfigError as error:
        yield field, str(error)


def _shape(
    config: TrainDflash, target: TargetStated, features: FeaturesForecast | None
) -> DraftConfig | dict[str, str]:
    """The draft's shape, or the mistakes that prevent it, by field. Layers are those of the features, or of the
    training.
    """
    try:
        return expected_shape(config, target.config, features)
    except DraftConfigError as error:
        return by_field(_named(mistake, config) for mistake in error.mistakes if not mistake.startswith(LAYER_IDS))
    except ConfigError as error:
        return {"target": str(error)}


def _named(mistake: str, config: TrainDflash) -> tuple[str, str]:
    """A mistake in a draft's config, with the field of train_dflash that sets it, else the target's."""
    name = mistake.partition(":")[0]
    field = FIELDS.get(name, "algorithm")
    if name == "num_attention_heads" and config.num_heads is None:
        field = "num_kv_heads"
    return ("target" if field is None else field), mistake


def _mask(config: TrainDflash, target: TargetStated, features: FeaturesForecast | None) -> int | None:
    """The mask token of the training; None if not known yet."""
    if config.mask_token_id is not None:
        return config.mask_token_id
    found: int | None = target.mask_token_id if features is None or features.info is None else features.info[MASK]
    return found


def _warm_start(
    config: TrainDflash, parent: DraftForecast | None, shape: DraftConfig, mask: int | None, layers_known: bool
) -> dict[str, str]:
    """Mistakes for sizes and mask token in which a warm start's draft differs from the draft to be trained."""
    if parent is None:
        return {}
    fields = DRAFT_SHAPE if config.rope_theta is None else DRAFT_SHAPE | {"rope_theta": "rope_theta"}
    wrong = []
    for name, field in fields.items():
        there, here = getattr(parent.shape, name), getattr(shape, name)
        if there != here:
            remedy = "give the target that it was made for" if field is None else f"set {field}, or start from another"
            wrong.append(f"{name}: {_shown(there)} in the draft, {_shown(here)} in this training: {remedy}")
    if None not in (mask, parent.mask_token_id) and mask != parent.mask_token_id:
        wrong.append(
            f"{MASK}: {parent.mask_token_id} in the draft, {mask} in this training: set {MASK} of train_dflash, "
            "or start from another"
        )
    there_ids, here_ids = parent.shape.target_layer_ids, shape.target_layer_ids
    if layers_known and there_ids != here_ids and (len(there_ids) != len(here_ids) or parent.knows_layers):
        wrong.append(
            f"target_layer_ids: {_shown(there_ids)} in the draft, {_shown(here_ids)} in this training: capture those "
            "of the draft (target_layer_ids)"
        )
    there_algorithm, here_algorithm = parent.shape.algorithm, shape.algorithm
    if remedy := _other_start(there_algorithm, here_algorithm):
        wrong.append(
            f"algorithm: {there_algorithm.name} in the draft, {here_algorithm.name} in this training, or other sizes "
            f"of it: {remedy}"
        )
    wrong += _kept(config, parent.shape, shape)
    return {"warm_start": "\n".join(wrong)} if wrong else {}


def _kept(config: TrainDflash, there: DraftConfig, here: DraftConfig) -> list[str]:
    """Mistakes in the scales and the cap of logits that a warm start keeps of its draft."""
    try:
        started_shape(config, here, there)
    except DraftConfigError as error:
        names = [mistake.partition(":")[0] for mistake in error.mistakes]
        return [
            f"{name}: {_shown(getattr(there, name))} in the draft, which a training of {here.algorithm.name} can "
            "neither keep nor drop: start from another"
            for name in names
            if name in SCALES
        ]
    return []


def _other_start(there: Algorithm, here: Algorithm) -> str:
    """What to do about a warm start from a draft of an algorithm that cannot start this one; "" if it can."""
    if there in (plain(), here):
        return ""
    if isinstance(here, StartsFromOthers):
        return here.start_mistake(there)
    return "a training starts from a draft of its own algorithm or from plain DFlash"


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
