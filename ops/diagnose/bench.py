"""A draft on some prompts, decoded under several settings; every setting once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import asdict, define, evolve, field, frozen
from torch import Tensor

from ops.dflash.config import DraftConfig
from ops.dflash.decode import Decoded
from ops.dflash.decode_batch import DecodeSettings, decode_speculative_batch
from ops.dflash.model import DraftModel
from ops.dflash.use import DraftUse
from ops.diagnose.misfits import misfits
from ops.evaluate.statistics import lower_bound, tau_interval
from ops.load_target.model import Target
from ops.tokenize_chat.shards import TokenReader, TokenSample

RESAMPLINGS = 2000
# A gain counts from here on. Several settings are tried, so one that is no better must not win by chance.
LEAST_GAIN = 0.05
CHANCE = 0.005
LEAST_PROMPTS = 4  # with a step, in each group: fewer are too alike by chance to tell their spread
EXPORTED, TRAINED = "those of the export", "those of the training"


@frozen
class Setting:
    """The draft's shape and how it is fed. block_offset: as in DraftUse. weights: EXPORTED or TRAINED."""

    config: DraftConfig
    block_offset: int = 0
    weights: str = EXPORTED

    @property
    def use(self) -> DraftUse:
        return evolve(DraftUse.of(self.config), block_offset=self.block_offset)

    def evolved(self, **fields: Any) -> Setting:
        """The same with other fields of its config."""
        return evolve(self, config=evolve(self.config, **fields))


@define
class Bench:
    """weights: the state dicts to choose from. batch_size: prompts decoded at once. tell: called with what is next."""

    target: Target
    weights: Mapping[str, Mapping[str, Tensor]]
    settings: DecodeSettings
    batch_size: int
    tell: Callable[[str], None]
    _decoded: list[tuple[Setting, Sequence[TokenSample], list[Decoded]]] = field(factory=list)
    _built: list[tuple[Setting, DraftModel]] = field(factory=list)

    def decode(self, setting: Setting, prompts: Sequence[TokenSample], what: str) -> list[Decoded]:
        for known, of, answers in self._decoded:
            if known == setting and of is prompts:
                return answers
        self.tell(f"decoding {len(prompts)} prompts, {what}")
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
        """One model serves all settings that differ only in what DraftUse says."""
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
    return {name: value for name, value in asdict(config).items() if name not in fed}


def tau_of(answers: Sequence[Decoded]) -> float:
    """Generated tokens over verification steps; nan without a step."""
    steps = sum(answer.steps for answer in answers)
    return sum(answer.generated for answer in answers) / steps if steps else float("nan")


def interval(answers: Sequence[Decoded], block_size: int) -> tuple[float, float] | tuple[None, None]:
    """95 % bootstrap interval of tau over the prompts; None for fewer than two with a step."""
    return tau_interval(*_counts(answers), RESAMPLINGS, 0, block_size)


@frozen
class Gain:
    """tau of some answers minus that of others. counts: it is large enough; is_certain: and not by chance.

    Of fewer than LEAST_PROMPTS prompts with a step nothing is certain.
    """

    value: float
    counts: bool
    is_certain: bool


def paired_gain(after: Sequence[Decoded], before: Sequence[Decoded]) -> Gain:
    """Of the same prompts: both are resampled together."""
    both = [(one, other) for one, other in zip(after, before, strict=True) if one.steps and other.steps]
    return _gain([one for one, _ in both], [other for _, other in both], seeds=(0, 0), chance=CHANCE)


def unpaired_gain(after: Sequence[Decoded], before: Sequence[Decoded], comparisons: int = 1) -> Gain:
    """Of different prompts. comparisons: of so many pairs of groups this one was chosen for its gain (Bonferroni)."""
    with_step = [[answer for answer in answers if answer.steps] for answers in (after, before)]
    return _gain(*with_step, seeds=(0, 1), chance=CHANCE / comparisons)


def _gain(after: Sequence[Decoded], before: Sequence[Decoded], seeds: tuple[int, int], chance: float) -> Gain:
    value = tau_of(after) - tau_of(before)
    counts = value >= LEAST_GAIN * tau_of(before)
    fewest = min(len(after), len(before))
    if not counts or fewest < LEAST_PROMPTS:
        return Gain(value, counts, False)
    resamplings = round(RESAMPLINGS * CHANCE / chance)  # as many beyond the bound, however far out it is
    resampled = [_resampled(answers, resamplings, seed) for answers, seed in zip((after, before), seeds, strict=True)]
    return Gain(value, counts, lower_bound(value, resampled[0] - resampled[1], fewest, chance) > 0)


def _resampled(answers: Sequence[Decoded], resamplings: int, seed: int) -> np.ndarray:
    generated, steps = _counts(answers)
    draws = np.random.default_rng(seed).integers(0, len(answers), size=(resamplings, len(answers)))
    return generated[draws].sum(1) / steps[draws].sum(1)


def _counts(answers: Sequence[Decoded]) -> tuple[np.ndarray, np.ndarray]:
    """Generated tokens and steps of each answer."""
    generated = np.array([answer.generated for answer in answers], dtype=np.float64)
    return generated, np.array([answer.steps for answer in answers], dtype=np.float64)


def spread_samples(reader: TokenReader, count: int) -> list[TokenSample]:
    """So many samples at most, of every category alike as far as there are, spread evenly over each."""
    places: dict[str, list[int]] = {}
    for index, record in enumerate(reader.records):
        places.setdefault(record["category"], []).append(index)
    chosen: list[int] = []
    for done, group in enumerate(sorted(places.values(), key=len)):
        share = (count - len(chosen)) // (len(places) - done)
        taken = min(len(group), share)
        chosen += [group[number * len(group) // taken] for number in range(taken)]
    return [reader.sample(index) for index in sorted(chosen)]
