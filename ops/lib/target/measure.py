"""Measure a target: a small random copy of its config, and the weights of its checkpoint where memory holds them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from dsl.memory import free_memory
from dsl.shown import shown_bytes
from ops.lib.target.checkpoint_check import running_mistake, sizes_in
from ops.lib.target.model import Target, describe_target, read_config
from ops.lib.target.no_memory import no_verdict
from ops.lib.target.probe import probe_config, probe_weights
from ops.lib.target.probed import (
    FEW_PASSES,
    MAKING,
    MEASURING_COPY,
    MEASURING_WEIGHTS,
    PASSES,
    SAID,
    UNMEASURED,
    WEIGHTS,
    Measurements,
    Probe,
    is_measured,
    measured_turns,
    measuring_time,
    shortened,
)
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.target.token_ids import Vocabulary

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # passes so far, and those expected


def measure_weights(
    directory: Path,
    info: Mapping[str, Any],
    copy: Probe | None,
    minutes: float,
    say: Say,
    note: Say,
    progress: Progress,
) -> Probe | None:
    """The probe of a checkpoint's weights, loaded in float32; None where they are not measured, which is a note.

    info: its target.json. copy: the probe of its small copy, if one was made. minutes: the longest time; if all checks
    take longer, only some run. say: is called with what it measures and how long that takes; note: with what it leaves
    out. Raises DataError where the weights cannot be loaded, and MemoryError where memory is lacking.
    """
    config = read_config(directory)
    parameters = sizes_in(directory, config).parameters
    size = parameters * ITEM_SIZES["float32"]
    if mistake := running_mistake(config, directory):
        note(f"{UNMEASURED}: {mistake}")
        return None
    if not is_measured(size, free_memory()):
        note(f"{UNMEASURED}: in float32 they take {shown_bytes(size)}, more than half of what is free")
        return None
    say(f"{MEASURING_WEIGHTS}, {shown_bytes(size)} in float32, {measuring_time(parameters, minutes)}")
    turns = measured_turns(parameters, minutes)
    if not turns:
        note(shortened(parameters, minutes))
    with no_verdict(WEIGHTS):
        target = Target.from_directory(directory, info)
        with _passes_shown(target, PASSES if turns else FEW_PASSES, progress):
            return probe_weights(target, copy, turns)


@contextmanager
def _passes_shown(target: Target, expected: int, progress: Progress) -> Iterator[None]:
    """Opens a context in which passes of a target are reported as progress; those beyond the expected are none."""
    passes = count(1)
    hook = target.model.base_model.register_forward_hook(lambda *_: progress(min(next(passes), expected), expected))
    try:
        yield
    finally:
        hook.remove()


def measure(config: Mapping[str, Any], directory: Path | None, minutes: float, say: Say) -> Measurements:
    """Measure a small random copy of a complete config.json, and the weights of its checkpoint, if one is given.

    What cannot be measured is a note.
    """
    probes: list[Probe] = []
    notes: list[str] = []
    say(f"{MEASURING_COPY}: {MAKING}")
    try:
        probes.append(probe_config(config, lambda name: say(f"{MEASURING_COPY}: {name}")))
    except (DataError, MemoryError) as error:
        notes.append(f"nothing was measured on a copy: {error}")
    if directory is not None:
        try:
            info = describe_target(directory, _any_mask(directory), ())
            copy = probes[0] if probes else None
            of_weights = measure_weights(directory, info, copy, minutes, say, notes.append, _said(say))
            probes += [of_weights] if of_weights else []
        except (DataError, MemoryError) as error:
            notes.append(f"{UNMEASURED}: {error}")
    return Measurements(tuple(probes), tuple(notes))


def _said(say: Say) -> Progress:
    return lambda done, of: say(f"{MEASURING_WEIGHTS}: pass {done} of {of}")


def _any_mask(directory: Path) -> int | None:
    """A mask token that the checkpoint may have; what is measured is the same with any."""
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None:
        return None
    known = vocabulary.known_mask_id
    return next((number for number, _ in vocabulary.possible_mask_ids()), None) if known is None else known


def main() -> None:
    """Print the measurements of {"config", "directory", "minutes"} on standard input, after a line for each step."""
    asked = json.load(sys.stdin)
    directory = None if asked["directory"] is None else Path(asked["directory"])
    found = measure(asked["config"], directory, asked["minutes"], lambda what: print(SAID + what, flush=True))
    json.dump(found.to_json(), sys.stdout)


if __name__ == "__main__":
    main()
