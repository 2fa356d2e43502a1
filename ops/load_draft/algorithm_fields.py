"""The algorithm that a config.json of others holds, with its fields. Loads no torch.

Classes say which algorithm it is; ModelOpt names z-lab's class for each of them, and `projector_type` says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from ops.lib.drafts.algorithms import Algorithm, plain
from ops.lib.drafts.dflash2.config import SERVED, Dflash2
from ops.lib.drafts.dspark.config import HEAD, Dspark
from ops.lib.drafts.lilicorr.config import ENABLED, Lilicorr
from ops.lib.drafts.lilicorr.config import SERVED as OF_LILICORR
from ops.load_draft.publishers import (
    ALPHA,
    ALSO_CONFIDENCE,
    ANCHOR,
    CONFIDENCE,
    DEEPSPEC,
    DEEPSPEC_CLASS,
    DFLASH,
    DFLASH2,
    DSPARK,
    FIELDS,
    HEAD_TYPE,
    LILICORR,
    MODELOPT,
    NEST,
    OF_DEEPSPEC,
    PROJECTOR,
    RANK,
    SHIFT,
    SPECFORGE,
    SPECULATORS,
    WITH_MARKOV,
    Publisher,
    Reading,
    architectures,
)

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
    LILICORR: LILICORR,
    "LiLiCorrDraftModel": LILICORR,
}


@frozen(kw_only=True)
class AlgorithmFields:
    """The fields of an imported draft that depend on its algorithm.

    block_size: tokens verified at once, None if the file does not say. has_bias: whether a DSpark draft has a Markov
    head; without it the bias is zero. confidence_reads_token: whether its confidence head reads the previous token.
    """

    algorithm: Algorithm
    block_size: int | None
    has_bias: bool = True
    confidence_reads_token: bool = True


def named_algorithm(publisher: Publisher, config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The algorithm of a draft, a key of FIELDS, and mistakes for other algorithms or several."""
    speculators = config.get("speculators_config")
    of_speculators = speculators.get("algorithm") if isinstance(speculators, Mapping) else None
    given = [*architectures(config), config.get("speculators_model_type"), of_speculators]
    named = {str(name): NAMES.get(str(name)) for name in given if name is not None}
    mistakes = []
    if unknown := [name for name, algorithm in named.items() if algorithm is None]:
        classes = ", ".join(name for name in NAMES if name not in FIELDS)
        mistakes.append(f"{', '.join(unknown)}: dflow reads only drafts of {classes}")
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
            f'architectures: must be ["{DEEPSPEC_CLASS}"] beside {fields}, in whose class slot 0 predicts a token; '
            "remove these fields if the draft was not trained with it"
        )
    return algorithm, mistakes


def algorithm_fields(reading: Reading) -> AlgorithmFields:
    """The algorithm's fields of a draft; mistakes are added to the reading."""
    read: Mapping[str, Callable[[Reading], AlgorithmFields]] = {
        DFLASH: _dflash,
        DFLASH2: _dflash2,
        DSPARK: _dspark,
        LILICORR: _lilicorr,
    }
    return read[reading.algorithm](reading)


def _dflash(reading: Reading) -> AlgorithmFields:
    if _of_speculators(reading):
        return _without_bias(reading, f"{ANCHOR} = true", confidence=False)
    return AlgorithmFields(algorithm=plain(), block_size=reading.get("block_size"))


def _dflash2(reading: Reading) -> AlgorithmFields:
    if _of_speculators(reading):
        reading.refuse(ANCHOR, True, "false: no engine serves DFlash2 whose slot 0 predicts a token")
    sizes = {name: reading.get(served) for name, served in SERVED.items()}
    is_whole = None not in sizes.values()
    return AlgorithmFields(algorithm=Dflash2(**sizes) if is_whole else plain(), block_size=reading.get("block_size"))


