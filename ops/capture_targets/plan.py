"""What a capture needs, and what it lacks on this machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import evolve

from dsl.estimate import CaptureWork, Estimate, Growth, PlanContext
from dsl.shown import shown_bytes
from ops.capture_targets.conflicts import backend_note
from ops.capture_targets.layers import layers_of
from ops.capture_targets.op import CaptureTargets, default_batch_tokens
from ops.capture_targets.sglang_targets import capture_note, check_config
from ops.lib.data.sample_account import SPLITS
from ops.lib.forecasts import (
    FeaturesForecast,
    TargetForecast,
    TokensForecast,
    amount,
    first_counted,
    identity_of,
    length_note,
)
from ops.lib.missing_libraries import missing_sglang
from ops.lib.target.pass_flops import idle_parameters, token_flops
from ops.lib.target.sizes import ITEM_SIZES, PassSizes, TargetSizes, state_bytes
from ops.lib.thread_table import threads_of_batches
from ops.tokenize_chat.plan import TOKEN_BYTES, mean_length

LESS_DISK = (
    'fewer layers, dtype = "bfloat16", feature_dtype = "float8", or no features at all: train_dflash captures during '
    'training with capture = "online", and tokens instead of features there and in shard_sequence'
)
EXPECTED = "; if there will be fewer tokens, lower expected_tokens of tokenize_chat"

threads = threads_of_batches


def smoke(config: CaptureTargets, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: shards of one batch, so that several of them show the speed."""
    return {"shard_tokens": min(config.shard_tokens, config.batch_tokens or default_batch_tokens("cuda"))}


def estimate(config: CaptureTargets, context: PlanContext) -> Estimate:
    """Estimate memory and disk: weights of one rank, and features of the counted or expected tokens, else
    of a million.
    """
    target, tokens = context.inputs["target"], context.inputs["tokens"]
    layers = config.layer_count
    read = first_counted(tokens)
    kept = read.only(config.splits) if read is not None else None
    if context.artifact is not None:
        forecast = FeaturesForecast.read(context.artifact, context.identity, tokens)
    else:
        forecast = FeaturesForecast(
            num_layers=layers,
            dtype=config.dtype,
            tokens=tokens,
            identity=context.identity,
            target=identity_of(target),
            of_tokens=identity_of(tokens),
            final_hidden=config.final_hidden,
            empty=frozenset(SPLITS) - {*config.splits} | (tokens.empty if tokens is not None else frozenset()),
        )
    forecast = evolve(forecast, counted=kept)
    growth = None
    if kept is not None:
        captured = kept.tokens.amount()
        growth = Growth(series=(captured,), output=captured.growth)
    if target is None:
        return Estimate(growth=growth, forecast=forecast)
    engine = None
    if config.backend == "sglang":
        check_config(target.config, config)
        engine = capture_note(target.config)
    ids = layers_of(config, int(target.sizes.text["num_hidden_layers"]))
    if context.artifact is None:
        forecast = evolve(forecast, target_layer_ids=ids)
    per_token = feature_bytes(target.sizes, layers + config.final_hidden, config.dtype, config.feature_dtype)
    counted = tokens.count(config.splits) if tokens is not None else None
    count, per = amount(counted)
    size = count * per_token
    memory = {"target": weights_bytes(config, target) // config.tp_degree}
    is_expected = counted is not None and tokens is not None and tokens.by_split is None
    return Estimate(
        memory=memory,
        per_pass=_per_pass(
            config, target, per_token, tokens.longest if tokens is not None else 0, context.launch.device
        ),
        disk={"features": size},
        disk_per=per,
        less_disk=LESS_DISK + (EXPECTED if is_expected else ""),
        notes=(
            f"{per_token:,} bytes a token, {shown_bytes(per_token * 1e6)} a million",
            *filter(None, [backend_note(config, target.config), engine, length_note(tokens, target, config.splits)]),
        ),
        growth=growth,
        forecast=forecast,
        work=None
        if tokens is None
        else capture_work(
            target,
            tokens,
            config.splits,
            token_bytes=per_token,
            dtype=config.dtype,
            feature_dtype=config.feature_dtype,
            weights=memory["target"],
            pass_tokens=config.batch_tokens or default_batch_tokens("cuda"),
            states=layers + config.final_hidden,
        ),
    )


def capture_work(
    target: TargetForecast,
    tokens: TokensForecast,
    splits: Collection[str],
    *,
    token_bytes: int,
    dtype: str,
    feature_dtype: str | None,
    weights: int,
    pass_tokens: int,
    states: int,
) -> CaptureWork:
    """The work of capturing some splits once on GPUs. weights: bytes on each GPU. states: captured ones of a token."""
    of_pass = target_pass(target.sizes.text, dtype, tokens.longest, pass_tokens, states)
    return CaptureWork(
        tokens=tokens.count(tuple(splits)),
        token_flops=token_flops(target.sizes, mean_length(tokens, splits)[0]),
        token_bytes=token_bytes,
        weights=weights,
        pass_tokens=pass_tokens,
        memory=weights + sum(of_pass.values()),
        is_sparse=idle_parameters(target.sizes.text) > 0,
        dtype=dtype,
        is_float8=feature_dtype == "float8",
    )


def _per_pass(
    config: CaptureTargets, target: TargetForecast, per_token: int, longest: int, device: str
) -> dict[str, int]:
    """The bytes of the shards that are filled and written, and of a pass by transformers.

    SGLang has limits of its own.
    """
    shards = {"shards": 2 * max(config.shard_tokens, longest) * per_token}
    if config.backend == "sglang":
        return shards
    budget = config.batch_tokens or default_batch_tokens("cpu" if device == "cpu" else "cuda")
    return shards | target_pass(
        target.sizes.text, config.dtype, longest, budget, config.layer_count + config.final_hidden
    )


def target_pass(text: Mapping[str, Any], dtype: str, longest: int, batch_tokens: int, layers: int) -> dict[str, int]:
    """The bytes of a pass over the longest sample, or over a batch of shorter ones where that is more, by part."""
    sizes = PassSizes(text, ITEM_SIZES[dtype])
    alone, batch = sizes.of_batch(1, longest, layers), sizes.of_batch(2, batch_tokens // 2, layers)
    return max(alone, batch, key=lambda parts: sum(parts.values()))


def weights_bytes(config: CaptureTargets, target: TargetForecast) -> int:
    """The bytes of the loaded weights: quantised ones stay so in SGLang, and transformers dequantises them.

    Of a model id, whose files are not here, at most that many.
    """
    if config.backend == "sglang" and target.quantised_bytes is not None:
        return target.quantised_bytes
    return target.sizes.parameters * ITEM_SIZES[config.dtype]


def feature_bytes(sizes: TargetSizes, states: int, dtype: str, feature_dtype: str | None = None) -> int:
    """The bytes that a token takes in the shards: its hidden states, id and loss mask."""
    return states * state_bytes(int(sizes.text["hidden_size"]), dtype, feature_dtype) + TOKEN_BYTES


def missing_here(config: CaptureTargets) -> dict[str, str]:
    """A hint to install SGLang, by field, if it captures and is missing."""
    return missing_sglang("backend", 'backend = "sglang"') if config.backend == "sglang" else {}
