"""Whether the draft reads the target's hidden states: if it does, other layers or positions change tau."""

from __future__ import annotations

from collections.abc import Sequence

from ops.lib.data.token_shards import TokenSample
from ops.tools.diagnose.bench import LEAST_PROMPTS, Bench, Setting, stepped, tau_of
from ops.tools.diagnose.feeding import shifted_layers, shifted_positions
from ops.tools.diagnose.finding import Finding, too_few, unmeasured

NAME = "hidden states"
NO_CHANGE = 0.01  # of tau: a draft that reads the states loses far more, and one that ignores them nothing


def reading_finding(bench: Bench, current: Setting, prompts: Sequence[TokenSample]) -> Finding:
    """current: the setting with corrected inputs. Its alternatives are those of `layer ids` and `positions`."""
    answers = bench.decode(current, prompts, "with corrected inputs")
    tau = tau_of(answers)
    others = {
        f"with layers {label}": setting for label, setting in shifted_layers(current).items() if bench.can_load(setting)
    }
    others |= {f"with positions {label}": setting for label, setting in shifted_positions(current).items()}
    taus = {label: tau_of(bench.decode(setting, prompts, label)) for label, setting in others.items()}
    text = f"tau {tau:.2f}; " + ", ".join(f"{other:.2f} {label}" for label, other in taus.items())
    if len(stepped(answers)) < LEAST_PROMPTS:
        return too_few(NAME, f"{text}; {LEAST_PROMPTS} prompts with a step are needed")
    if tau == 1:
        return unmeasured(NAME, f"{text}: no proposal is accepted, so other inputs cannot lower tau")
    return Finding(
        name=NAME,
        measured=text,
        normal=f"at least one differs by more than {NO_CHANGE:.0%}: a draft predicts from the target's hidden states "
        "at these layers and positions",
        advice="the draft ignores the hidden states and predicts from the last token alone: lower lr of train_dflash, "
        "train longer (more epochs of shard_sequence, or more samples), and check that the curve of train/loss falls",
        is_cause=all(abs(other - tau) <= NO_CHANGE * tau for other in taus.values()),
    )