def _lilicorr(reading: Reading) -> AlgorithmFields:
    """Without convolutions their fields may be missing; a width of 0 is that of the draft."""
    if reading.values.get(ENABLED) is False:
        reading.refuse(ENABLED, False, "true: engines do not serve such a draft")
    convolutions = ("taps", "group")
    sizes = {name: reading.get(served) for name, served in OF_LILICORR.items() if name not in convolutions}
    if None in sizes.values():
        return AlgorithmFields(algorithm=plain(), block_size=reading.get("block_size"))
    sizes |= {name: reading.values.get(OF_LILICORR[name], 0) for name in convolutions}
    sizes["width"] = sizes["width"] or reading.get("hidden_size")
    return AlgorithmFields(algorithm=Lilicorr(**sizes), block_size=reading.get("block_size"))


def _of_speculators(reading: Reading) -> bool:
    """Whether slot 0 of a DFlash or DFlash2 draft predicts a token; only the format of speculators has such a field."""
    if reading.publisher is not SPECULATORS:
        return False
    if ANCHOR not in reading.values:
        reading.assumed[ANCHOR] = False
    return bool(reading.values.get(ANCHOR))


def _dspark(reading: Reading) -> AlgorithmFields:
    anchor_first, rank = _anchor_first(reading), reading.get(RANK)
    confidence, reads_token = _confidence(reading)
    if rank and str(reading.get(HEAD_TYPE)).lower() != HEAD:
        reading.refuse(HEAD_TYPE, reading.values.get(HEAD_TYPE), f'"{HEAD}"')
    if rank == 0 and confidence and (reads_token or not anchor_first):
        reading.refuse(CONFIDENCE, True, f"false with {RANK} = 0: this confidence head needs a Markov head")
    if rank == 0 and anchor_first:
        return _without_bias(reading, "markov_rank = 0", confidence)
    size = reading.get("block_size")
    if size is not None and (anchor_first or reading.publisher is not SPECULATORS):  # speculators counts the slots
        size += 1
    if rank == 0:
        return AlgorithmFields(algorithm=plain(), block_size=size)
    algorithm = Dspark(rank=rank or 1, sample_from_anchor=anchor_first, confidence_head=confidence)
    return AlgorithmFields(algorithm=algorithm, block_size=size, confidence_reads_token=reads_token)


def _anchor_first(reading: Reading) -> bool:
    """Whether slot 0 of a DSpark draft predicts a token."""
    if reading.publisher in (SPECFORGE, MODELOPT) and reading.values.get(ANCHOR) is False:
        reading.refuse(ANCHOR, False, f"true, as in every DSpark draft of {reading.publisher.name}")
    if reading.values.get(SHIFT) is False:
        reading.refuse(SHIFT, False, "true, as in every DSpark draft with this field")
    return bool(reading.get(ANCHOR))


def _confidence(reading: Reading) -> tuple[bool, bool]:
    """Whether a draft has a confidence head, and whether that reads the previous token besides the hidden state."""
    values = reading.values
    given = {name: values[name] for name in (CONFIDENCE, ALSO_CONFIDENCE) if name in values}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
        reading.mistakes.append(f"{listed}: must be the same")
    if not given and reading.publisher is SPECFORGE:  # whose class decides by the weight of the head's loss
        reading.assumed[CONFIDENCE] = given[CONFIDENCE] = (values.get(ALPHA) or 0) > 0
    confidence = any(given.values()) if given else bool(reading.get(CONFIDENCE))
    return confidence, confidence and bool(reading.get(WITH_MARKOV))


def _without_bias(reading: Reading, why: str, confidence: bool) -> AlgorithmFields:
    """The fields of plain DFlash whose slot 0 predicts a token: DSpark with zero bias, as engines serve this layout."""
    reading.notes.append(
        f"{why}: plain DFlash whose slot 0 predicts a token; written as DSpark with a bias of zero, since engines "
        "serve this layout as DSpark only"
    )
    size = reading.get("block_size")
    return AlgorithmFields(
        algorithm=Dspark(rank=1, sample_from_anchor=True, confidence_head=confidence),
        block_size=None if size is None else size + 1,
        has_bias=False,
        confidence_reads_token=False,
    )
