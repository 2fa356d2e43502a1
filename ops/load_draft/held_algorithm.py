"""The algorithm that a config.json of others holds, and its fields. Loads no torch.

Classes say which algorithm it is; ModelOpt names z-lab's class for each of them, and `projector_type` says which.
Fields of another algorithm than this one are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from attrs import frozen

from ops.lib.drafts.algorithms import Algorithm, plain
from ops.lib.drafts.dflash2.config import SERVED, Dflash2
from ops.lib.drafts.dspark.config import HEAD, Dspark
from ops.load_draft.known_keys import ALGORITHMS
from ops.load_draft.publishers import (
    CONFIDENCE,
    DEEPSPEC,
    DEEPSPEC_CLASS,
    MODELOPT,
    NEST,
    OF_DEEPSPEC,
    SPECFORGE,
    SPECULATORS,
    WITH_MARKOV,
    Publisher,
    architectures,
)

DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
NAMES = {  # classes, speculators' names, and projector types
    DFLASH: DFLASH,
    "DFlashDraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    DFLASH2: DFLASH2,
    "DFlash2DraftModel": DFLASH2,
    DSPARK: DSPARK,
    DEEPSPEC_CLASS: DSPARK,
    "DSparkDraftModel": DSPARK,
    "DSparkSpeculator": DSPARK,
}
PROJECTOR = "projector_type"
ANCHOR = "sample_from_anchor"
HEAD_TYPE, ALPHA, ALSO_CONFIDENCE = "markov_head_type", "confidence_head_alpha", "use_confidence_head"
FIELDS: Mapping[str, frozenset[str]] = {  # of each algorithm, in whichever table they stand
    DFLASH: frozenset(),
    DFLASH2: frozenset(SERVED.values()),
    DSPARK: frozenset(
        (
            *("markov_rank", HEAD_TYPE, CONFIDENCE, ALSO_CONFIDENCE, WITH_MARKOV, ALPHA),
            *(ANCHOR, "shift_label", PROJECTOR),
        )
    ),
}
PARAMETERS = (*SERVED.values(), "markov_rank")
TEXTS = (HEAD_TYPE, PROJECTOR)
SWITCHES = (CONFIDENCE, ALSO_CONFIDENCE, WITH_MARKOV, ANCHOR, "shift_label")


class Reading(Protocol):
    """What a config.json says: `read_config._Reading`."""

    publisher: Publisher
    values: dict[str, Any]
    assumed: dict[str, Any]
    notes: list[str]
    mistakes: list[str]

    def get(self, name: str) -> Any:
        """The value, or else the default of the publisher's class, which is assumed."""


@frozen(kw_only=True)
class Held:
    """block_size: tokens that are verified at once, None if the file does not say. has_bias: whether a DSpark draft has
    a Markov head; without it the bias is zero. confidence_reads_token: whether its confidence head reads the token
    before.
    """

    algorithm: Algorithm
    block_size: int | None
    has_bias: bool = True
    confidence_reads_token: bool = True


