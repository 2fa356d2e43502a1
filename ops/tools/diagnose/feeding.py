"""Train and serve mismatch: does the draft get the inputs it was trained on? Corrects each in turn, and measures tau.

The change that raises tau most is kept and the others are tried on top of it, so that a wrong layer is not mistaken
for a wrong position, and two mistakes at once are both found. The same changes show
whether the draft reads the hidden states at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, evolve, frozen

from dsl.finding import Finding
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.backbone.config import DraftConfig
from ops.tools.diagnose.bench import EXPORTED, TRAINED, Bench, Setting, paired_gain, stepped, tau_of
from ops.tools.diagnose.judgement import (
    CONFIG,
    HIDDEN_STATES,
    LAYERS,
    LEAST_PROMPTS,
    MASK,
    POSITIONS,
    TOO_FEW,
    WEIGHTS,
    held_back,
    is_measured,
    judged,
    too_few,
    unmeasured,
)

KINDS = (LAYERS, MASK, POSITIONS, CONFIG, WEIGHTS)
NAMED = (LAYERS, MASK)  # inputs that the config gives as ids
NORMAL = {
    LAYERS: "tau is highest with the exported ids, because the draft can only read the layers that it was trained on",
    MASK: "that of the training, whose embedding fills every slot of a block",
    POSITIONS: "tau is highest with the slots directly after the context, as in training and in serving engines",
    CONFIG: "as trained in every field that affects the forward pass (RoPE, windows, norms, block size)",
    WEIGHTS: "those of the training, rounded to the export's dtype",
}
AS_TRAINED, TARGETS = "as trained", "the target's"
NO_CHANGE = 0.01  # of tau: a draft that reads the states loses far more, and one that ignores them nothing
NOT_KNOWN = "not known whether the training was the same: it was imported, and this is as its own files say"


@frozen
class Trained:
    """The settings of a draft's training, as far as known; mask_token_id falls back to the target's.

    differing_tensors: names of tensors that differ between export and training; None if unknown. is_imported: the draft
    was trained elsewhere, so nothing of its training is known.
    """

    config: DraftConfig | None
    mask_token_id: int
    differing_tensors: tuple[str, ...] | None
    is_imported: bool = False


@frozen
class Step:
    """A correction of the draft's inputs: its kind, its label, and its effect on tau."""

    kind: str
    label: str
    before: Setting
    after: Setting
    tau_before: float
    tau_after: float


@frozen
class Correction:
    """The result of correcting a draft: the final setting, findings, and the gain of each correction."""

    setting: Setting
    findings: tuple[Finding, ...]
    gains: Mapping[str, float]


def correct(
    bench: Bench, exported: Setting, trained: Trained, prompts: Sequence[TokenSample], again: str
) -> Correction:
    """Find the corrections that raise tau, one after another, always the best one next.

    again: the command that writes the export again.
    """
    current, steps = exported, {}
    while True:
        best = _best(bench, current, trained, prompts, [kind for kind in KINDS if kind not in steps])
        if best is None:
            break
        steps[best.kind] = best
        current = best.after
    findings = [
        _cause(steps[kind], trained, again) if kind in steps else _fine(bench, kind, current, trained, prompts)
        for kind in KINDS
    ]
    gains = {kind: step.tau_after - step.tau_before for kind, step in steps.items()}
    return Correction(current, tuple(findings), gains)


def _best(
    bench: Bench, current: Setting, trained: Trained, prompts: Sequence[TokenSample], kinds: Sequence[str]
) -> Step | None:
    """The change that raises tau most, None if none does.

    A value recorded by the training is used without a test of significance. A wrong input of the draft is corrected
    whatever its effect on tau: the export then contradicts the training, and a few prompts cannot tell a small cost
    from none.
    """
    before = bench.decode(current, prompts, "as exported")
    found: Step | None = None
    for kind in kinds:
        for label, setting in candidates(kind, current, trained).items():
            if not bench.can_load(setting):
                continue
            after = bench.decode(setting, prompts, f"{kind} {label}")
            gain = paired_gain(after, before)
            is_better = gain.is_certain
            if label in (AS_TRAINED, TRAINED):
                is_better = kind in NAMED or gain.counts
            if is_better and (found is None or tau_of(after) > found.tau_after):
                found = Step(kind, label, current, setting, tau_of(before), tau_of(after))
    return found


