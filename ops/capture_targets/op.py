"""Declaration of `capture_targets`: hidden states of the target as training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen, validators

from dsl.convert import Given, Only
from dsl.op import field, op
from ops.artifacts import TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.server_args import refused_args

DFLASH_LAYERS, EAGLE3_LAYERS = 5, 3
# What run.py imports by these constants, so that no key but those of SGLang's captures has SGLang's code.
BACKEND = "ops.capture_targets.sglang:SglangBackend"
REQUIRE, BACKEND_INFO = "ops.lib.sglang.version:require_sglang", "ops.lib.sglang.version:backend_info"
LAYER_IDS = {"minItems": 1, "uniqueItems": True, "allOf": [{"items": {"minimum": 0}}]}  # of ascending_layers


def ascending_layers(_instance: object, _attribute: object, layer_ids: tuple[int, ...]) -> None:
    """A validator: layer ids must be ascending, different and not negative; the list must not be empty."""
    if not layer_ids:
        raise ValueError("'target_layer_ids' must name at least one layer")
    if len(set(layer_ids)) < len(layer_ids):
        raise ValueError(f"'target_layer_ids' must name each layer once: {list(layer_ids)}")
    if list(layer_ids) != sorted(layer_ids):
        raise ValueError(f"'target_layer_ids' must be ascending, the order of serving engines: {list(layer_ids)}")
    if min(layer_ids) < 0:
        raise ValueError(f"'target_layer_ids' must be >= 0: {list(layer_ids)}")


FOR_SGLANG = Only("backend", "sglang", "'{name}' needs backend = \"sglang\"")


def sglang_args(_instance: object, _attribute: object, given: dict[str, object] | None) -> None:
    """A validator that refuses all SGLang arguments which would cut, skip or move captured states."""
    refused = refused_args(given or {})
    if refused:
        raise ValueError(f"'server_args': {'; '.join(refused)}")


def default_batch_tokens(device: str) -> int:
    """The number of padded tokens at which a forward pass is fastest: a GPU has much to fill, a CPU little cache."""
    return 1024 if device == "cpu" else 8192


@op(
    version=1,
    run="ops.capture_targets.run:capture_targets",
    key_libraries=("torch", "transformers"),
    resumable=True,
    shares_shards=True,
    gpu=True,
)
@frozen(kw_only=True)
class CaptureTargets:
    """Hidden states of chosen target layers for every token.

    Shards are dealt over the ranks, or over groups of tp_degree of them that share a model.
    """

    tokens: TokenShards
    target: TargetModel
    backend: Literal["huggingface", "sglang"] = field(
        default="huggingface",
        help="what runs the target; sglang: the serving engine, see docs/sglang.md",
    )
    recipe: Literal["dflash", "eagle3"] = field(
        default="dflash",
        help="the kind of draft that the features are for: it decides the default layers",
    )
    num_layers: int | None = field(
        default=None,
        validator=[
            validators.optional(validators.ge(1)),
            Only(
                "recipe",
                "dflash",
                "'{name}' is for recipe = \"dflash\"; eagle3 uses three layers, or those of target_layer_ids",
            ),
        ],
        help="number of layers, spread from the 2nd to the 3rd-last of the target; default: 5; not for eagle3",
    )
    target_layer_ids: tuple[int, ...] | None = field(
        default=None,
        validator=[
            validators.optional(ascending_layers),
            Given("'{name}' and num_layers: give only one of them", left_out={"num_layers": None}),
        ],
        schema=LAYER_IDS,
        help="the layers by number, instead of num_layers; the last layer is not allowed",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", help="of the forward pass and, without feature_dtype, of the stored features"
    )
    feature_dtype: Literal["float8"] | None = field(
        default=None,
        keyed_default=False,
        help="float8: e4m3 with a scale per token and layer, half the bytes of bfloat16; default: dtype",
    )
    final_hidden: bool = field(
        default=False, help='also keep the states after the final norm, which loss = "kl" of train_dflash needs'
    )
    splits: tuple[Literal["train", "val", "test"], ...] = field(default=("train", "val"), help="the splits to capture")
    server_args: dict[str, bool | int | float | str] | None = field(
        default=None,
        validator=[FOR_SGLANG, sglang_args],
        help="sglang: further arguments of SGLang's ServerArgs; part of the key, because some change the features",
    )
    shard_tokens: int = field(
        default=16384, validator=validators.ge(1), help="tokens in one shard of features, the unit of resuming"
    )
    batch_tokens: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        neutral=True,
        help="padded tokens in one forward pass; default: 8192 on a GPU, 1024 on a CPU, whose caches are small",
    )
    tp_degree: int = field(
        default=1,
        validator=[validators.ge(1), FOR_SGLANG],
        neutral=True,
        help="sglang: ranks of launch that share one model (tensor parallel)",
    )
    output = TargetFeatures

    @staticmethod
    def launch_mistakes(values: Mapping[str, Any], launch: Mapping[str, Any]) -> dict[str, str]:
        """Mistakes between config and launch: groups of tp_degree ranks share a model, so all groups must be whole."""
        degree, ranks = values.get("tp_degree", 1), launch.get("nproc", 1)
        if ranks % degree == 0:
            return {}
        remedy = f'give launch = {{ kind = "ranks", nproc = {degree} }}, or a multiple of it'
        return {"tp_degree": f"{degree} does not divide the {ranks} ranks of launch: {remedy}"}

    @property
    def layer_count(self) -> int:
        """The number of captured layers."""
        if self.target_layer_ids is not None:
            return len(self.target_layer_ids)
        return EAGLE3_LAYERS if self.recipe == "eagle3" else self.num_layers or DFLASH_LAYERS

    def chosen_libraries(self) -> tuple[str, ...]:
        """The library SGLang, whose version enters the key only if SGLang captures."""
        return ("sglang",) if self.backend == "sglang" else ()

    def chosen_code(self) -> tuple[str, ...]:
        """The code of SGLang's backend, of the version check, and of SGLang's entry in features.json."""
        return (BACKEND, REQUIRE, BACKEND_INFO) if self.backend == "sglang" else ()