def named_algorithm(publisher: Publisher, config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """DFLASH, DFLASH2 or DSPARK, and mistakes: other algorithms, or two of them."""
    speculators = config.get("speculators_config")
    of_speculators = speculators.get("algorithm") if isinstance(speculators, Mapping) else None
    given = [*architectures(config), config.get("speculators_model_type"), of_speculators]
    named = {str(name): NAMES.get(str(name)) for name in given if name is not None}
    mistakes = [_other(name) for name, algorithm in named.items() if algorithm is None]
    nested = config.get(NEST)
    projectors = [table.get(PROJECTOR) for table in (config, nested) if isinstance(table, Mapping)]
    projector = next((str(name) for name in projectors if name), None)
    found = {algorithm for algorithm in named.values() if algorithm}
    if projector in NAMES:
        if found == {DFLASH} and publisher is MODELOPT:  # which names z-lab's class whatever the projector is
            found = set()
        named[f"{PROJECTOR} {projector}"] = NAMES[projector]
        found.add(NAMES[projector])
    if len(found) > 1:
        listed = ", ".join(f"{name} is {algorithm}" for name, algorithm in named.items() if algorithm)
        mistakes.append(f"names several algorithms: {listed}; keep one")
    algorithm = min(found, default=DFLASH)
    if publisher is DEEPSPEC and algorithm == DFLASH and not mistakes:
        fields = ", ".join(name for name in OF_DEEPSPEC if name in config)
        mistakes.append(
            f"{fields}: of DeepSpec's class, whose slot 0 predicts a token, and architectures does not name it: set "
            f'architectures to ["{DEEPSPEC_CLASS}"] if the draft was trained with that class, and remove these fields '
            "if not"
        )
    return algorithm, mistakes


def _other(name: str) -> str:
    """Why a name is of no algorithm that is read here."""
    known = next((full for part, full in ALGORITHMS.items() if part in name.lower()), None)
    if known is not None:
        return f"{name} is of the algorithm {known}, which load_draft does not read"
    classes = ", ".join(known for known in NAMES if known not in FIELDS)
    return f"{name} is none of the classes whose drafts load_draft reads ({classes})"


def is_read(publisher: Publisher, algorithm: str, name: str) -> bool:
    """Whether a key is a field of the algorithm. Speculators' layout is one of every algorithm of it."""
    return name in FIELDS[algorithm] or (publisher is SPECULATORS and name == ANCHOR)


def held_algorithm(reading: Reading, algorithm: str) -> Held:
    """The algorithm with its fields; what does not fit is added to the reading's mistakes."""
    read: Mapping[str, Callable[[Reading], Held]] = {DFLASH: _dflash, DFLASH2: _dflash2, DSPARK: _dspark}
    return read[algorithm](reading)


def _dflash(reading: Reading) -> Held:
    if _of_speculators(reading):
        return _without_bias(reading, f"{ANCHOR} = true", confidence=False)
    return Held(algorithm=plain(), block_size=reading.get("block_size"))


def _dflash2(reading: Reading) -> Held:
    if _of_speculators(reading):
        reading.mistakes.append(
            f"{ANCHOR} = true: slot 0 predicts a token, and no engine serves DFlash2 in this layout: vLLM does not "
            "start, and SGLang reads the mask slots only"
        )
    sizes = {name: reading.get(served) for name, served in SERVED.items()}
    is_whole = None not in sizes.values()
    return Held(algorithm=Dflash2(**sizes) if is_whole else plain(), block_size=reading.get("block_size"))


def _of_speculators(reading: Reading) -> bool:
    """Whether slot 0 of a DFlash or DFlash2 draft predicts a token; only speculators has a field for it."""
    if reading.publisher is not SPECULATORS:
        return False
    if ANCHOR not in reading.values:
        reading.assumed[ANCHOR] = False
    return bool(reading.values.get(ANCHOR))


def _dspark(reading: Reading) -> Held:
    anchor_first, rank = _anchor_first(reading), reading.get("markov_rank")
    confidence, reads_token = _confidence(reading)
    if rank and str(reading.get(HEAD_TYPE)).lower() != HEAD:
        reading.mistakes.append(
            f'{HEAD_TYPE} = {json.dumps(reading.values.get(HEAD_TYPE))}: only "{HEAD}" is supported, as in vLLM'
        )
    if rank == 0 and confidence and (reads_token or not anchor_first):
        reading.mistakes.append(f"{CONFIDENCE} = true: this confidence head needs a Markov head, and markov_rank = 0")
    if rank == 0 and anchor_first:
        return _without_bias(reading, "markov_rank = 0", confidence)
    size = reading.get("block_size")
    if size is not None and (anchor_first or reading.publisher is not SPECULATORS):  # speculators counts the slots
        size += 1
    if rank == 0:
        return Held(algorithm=plain(), block_size=size)
    algorithm = Dspark(rank=rank or 1, sample_from_anchor=anchor_first, confidence_head=confidence)
    return Held(algorithm=algorithm, block_size=size, confidence_reads_token=reads_token)


def _anchor_first(reading: Reading) -> bool:
    """The layout of a DSpark draft."""
    values, publisher = reading.values, reading.publisher
    if publisher is SPECULATORS and ANCHOR not in values:
        reading.mistakes.append(
            f"{ANCHOR}: is missing; speculators' class takes it for true and vLLM for false: set it as the draft was "
            "trained"
        )
        return True
    if publisher in (SPECFORGE, MODELOPT) and values.get(ANCHOR) is False:
        reading.mistakes.append(f"{ANCHOR} = false: slot 0 of every DSpark draft of {publisher.name} predicts a token")
    if values.get("shift_label") is False:
        reading.mistakes.append("shift_label = false: slot 0 of every DSpark draft with this field predicts a token")
    return bool(reading.get(ANCHOR))


def _confidence(reading: Reading) -> tuple[bool, bool]:
    """Whether there is a confidence head, and whether it reads the token before besides the hidden state."""
    values = reading.values
    given = {name: values[name] for name in (CONFIDENCE, ALSO_CONFIDENCE) if name in values}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
        reading.mistakes.append(f"{listed}: whether the draft has a confidence head is not known; keep one")
    if not given and reading.publisher is SPECFORGE:  # whose class decides by the weight of the head's loss
        reading.assumed[CONFIDENCE] = given[CONFIDENCE] = (values.get(ALPHA) or 0) > 0
    confidence = any(given.values()) if given else bool(reading.get(CONFIDENCE))
    return confidence, confidence and bool(reading.get(WITH_MARKOV))


def _without_bias(reading: Reading, why: str, confidence: bool) -> Held:
    """Plain DFlash whose slot 0 predicts a token: DSpark with a bias of zero, the layout in which engines serve it."""
    reading.notes.append(
        f"{why}: plain DFlash whose slot 0 predicts a token; written as DSpark with a bias of zero, since engines "
        "serve this layout as DSpark only"
    )
    size = reading.get("block_size")
    return Held(
        algorithm=Dspark(rank=1, sample_from_anchor=True, confidence_head=confidence),
        block_size=None if size is None else size + 1,
        has_bias=False,
        confidence_reads_token=False,
    )
