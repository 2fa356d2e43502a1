"""How the target's tokens are drawn: by the config's fields, or as its checkpoint recommends. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from attrs import asdict, frozen

from dsl.errors import DataError
from ops.lib.data.files import shown_json
from ops.lib.target.token_ids import GENERATION
from ops.regenerate_answers.op import RegenerateAnswers

SWITCH = "do_sample"
# Settings that change what is drawn and are not used, with the values that change nothing.
UNUSED: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
REMEDY = f'set temperature and top_p of this node instead of sampling = "checkpoint", or write {GENERATION}, such as '
EXAMPLE = '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20}'


@frozen
class Sampling:
    """The rule by which tokens are chosen.

    temperature: 0 is greedy. top_k: only the k most likely tokens count, 0 for all. top_p: of these only the most
    likely that together reach this probability. min_p: of these only those with at least this share of the
    probability of the most likely one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: RegenerateAnswers, generation: Mapping[str, Any]) -> Sampling:
        """The rule of a config, which may be that of the checkpoint. generation: the settings of its
        generation_config.json, empty without one.

        Raises DataError as `checkpoint_sampling`.
        """
        if config.sampling == "checkpoint":
            return checkpoint_sampling(generation)
        return cls(config.temperature, config.top_p)

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value:g}" for name, value in asdict(self).items())


RANGES: Mapping[
    str, tuple[Callable[[float], bool], str]
] = {  # of the fields of Sampling: whether a value is possible, and what is
    "temperature": (lambda value: 0 < value < math.inf, "a number above 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, and at most 1"),
    "top_k": (lambda value: value >= 0 and value % 1 == 0, "a whole number, 0 for all tokens"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
}


def checkpoint_sampling(settings: Mapping[str, Any]) -> Sampling:
    """The rule that a checkpoint recommends. settings: of its generation_config.json, empty without one.

    What it leaves out is as servers take it: temperature 1, all tokens. Raises DataError for a file that recommends no
    sampling, or greedy decoding, and for values that cannot be used.
    """
    given = {name: settings[name] for name in RANGES if settings.get(name) is not None}
    if not given and not settings.get(SWITCH):
        raise DataError(f"{GENERATION} of the target is missing, or recommends no sampling: {REMEDY}{EXAMPLE}")
    if settings.get(SWITCH) is False:
        raise DataError(
            f'{GENERATION} of the target says {SWITCH} = false, so greedy decoding: leave sampling = "checkpoint" out, '
            "or set temperature and top_p"
        )
    for name, value in given.items():
        is_possible, wanted = RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_possible(value):
            raise DataError(
                f"{GENERATION} of the target: {name} = {shown_json(value)} is not {wanted}: {REMEDY}{EXAMPLE}"
            )
    return Sampling(
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=int(given.get("top_k", 0)),
        min_p=float(given.get("min_p", 0.0)),
    )


def unused_settings(settings: Mapping[str, Any]) -> list[str]:
    """What a generation_config.json recommends besides, as `name = value`, and is not used."""
    return [
        f"{name} = {shown_json(settings[name])}"
        for name, neutral in UNUSED.items()
        if settings.get(name) is not None and settings[name] not in neutral
    ]
