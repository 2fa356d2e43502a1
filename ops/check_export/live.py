"""The gate's live stage: SGLang's own draft class and worker, in this process, compared with `evaluate`.

Identical output does not prove a good draft, since the target verifies every token: the accepted lengths of every step
are compared. In float32 they must be equal, except for ties of two logits; in bfloat16 and float16 rounding makes ties
common, so tau must not be below the evaluation's interval. Whatever tau is, the draft's inputs for some prompts and
answers must be those that dflow's target computes for the same tokens (live_cause.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, frozen

from dsl.errors import DataError
from dsl.finding import Finding
from dsl.stage import Stage
from ops.check_export.live_cause import (
    UNKNOWN,
    Watched,
    compare_watched,
    find_cause,
    is_tie,
    other_dtype,
    other_embedding,
    prompts_to_watch,
    seen_mistake,
)
from ops.check_export.op import CheckExport
from ops.check_export.served_prompts import (
    Departure,
    LiveResult,
    LiveUnavailable,
    Prompt,
    departure_mistakes,
    departures,
    equal_steps,
    is_below,
    served_tau,
    tau_mistake,
    tau_of,
)
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.contract import OF_MAKER, REWRITE, mistake
from ops.lib.drafts.backbone.load import CONFIG, load_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.sglang.version import installed_version
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.model import Target, read_config, target_info

if TYPE_CHECKING:  # both import SGLang
    from ops.lib.sglang.dflash_worker import DflashEngine

ENOUGH = 4  # departures to examine, if this many are not ties
TOGETHER = 16  # requests of a batch
LONGEST_CONTEXT = 512  # tokens, of a compared forward pass
SMALLEST_POOL = 1024
BLOCK = 16  # of a draft whose config.json does not say it
ROUNDINGS = 4  # allowed difference of a forward pass below float32, in multiples of dflow's own rounding


@frozen(kw_only=True)
class Setting:
    """The setting of the live stage: what is served, and how it is compared. evaluated_in: dtype of the evaluation."""

    draft_dir: Path
    target_dir: Path
    info: Mapping[str, Any]
    device: str
    dtype: str
    evaluated_in: str
    tie_margin: float
    forward_tolerance: float
    server_args: Mapping[str, Any] = Factory(dict)

    @property
    def exact(self) -> bool:
        """Whether SGLang must accept as many tokens as `evaluate` in every verification step: both are in float32."""
        return self.dtype == self.evaluated_in == "float32"


def check_live(
    draft_dir: Path, target_dir: Path, prompts: Sequence[Prompt], config: CheckExport, stage: Stage
) -> LiveResult:
    """Serve the prompts with SGLang's own code, and compare the results; see served_prompts.py.

    Raises LiveUnavailable if SGLang cannot serve a draft on this machine.
    """
    report = read_json(stage.inputs["report"].path / "report.json")
    setting = Setting(
        draft_dir=draft_dir,
        target_dir=target_dir,
        info=target_info(stage.inputs["target"]),
        device=stage.device,
        dtype=choose_dtype(config, report, stage.device),
        evaluated_in=report["dtype"],
        tie_margin=report["tie_margin"],
        forward_tolerance=config.forward_tolerance,
        server_args=config.server_args or {},
    )
    try:
        return serve_and_judge(setting, prompts)
    except torch.OutOfMemoryError as error:
        raise no_room(error) from error


def no_room(error: Exception) -> LiveUnavailable:
    """The LiveUnavailable error for a target and a draft that do not fit into memory."""
    return LiveUnavailable(
        f"not enough memory on this device for the target and the draft: {error}. The stage runs on one GPU: use a "
        "larger or an idle one, or give check_export fewer live_prompts, or a larger share of the "
        "memory: server_args = { mem_fraction_static = 0.9 }"
    )


def serve_and_judge(setting: Setting, prompts: Sequence[Prompt]) -> LiveResult:
    """Run SGLang on the prompts, close it, load dflow's target, and judge the differences."""
    draft, mistakes = own_draft(setting.draft_dir)
    engine = start_engine(setting, prompts, BLOCK if draft is None else draft.config.block_size)
    if isinstance(engine, Finding):
        return LiveResult(str(installed_version()), (), {}, mistakes=(*mistakes, engine))
    with engine:
        forward: dict[str, float] = {}
        if draft is not None:
            mistakes += setting_mistakes(engine, draft.config)
            forward, found = compare_forward(engine, draft, setting)
            mistakes += found
        eos = setting.info["eos_token_ids"]
        served = serve(engine, prompts, eos)
        departed = departures(prompts, served)
        watched = [] if mistakes else watch(engine, prompts_to_watch(prompts, departed), eos)
    judged = judge(setting, None if mistakes else draft, prompts, served, departed, watched)
    return LiveResult(
        version=str(installed_version()),
        answers=tuple(served),
        forward=forward,
        ties=judged.ties,
        mistakes=(*mistakes, *judged.mistakes),
        details={
            "dtype": setting.dtype,
            "equal_steps": equal_steps(prompts, served),
            "equal_answers": sum(departure.position is None for departure in departed) + len(prompts) - len(departed),
            **judged.figures,
        },
    )


