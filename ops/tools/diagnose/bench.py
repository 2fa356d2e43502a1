"""Decodes prompts with a draft under several settings, each setting once, and compares their tau.

What few prompts can show: Student's t on the target's passes per token of an answer. For one prompt that is 1 / tau.
It lies between 0 and 1, so a few easy prompts do not hide what the rest show, as they would with tau or its logarithm;
for answers of equal length its mean is 1 / tau of all.

Two tests share the error probability. One uses the prompts' own spread, and finds small gains over many
prompts. The other adds PRIOR_PROMPTS pseudo-prompts with a spread of PRIOR_SPREAD, about that of prompts whose
tau lies between 1.3 and 6, and finds large gains over few.

N prompts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import hypot, sqrt
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from attrs import asdict, define, evolve, field, frozen
from scipy.special import stdtrit
from torch import Tensor

from ops.evaluate.verdicts import LEAST_GAIN
from ops.lib.data.batching import spread
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.target.model import Target
from ops.tokenize_chat.records import last_of_each
from ops.tools.diagnose.judgement import LEAST_PROMPTS

CHANCE = 0.005  # several settings are tried, so one that is no better must not win by chance
PRIOR_SPREAD, PRIOR_PROMPTS = 0.15, 4
SHOWN = 3  # tensors that are named
EXPORTED, TRAINED = "those of the export", "those of the training"


@frozen
class Setting:
    """A way to run a draft: its config and inputs. block_offset: as in DraftUse. weights: EXPORTED or TRAINED."""

    config: DraftConfig
    block_offset: int = 0
    weights: str = EXPORTED

    @property
    def use(self) -> DraftUse:
        return evolve(DraftUse.of(self.config), block_offset=self.block_offset)

    def evolved(self, **fields: Any) -> Setting:
        """The setting with other values in fields of its config."""
        return evolve(self, config=evolve(self.config, **fields))


class Counted(Protocol):
    """What has verification steps, and the tokens that they generated: an answer, or a part of one."""

    @property
    def steps(self) -> int: ...

    @property
    def generated(self) -> int: ...


Steps = TypeVar("Steps", bound=Counted)


@define
class Bench:
    """Decodes prompts with a draft under several settings, each setting once.

    weights: the state dicts to choose from. batch_size: prompts decoded at once. report: called with each step.
    """

    target: Target
    weights: Mapping[str, Mapping[str, Tensor]]
    settings: DecodeSettings
    batch_size: int
    report: Callable[[str], None]
    _decoded: list[tuple[Setting, Sequence[TokenSample], list[Decoded]]] = field(factory=list)
    _built: list[tuple[Setting, DraftModel]] = field(factory=list)

    def decode(self, setting: Setting, prompts: Sequence[TokenSample], what: str) -> list[Decoded]:
        for known, of, answers in self._decoded:
            if known == setting and of is prompts:
                return answers
        self.report(f"decoding {len(prompts)} prompts, {what}")
        answers = self.decode_with(self.draft(setting), setting.use, prompts)
        self._decoded.append((setting, prompts, answers))
        return answers

    def decode_with(self, draft: DraftModel, use: DraftUse, prompts: Sequence[TokenSample]) -> list[Decoded]:
        answers = []
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            answers += decode_speculative_batch(self.target, draft, batch, self.settings, use)
        return answers

    def can_load(self, setting: Setting) -> bool:
        return not misfits(setting.config, self.weights[setting.weights])

    def draft(self, setting: Setting) -> DraftModel:
        """The draft model for a setting; settings that differ only in DraftUse share one model."""
        shape = _shape(setting.config)
        for known, model in self._built:
            if known.weights == setting.weights and _shape(known.config) == shape:
                return model
        model = DraftModel(setting.config)
        model.load_state_dict(dict(self.weights[setting.weights]), strict=True)
        model = model.to(self.target.device, self.target.embed_weight.dtype).eval().requires_grad_(False)
        self._built.append((setting, model))
        return model


def _shape(config: DraftConfig) -> dict[str, Any]:
    fed = ("target_layer_ids", "mask_token_id")
    return {name: value for name, value in asdict(config, recurse=False).items() if name not in fed}


def misfits(config: DraftConfig, weights: Mapping[str, Tensor]) -> list[str]:
    """The reasons why a model of this config cannot use these weights, one text for each kind."""
    with torch.device("meta"):
        expected = DraftModel(config).state_dict()
    both = sorted(expected.keys() & weights.keys())
    kinds = {
        "missing": sorted(expected.keys() - weights.keys()),
        "left over": sorted(weights.keys() - expected.keys()),
        "of another shape": [name for name in both if expected[name].shape != weights[name].shape],
        "not of finite numbers": [name for name in both if not weights[name].isfinite().all()],
    }
    return [f"tensors {kind}: {_named(names)}" for kind, names in kinds.items() if names]


def _named(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def tau_of(answers: Sequence[Counted]) -> float:
    """The generated tokens per verification step; NaN without a step."""
    steps = sum(answer.steps for answer in answers)
    return sum(answer.generated for answer in answers) / steps if steps else float("nan")


@frozen
class Gain:
    """A difference of tau between two sets of answers. counts: it is large enough. is_certain: it is also significant.

    With fewer than LEAST_PROMPTS prompts with a step, nothing is certain.
    """

    value: float
    counts: bool
    is_certain: bool

    @property
    def is_open(self) -> bool:
        """Whether more prompts are needed to tell the gain from chance."""
        return self.counts and not self.is_certain


def paired_gain(after: Sequence[Decoded], before: Sequence[Decoded]) -> Gain:
    """The gain in tau between two decodings of the same prompts, judged by the difference of each prompt."""
    both = [(one, other) for one, other in zip(after, before, strict=True) if one.steps and other.steps]
    after, before = [one for one, _ in both], [other for _, other in both]
    return _gain(after, before, [passes(before) - passes(after)], CHANCE)


def unpaired_gain(after: Sequence[Counted], before: Sequence[Counted], chance: float = CHANCE) -> Gain:
    """The gain of tau between different prompts. chance: the error probability at which it is certain."""
    after, before = stepped(after), stepped(before)
    return _gain(after, before, [passes(after), passes(before)], chance)


def _gain(after: Sequence[Counted], before: Sequence[Counted], compared: Sequence[np.ndarray], chance: float) -> Gain:
    """The gain in tau, whether it is large enough to count, and whether it is certain.

    compared: the groups of values whose errors make the gain's error.
    """
    value = tau_of(after) - tau_of(before)
    counts = value >= LEAST_GAIN * tau_of(before)
    if not counts or min(len(after), len(before)) < LEAST_PROMPTS:
        return Gain(value, counts, False)
    saved = float(passes(before).mean() - passes(after).mean())
    least_error = hypot(one_token(after), one_token(before))
    return Gain(value, counts, is_certainly_above(compared, saved, least_error, chance))


def most_saved(after: Sequence[Decoded], before: Sequence[Decoded]) -> float:
    """An upper bound of the share of target passes that the gain saves, wrong with probability CHANCE."""
    before, after = stepped(before), stepped(after)
    each = passes(before) - passes(after)
    return most(each, one_token(after), CHANCE) / float(passes(before).mean())


def stepped(answers: Sequence[Steps]) -> list[Steps]:
    """The answers that have a verification step."""
    return [answer for answer in answers if answer.steps]


def one_token(answers: Sequence[Counted]) -> float:
    """The least error of passes per token: one token more or less could always have been accepted."""
    return 1 / sum(answer.generated for answer in answers)


def spread_samples(reader: TokenReader, count: int) -> list[TokenSample]:
    """Choose at most `count` samples, equally many of each category if possible, spread evenly.

    Of a conversation in several samples, that of its last answer, as `evaluate` asks.
    """
    places: dict[str, list[int]] = {}
    for index in last_of_each(reader.records):
        places.setdefault(reader.records[index]["category"], []).append(index)
    chosen: list[int] = []
    for done, group in enumerate(sorted(places.values(), key=len)):
        share = (count - len(chosen)) // (len(places) - done)
        chosen += spread(group, share)
    return [reader.sample(index) for index in sorted(chosen)]


def passes(answers: Sequence[Counted]) -> np.ndarray:
    """The target's passes per generated token, [N]; for answers with a step."""
    return np.array([answer.steps / answer.generated for answer in answers], dtype=np.float64)