def candidates(kind: str, current: Setting, trained: Trained) -> dict[str, Setting]:
    """The alternative settings of a kind, by label; the training's value comes first."""
    config, known = current.config, trained.config
    if kind == LAYERS:
        if known is not None and known.target_layer_ids != config.target_layer_ids:
            return {AS_TRAINED: current.evolved(target_layer_ids=known.target_layer_ids)}
        return shifted_layers(current)
    if kind == MASK:
        label, mask = (TARGETS, trained.mask_token_id) if known is None else (AS_TRAINED, known.mask_token_id)
        return _distinct(current, {label: current.evolved(mask_token_id=mask)})
    if kind == POSITIONS:
        return shifted_positions(current)
    if kind == CONFIG:
        return {AS_TRAINED: current.evolved(**differing(config, known))} if differing(config, known) else {}
    return _distinct(current, {TRAINED: evolve(current, weights=TRAINED)} if trained.differing_tensors else {})


def shifted_layers(current: Setting) -> dict[str, Setting]:
    """The setting with all layers one lower, and that with all one higher, if the target has such layers."""
    ids, layers = current.config.target_layer_ids, current.config.num_target_layers
    moved = {"one lower": tuple(k - 1 for k in ids), "one higher": tuple(k + 1 for k in ids)}
    return {
        label: current.evolved(target_layer_ids=shifted)
        for label, shifted in moved.items()
        if shifted[0] >= 0 and shifted[-1] < layers - 1
    }


def shifted_positions(current: Setting) -> dict[str, Setting]:
    """The settings with a block's slots one position later, and one earlier, relative to the context."""
    return {
        "one later": evolve(current, block_offset=current.block_offset + 1),
        "one earlier": evolve(current, block_offset=current.block_offset - 1),
    }


