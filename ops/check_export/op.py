"""Declaration of `check_export`: the gate that a draft passes before it is called done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import Attribute, frozen, validators

from dsl.op import field, op
from ops.artifacts import CheckedDraft, Draft, Report, TargetModel, TokenShards
from ops.capture_targets.server_args import refused_args
from ops.lib.drafts.algorithms import (
    NO_SERVER,
    algorithm_class,
    algorithm_names,
    code_of,
)

WORKERS = ("DFLASH", "DSPARK")  # of SGLang: those that the live stage runs
LIKE_SERVED = (
    "a served draft is compared with one of the held-out split, greedy and in blocks as trained: give check_export "
    "such an evaluation, and evaluate the rest in a separate node"
)


def without_worker(engine: str) -> str:
    """A text on why the live stage cannot serve a draft. engine: the name of its algorithm in SGLang, "" for none."""
    if not engine:
        return NO_SERVER
    return f"the live stage runs SGLang's workers {' and '.join(WORKERS)} only, and this draft is served by {engine}"


def unlike_serving(evaluated: Mapping[str, Any], block_size_trained: int | None) -> list[str]:
    """The settings of `evaluate` with which accepted lengths differ from a served draft's, as "name = value".

    evaluated: the fields of `evaluate`. block_size_trained: None if unknown.
    """
    size = evaluated.get("block_size")  # `evaluate` refuses more than block_size_trained
    differs = {
        "benchmark": evaluated.get("benchmark") is not None,
        "temperature": bool(evaluated.get("temperature")),
        "mtp": bool(evaluated.get("mtp")),
        "eagle3": bool(evaluated.get("eagle3")),
        "block_size": size is not None and block_size_trained is not None and size < block_size_trained,
    }
    return [f"{name} = {evaluated[name]}" for name, is_unlike in differs.items() if is_unlike]


def sglang_args(_instance: object, attribute: Attribute[Any], given: dict[str, object] | None) -> None:
    """A validator that rejects SGLang arguments which a capture rejects too, all at once."""
    refused = refused_args(given or {})
    if refused:
        raise ValueError(f"'{attribute.name}': {'; '.join(refused)}")


@op(
    version=1,
    run="ops.check_export.run:check_export",
    key_libraries=("safetensors", "torch", "transformers"),
    single_process=True,
    gpu=True,
)
@frozen(kw_only=True)
class CheckExport:
    """Check a serving directory against the contract, and serve held-out prompts with it if SGLang is installed."""

    draft: Draft
    target: TargetModel
    tokens: TokenShards
    report: Report
    live: Literal["auto", "required", "off"] = field(
        default="auto",
        help='"auto": check with SGLang if it is installed, else warn; "required": fail without it',
    )
    live_prompts: int | None = field(
        default=8,
        validator=validators.optional(validators.ge(1)),
        help="prompts of each category that SGLang decodes, spread over those of the evaluation; none: all of them",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, help="of the forward passes in SGLang; default: that of the evaluation"
    )
    forward_tolerance: float = field(
        default=1e-4,
        validator=validators.gt(0),
        help="largest difference of a forward pass in float32 between SGLang's draft class and dflow's",
    )
    server_args: dict[str, bool | int | float | str] | None = field(
        default=None,
        validator=sglang_args,
        help="further arguments of SGLang's ServerArgs for the live stage: those that capture_targets accepts",
    )
    output = CheckedDraft
    shows_results = True
    main_figures = "check/(tau_served(_.+)?|live_skipped)"
    answers = ("safe",)

    @staticmethod
    def mistakes_with_nodes_above(values: Mapping[str, Any], above: Callable[..., Mapping[str, Any]]) -> dict[str, str]:
        """Mistakes against nodes above: an evaluation unlike serving, or a draft that the live stage cannot serve.

        The latter counts only if the live stage is required and the pipeline trains the draft.
        """
        trained = above("draft", "draft")
        wrong = {}
        if unlike := unlike_serving(above("report"), trained.get("block_size")):
            wrong["report"] = f"this evaluation has {' and '.join(unlike)}, and {LIKE_SERVED}"
        algorithm = trained.get("algorithm")
        if values.get("live") == "required" and algorithm in algorithm_names():
            engine = algorithm_class(algorithm).engine
            if engine not in WORKERS:
                wrong["live"] = f'"required", but {without_worker(engine)}; use "auto"'
        return wrong

    def chosen_libraries(self) -> tuple[str, ...]:
        """The library SGLang, so that the node runs again once it is installed; none if the live stage is off."""
        return () if self.live == "off" else ("sglang",)

    def chosen_code(self) -> tuple[str, ...]:
        """The code of all draft algorithms, since the draft's is known only once it exists."""
        return code_of(algorithm_names(), "model", "reference")