def is_certainly_above(groups: Sequence[np.ndarray], value: float, least_error: float, chance: float) -> bool:
    """Whether a sum or difference of the groups' means, `value`, is above 0 at this error probability.

    least_error: the smallest value that differs from 0, however similar the prompts are.
    """
    for own_spread, imagined in ((0.0, 0), (PRIOR_SPREAD, PRIOR_PROMPTS)):
        error, degrees = _error(groups, own_spread, imagined)
        if value > stdtrit(degrees, 1 - chance / 2) * hypot(error, least_error):
            return True
    return False


def most(group: np.ndarray, least_error: float, chance: float) -> float:
    """An upper bound of the mean at this error probability. least_error: see `is_certainly_above`."""
    error, degrees = _error([group], 0.0, 0)
    return float(group.mean() + stdtrit(degrees, 1 - chance) * hypot(error, least_error))


def _error(groups: Sequence[np.ndarray], spread: float, imagined: int) -> tuple[float, int]:
    """The standard error of a sum or difference of the groups' means, and its degrees of freedom (Welch, rounded down).

    A group's variance is that of its prompts and of `imagined` pseudo-prompts with this spread.
    """
    freedoms = [len(group) - 1 + imagined for group in groups]
    squares = [float(((group - group.mean()) ** 2).sum()) + imagined * spread**2 for group in groups]
    parts = [square / freedom / len(group) for square, freedom, group in zip(squares, freedoms, groups, strict=True)]
    if not sum(parts):
        return 0.0, min(freedoms)
    degrees = sum(parts) ** 2 / sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    return sqrt(sum(parts)), int(degrees + 1e-9)