def _distinct(current: Setting, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """The settings that differ from the current one, without repetition."""
    kept: dict[str, Setting] = {}
    for label, setting in settings.items():
        if setting != current and setting not in kept.values():
            kept[label] = setting
    return kept


def differing(config: DraftConfig, trained: DraftConfig | None) -> dict[str, Any]:
    """The trained values of fields in which a config differs, except fields that are checked separately."""
    if trained is None:
        return {}
    own = {"target_layer_ids", "mask_token_id", "tie_word_embeddings"}
    now, then = asdict(config, recurse=False), asdict(trained, recurse=False)
    return {name: then[name] for name in now if name not in own and now[name] != then[name]}


def _cause(step: Step, trained: Trained, again: str) -> Finding:
    before, after = _values(step.kind, step.before, step.after)
    return judged(
        name=step.kind,
        measured=f"tau {step.tau_before:.2f} with {before}; {step.tau_after:.2f} with {after}, {step.label}",
        normal=NORMAL[step.kind],
        advice=_advice_of_import(step) if trained.is_imported else _advice(step, again),
        is_cause=True,
    )


def _advice(step: Step, again: str) -> str:
    if step.label in (AS_TRAINED, TRAINED):
        return f"fix whatever changed the export after the training, then {again}"
    if step.label == TARGETS:
        return (
            "the training's record is gone, but its mask token was most likely the target's: find what changed it in "
            f"the export, then {again}"
        )
    if step.kind == LAYERS:
        return "the captured layers are not the served ones: compare both lists of layers, capture and train again"
    return "the training placed its blocks at other positions than decoding: train again with this version of dflow"


def _advice_of_import(step: Step) -> str:
    if step.kind == POSITIONS:
        return "its publisher places blocks at other positions than dflow and engines do: it cannot be served as it is"
    field = {LAYERS: "target_layer_ids", MASK: "mask_token_id"}[step.kind]
    return f"compare {field} of its config.json with what its publisher decodes with, correct it, and import it again"


def _fine(bench: Bench, kind: str, current: Setting, trained: Trained, prompts: Sequence[TokenSample]) -> Finding:
    """The finding for a kind in which nothing raises tau: its value, and what was tried instead.

    If the value differs from the training's, a few prompts may not suffice: then it is unmeasured.
    """
    answers = bench.decode(current, prompts, kind)
    text = f"tau {tau_of(answers):.2f} with {_values(kind, current, current)[0]}"
    others, is_open = candidates(kind, current, trained), False
    few = len(stepped(answers)) < LEAST_PROMPTS
    for label, setting in others.items():
        if not bench.can_load(setting):
            text += f"; {label} ({_values(kind, current, setting)[1]}) the draft cannot be loaded"
            continue
        instead = bench.decode(setting, prompts, kind)
        text += f"; {tau_of(instead):.2f} {label}"
        is_open |= label not in (AS_TRAINED, TRAINED) and (few or paired_gain(instead, answers).is_open)
        if label == TARGETS:
            text += f" ({_values(kind, current, setting)[1]})"
        if label in (AS_TRAINED, TRAINED):
            text += f" ({_values(kind, current, setting)[1]}; no higher, but make sure that the difference is intended)"
    if is_open:
        return too_few(kind, f"{text}; {TOO_FEW}")
    if trained.is_imported and not others and kind in (CONFIG, WEIGHTS):
        return unmeasured(kind, f"{text}; {NOT_KNOWN}")
    return judged(name=kind, measured=text if others else text + _agreement(kind, trained), normal=NORMAL[kind])


def unless_open(finding: Finding, fed: Sequence[Finding]) -> Finding:
    """Withhold a cause if wrong inputs of the draft could explain it, and these could not be measured."""
    names = [each.code for each in fed if not is_measured(each)]
    return held_back(finding, f"{' and '.join(names)}, not measured, may explain that") if names else finding


def reading_finding(bench: Bench, current: Setting, prompts: Sequence[TokenSample]) -> Finding:
    """A finding on whether the draft reads the target's hidden states, by tau at other layers and positions.

    current: the setting with corrected inputs. Its alternatives are those of `layer ids` and `positions`.
    """
    answers = bench.decode(current, prompts, "with corrected inputs")
    tau = tau_of(answers)
    others = {
        f"with layers {label}": setting for label, setting in shifted_layers(current).items() if bench.can_load(setting)
    }
    others |= {f"with positions {label}": setting for label, setting in shifted_positions(current).items()}
    taus = {label: tau_of(bench.decode(setting, prompts, label)) for label, setting in others.items()}
    text = f"tau {tau:.2f}; " + ", ".join(f"{other:.2f} {label}" for label, other in taus.items())
    if len(stepped(answers)) < LEAST_PROMPTS:
        return too_few(HIDDEN_STATES, f"{text}; {LEAST_PROMPTS} prompts with a step are needed")
    if tau == 1:
        return unmeasured(HIDDEN_STATES, f"{text}: no proposal is accepted, so other inputs cannot lower tau")
    return judged(
        name=HIDDEN_STATES,
        measured=text,
        normal=f"at least one differs by more than {NO_CHANGE:.0%}: a draft predicts from the target's hidden states "
        "at these layers and positions",
        advice="the draft ignores the hidden states and predicts from the last token alone: lower lr of train_dflash, "
        "train longer (more epochs of shard_sequence, or more samples), and check that the curve of train/loss falls",
        is_cause=all(abs(other - tau) <= NO_CHANGE * tau for other in taus.values()),
    )


def _agreement(kind: str, trained: Trained) -> str:
    known = trained.differing_tensors is not None if kind == WEIGHTS else trained.config is not None
    if known:
        return ", as trained"
    return ", the target's" if kind == MASK else "; the training's record is gone, so they are not compared"


def _values(kind: str, setting: Setting, other: Setting) -> tuple[str, str]:
    """A kind's value in each of two settings, as text."""
    if kind == CONFIG:
        names = differing(setting.config, other.config)
        if not names:
            return "the exported config", "the exported config"
        before, after = (
            ", ".join(f"{name} {_shown(getattr(one.config, name))}" for name in names) for one in (setting, other)
        )
        return before, after
    show = {
        LAYERS: lambda one: str(list(one.config.target_layer_ids)),
        MASK: lambda one: str(one.config.mask_token_id),
        POSITIONS: lambda one: f"the slots {_place(one.block_offset)}",
        WEIGHTS: lambda one: "the exported weights" if one.weights == EXPORTED else "the training's weights",
    }[kind]
    return show(setting), show(other)


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _place(offset: int) -> str:
    if offset == 0:
        return "directly after the context"
    return f"{abs(offset)} {'later' if offset > 0 else 'earlier'} than that"