def watch(engine: DflashEngine, prompts: Sequence[Prompt], eos_token_ids: Sequence[int]) -> list[Watched]:
    """Decode each prompt again in a batch of one, and record the draft's inputs and the answer."""
    seen = [engine.context_of(prompt.sample, prompt.max_new_tokens, eos_token_ids) for prompt in prompts]
    return [
        Watched(prompt, one.features_SF, one.positions_S, one.answer) for prompt, one in zip(prompts, seen, strict=True)
    ]


def choose_dtype(config: CheckExport, report: Mapping[str, Any], device: str) -> str:
    """The dtype of the live stage: on a CPU the config's, else the evaluation's; on a GPU always bfloat16.

    SGLang casts a draft's inputs to bfloat16 on a GPU. Raises LiveUnavailable if the config sets another dtype there.
    """
    if device == "cpu":
        return config.dtype or str(report["dtype"])
    if config.dtype not in (None, "bfloat16"):
        raise LiveUnavailable(
            f"SGLang {installed_version()} casts a draft's inputs to bfloat16 on a GPU, so it cannot be checked in "
            f'{config.dtype} there: give check_export dtype = "bfloat16", or none'
        )
    return "bfloat16"


def own_draft(draft_dir: Path) -> tuple[DraftModel | None, list[Finding]]:
    """The draft loaded by dflow itself from the directory, or None and the mistake that prevents it."""
    try:
        return load_draft(draft_dir), []
    except DataError as error:
        effect = (
            "does not report a missing tensor, uses uninitialised memory in its place, and accepts almost nothing of "
            "what the draft proposes"
        )
        return None, [mistake("", str(error), effect)]


def start_engine(setting: Setting, prompts: Sequence[Prompt], block_size: int) -> DflashEngine | Finding:
    """Start SGLang with this target and draft, and room for a batch of prompts; a mistake if it rejects the draft.

    Raises LiveUnavailable if SGLang cannot be imported, rejects the device or runs out of memory.
    """
    try:
        from ops.lib.sglang import dflash_worker

        sizes = [dflash_worker.tokens_of(prompt.sample, prompt.max_new_tokens, block_size) for prompt in prompts]
    except (ImportError, RuntimeError, OSError) as error:
        raise LiveUnavailable(
            f"SGLang {installed_version()} is installed, but cannot be imported here: {error}"
        ) from error
    room = max(SMALLEST_POOL, sum(sorted(sizes)[-TOGETHER:]))
    try:
        return dflash_worker.DflashEngine.start(
            setting.target_dir,
            setting.draft_dir,
            device=setting.device,
            dtype=setting.dtype,
            pool_tokens=room,
            max_requests=TOGETHER,
            server_args={
                "trust_remote_code": trusts_own_code(setting.target_dir, setting.info),
                **setting.server_args,
            },
        )
    except dflash_worker.DraftRefused as error:
        return mistake(str(setting.draft_dir), "SGLang rejects it", f"refuses to start: {error.__cause__}")
    except dflash_worker.DflashRefused as error:
        raise LiveUnavailable(str(error)) from error
    except dflash_worker.NoRoom as error:
        raise no_room(error) from error


def setting_mistakes(engine: DflashEngine, config: DraftConfig) -> list[Finding]:
    """Mistakes for values of the draft's config.json that SGLang reads differently."""
    return [
        mistake(
            "config.json",
            f"is {expected}",
            f"reads {actual}",
            f"{REWRITE}; if config.json is right, reinstall SGLang {installed_version()}",
            part=name,
            code=OF_MAKER,
        )
        for name, expected, actual in (
            ("the number of tokens verified at once", config.block_size, engine.block_size),
            ("the number of slots of a block", config.layout().queries, engine.worker.queries),
            ("mask_token_id", config.mask_token_id, engine.mask_token_id),
            ("target_layer_ids", list(config.target_layer_ids), engine.layer_ids),
        )
        if expected != actual
    ]


