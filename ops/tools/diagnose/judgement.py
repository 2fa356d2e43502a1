"""What a diagnosis says: a Finding (dsl/finding.py) for each check, with the check's name as its code.

what: the measured value and, in a second line, the normal one and why. The level is one of the five below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, field, frozen, validators

from dsl.finding import Finding, Level

CAUSE: Level = "error"  # it lowers tau, or keeps it low
NOTE: Level = "warning"  # no mistake, but worth knowing
FINE: Level = "good"
UNJUDGED: Level = "info"  # it would be a cause, but tau can hardly rise
UNMEASURED: Level = "unknown"  # with advice where more prompts could decide it

EXPORT, LAYERS, MASK, POSITIONS, CONFIG, WEIGHTS = (
    "export",
    "layer ids",
    "mask token",
    "positions",
    "config",
    "weights",
)
TARGET, FEATURES, OWN_ANSWERS, SAMPLES_KEPT = "target", "features", "own answers", "samples kept"
HELD_OUT_GAP, AMOUNT, DECODING = "held-out gap", "amount of data", "training against decoding"
CATEGORIES, REPEATED, LEARNT, HIDDEN_STATES = "categories", "repeated answers", "anything learnt", "hidden states"
LOSS_MASK, CUT_BLOCKS, MASK_IN_TEXTS = "loss mask", "cut blocks", "mask token in texts"
CONTEXTS, TURNS, KINDS_OF_TOKENS, GROUPS = "contexts", "turns", "kinds of tokens", "groups"
LOSS_CURVE, SKIPPED_STEPS, LENGTH = "loss curve", "skipped steps", "length of training"
EXPLAINED_BY_TARGET = (FEATURES, OWN_ANSWERS, DECODING, LEARNT, HIDDEN_STATES)  # causes that another target explains

LEAST_PROMPTS = 4  # with a step, in each group: fewer do not show their spread
NORMAL = "\nnormal: "
TABLES = {"context": "context, in tokens", "turn": "answers before", "kind": "kind of token", "group": "group"}
TOO_FEW = "too few prompts to distinguish that from chance"
MORE_PROMPTS = "diagnose with more prompts (--prompts)"
MORE_TIME = "diagnose with more time (--budget), which allows more prompts"
FRACTIONS = {"test": "test_fraction", "val": "val_fraction"}  # fields of ingest, by the split that they fill


NUMBER = validators.instance_of((int, float))


@frozen(kw_only=True)
class PartFigures:
    """tau of a part of the held-out answers, with its interval over prompts.

    share, learnt: of the tokens of these answers, and of those that the training learnt, None if that is not known.
    Raises TypeError for values of other types.
    """

    label: str = field(validator=validators.instance_of(str))
    tau: float = field(validator=NUMBER)
    low: float | None = field(validator=validators.optional(NUMBER))
    high: float | None = field(validator=validators.optional(NUMBER))
    prompts: int = field(validator=validators.instance_of(int))
    share: float = field(validator=NUMBER)
    learnt: float | None = field(validator=validators.optional(NUMBER))


def judged(
    name: str, measured: str, normal: str, advice: str = "", *, is_cause: bool = False, is_note: bool = False
) -> Finding:
    """A finding for a measured value; the advice is kept where there is something to do."""
    level = NOTE if is_note else FINE
    if is_cause:
        level = CAUSE
    return Finding(f"{measured}{NORMAL}{normal}", advice="" if level == FINE else advice, level=level, code=name)


def unmeasured(name: str, why: str) -> Finding:
    """A finding for a check that could not be made. why: what is missing."""
    return Finding(why, level=UNMEASURED, code=name)


def too_few(name: str, measured: str) -> Finding:
    """A finding for a check that more prompts could decide."""
    return Finding(measured, advice=MORE_PROMPTS, level=UNMEASURED, code=name)


def measured_of(finding: Finding) -> str:
    """The measured part of a finding's text, without the normal value."""
    return finding.what.partition(NORMAL)[0]


def is_measured(finding: Finding) -> bool:
    return finding.level != UNMEASURED


def with_next_step(finding: Finding, wanted: int, found: Mapping[str, int]) -> Finding:
    """The finding with advice on how to get more prompts, if it needs them. found: split -> its prompts, up to
    `wanted`.
    """
    if finding.advice != MORE_PROMPTS:
        return finding
    steps = []
    for split in (split for split, count in found.items() if count < wanted):
        raised = f"raise {FRACTIONS[split]} of ingest, or " if split in FRACTIONS else ""
        steps.append(f"the split {split} has only {found[split]} samples: {raised}add samples to the data")
    return evolve(finding, advice="; ".join(steps) + ", and run the pipeline again") if steps else finding


def more_time(finding: Finding) -> Finding:
    """The finding with advice to raise the budget instead of `--prompts`, if it advises more prompts."""
    return evolve(finding, advice=MORE_TIME) if finding.advice == MORE_PROMPTS else finding


def unjudged(finding: Finding) -> Finding:
    """The finding marked as unjudged if it is a cause, as tau at its ceiling needs no explanation."""
    return evolve(finding, level=UNJUDGED, advice="") if finding.level == CAUSE else finding


def held_back(finding: Finding, why: str) -> Finding:
    """The finding turned into an unmeasured one, since its cause is not certain yet. why: the reason."""
    return unmeasured(finding.code, f"{measured_of(finding)}; {why}") if finding.level == CAUSE else finding


def unless_chance(finding: Finding) -> Finding:
    """The finding; a cause becomes an unmeasured finding, since more prompts must confirm it."""
    return too_few(finding.code, f"{measured_of(finding)}; {TOO_FEW}") if finding.level == CAUSE else finding


def is_explained(finding: Finding, found: Iterable[Finding]) -> bool:
    """Whether a finding is a cause that may merely follow from another target, if that is among the causes."""
    explains = any(each.code == TARGET and each.level == CAUSE for each in found)
    return explains and finding.level == CAUSE and finding.code in EXPLAINED_BY_TARGET


def sorted_findings(found: Sequence[Finding], gains: Mapping[str, float]) -> list[Finding]:
    """The findings sorted: causes first, then notes, then fine, unjudged and unmeasured ones.

    Causes with the largest gain in tau come first; those that another target explains come last, as it must be fixed
    first. gains: name of a cause -> the measured rise of tau once it is fixed.
    """
    order = (CAUSE, NOTE, FINE, UNJUDGED, UNMEASURED)

    def rank(finding: Finding) -> tuple[float, ...]:
        gain = gains.get(finding.code, 0.0) if finding.level == CAUSE else 0.0
        return order.index(finding.level), is_explained(finding, found), -gain

    return [
        evolve(each, advice=f"fix {TARGET}, which explains this; if it remains, {each.advice}")
        if is_explained(each, found)
        else each
        for each in sorted(found, key=rank)
    ]