def compare_forward(
    engine: DflashEngine, draft: DraftModel, setting: Setting
) -> tuple[dict[str, float], list[Finding]]:
    """The largest differences between SGLang's draft class and dflow's, by context, and mistakes for large ones."""
    if engine.worker.queries != draft.config.layout().queries:
        return {}, []
    from ops.lib.sglang import draft_forward

    lengths = draft_forward.context_lengths(draft.config, LONGEST_CONTEXT)
    found = draft_forward.compare_forward(engine, draft, lengths)
    # Negated, so that NaN is wrong too.
    wrong = [one for one in found if not one.difference <= setting.forward_tolerance + ROUNDINGS * one.rounding]
    mistakes = [
        mistake(
            "",
            f"the draft's forward pass in {setting.dtype} ({one.name}) differs by {one.difference:.2g} from "
            f"dflow's; rounding explains {setting.forward_tolerance + ROUNDINGS * one.rounding:.2g}",
            "computes config.json or the weights differently than the training did: RoPE, windows and "
            "norms are the usual causes",
            "compare config.json with the training's; a kind of layer or RoPE that SGLang computes differently "
            "cannot be served, so train without it",
            code=OF_MAKER,
        )
        for one in sorted(wrong, key=lambda one: -one.difference)[:1]
    ]
    return {one.name: one.difference for one in found}, mistakes


def serve(engine: DflashEngine, prompts: Sequence[Prompt], eos_token_ids: Sequence[int]) -> list[Decoded]:
    """The answers that SGLang gives, in the order of the prompts."""
    limits = sorted({prompt.max_new_tokens for prompt in prompts})
    answers: dict[int, Decoded] = {}
    for limit in limits:
        places = [place for place, prompt in enumerate(prompts) if prompt.max_new_tokens == limit]
        decoded = engine.decode([prompts[place].sample for place in places], limit, eos_token_ids)
        answers |= dict(zip(places, decoded, strict=True))
    return [answers[place] for place in range(len(prompts))]


@frozen
class Judgement:
    mistakes: tuple[Finding, ...] = ()
    ties: int = 0
    figures: Mapping[str, float] = Factory(dict)


def judge(
    setting: Setting,
    draft: DraftModel | None,
    prompts: Sequence[Prompt],
    served: Sequence[Decoded],
    departed: Sequence[Departure],
    watched: Sequence[Watched],
) -> Judgement:
    """Decide which departures are mistakes, and find their cause. SGLang is already closed.

    draft: None if a known mistake explains them.
    """
    tau = served_tau(served)
    decisive = bool(departed) and (setting.exact or is_below(tau, tau_of(prompts)))
    if draft is None:
        known = Finding("see the mistakes above", advice=REWRITE, code=OF_MAKER)
        return Judgement(_mistakes(setting, prompts, departed, tau, known) if decisive else ())
    dtype = getattr(torch, setting.dtype)
    target = Target.from_directory(setting.target_dir, setting.info, setting.device, dtype)
    draft = draft.to(setting.device, dtype)
    comparison = compare_watched(target, draft, watched)
    real: list[Departure] = []
    for departure in departed if decisive else ():
        if len(real) >= ENOUGH or not (setting.exact and is_tie(target, draft, departure, setting.tie_margin)):
            real.append(departure)
    ties = len(departed) - len(real) if decisive else 0
    if real:
        cause = find_cause(target, draft, real[0], comparison)
        if cause is UNKNOWN:
            cause = other_embedding(read_json(setting.draft_dir / CONFIG), read_config(setting.target_dir)) or cause
        if comparison.cause is None and setting.dtype != setting.evaluated_in:
            cause = other_dtype(setting.dtype, setting.evaluated_in)
        return Judgement(_mistakes(setting, prompts, real, tau, cause), ties, comparison.figures())
    found = () if comparison.cause is None else (seen_mistake(comparison.cause),)
    return Judgement(found, ties, comparison.figures())


def _mistakes(
    setting: Setting, prompts: Sequence[Prompt], real: Sequence[Departure], tau: float | None, cause: Finding
) -> tuple[Finding, ...]:
    if setting.exact:
        return tuple(departure_mistakes(real, len(prompts), cause))
    return (tau_mistake(tau, tau_of(prompts), cause),)
