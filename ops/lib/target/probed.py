"""What a probe of a target found (ops/lib/target/probe.py), and its words. Loads no torch: the probe is a process."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from dsl.errors import DataError
from dsl.imports import child_environment, module_command
from ops.lib.data.files import read_object

MEASURED = "measurements.json"  # of a target's artifact; outside of its digest
COPY, WEIGHTS = "a small random copy", "the weights"
LAYERS, HEAD, EMBEDDING, PADDING = "layers", "head", "embedding", "padding"
BLOCKS, SPECULATION, LENGTHS = "blocks", "speculation", "lengths"
MEANINGS = {
    LAYERS: "the inputs of its layers are its hidden states, which no later token changes",
    HEAD: "its head on the final states gives its logits",
    EMBEDDING: "what enters its first layer are rows of its embedding times a scale",
    PADDING: "padded batches give what single texts give",
    BLOCKS: "blocks through its cache, accepted in part, give what single tokens give",
    SPECULATION: "speculative answers are the plain ones",
    LENGTHS: "a text beyond the first range of its RoPE leaves shorter ones of its batch as they are",
}
NOT_EVALUATED = "capture and training are possible, but evaluate is not"
LEFT = {  # what is still possible where a check fails
    LAYERS: "no draft can be fed by it",
    HEAD: "no draft can be trained or decoded with its head",
    EMBEDDING: "a draft learns and decodes with those rows: a draft's inputs are not the target's",
    PADDING: "it is run one text at a time",
    BLOCKS: NOT_EVALUATED,
    SPECULATION: NOT_EVALUATED,
    LENGTHS: "only texts within that range are right",
}
TURNS = 3  # of texts with which weights are tried, at most
# Of one turn of all checks on the weights: passes of the model, and their tokens together.
PASSES, TOKENS = 65, 700
FEW_PASSES = 5  # of layers, head and embedding
READ, COMPUTED = 1e10, 1e10  # bytes in a second, and operations of a core: of a slow machine
OF_FEW = 0.1  # of a turn: layers, head and embedding only
MEASURING_COPY = f"measuring {COPY} of the target"
MEASURING_WEIGHTS = f"measuring {WEIGHTS} of the target"
UNMEASURED = "the weights are not measured"
A_MINUTE = "up to a minute on a busy machine"
STARTING = f"{MEASURING_COPY}, {A_MINUTE}: loading torch and transformers first"
MAKING = "making it"  # comes before the first check
SAID = "measuring: "  # begins a line of the process that measures, with what it begins
NEEDED = (LAYERS, HEAD)  # without which a target is refused


Trying = Callable[[str], None]  # is told what begins: of a probe, the name of each check


def in_silence(_name: str) -> None:
    """Shows nothing."""


@frozen
class Check:
    """One thing that was tried. difference: the largest, as a share of the largest value; None where it did not come to
    numbers. reason: what was raised, or differs besides numbers; empty where nothing did. limit: the tokens up to which
    texts are right where only longer ones fail it; None for any other failure.
    """

    name: str
    holds: bool
    difference: float | None = None
    reason: str = ""
    limit: int | None = None

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        if self.holds:
            return MEANINGS[self.name]
        numbers = "" if self.difference is None else f"they differ by {self.difference:.1%} of the largest value"
        found = "; ".join(part for part in (self.reason, numbers) if part)
        if self.limit is not None:
            return (
                f"texts of up to {self.limit:,} tokens are right; a longer one changes shorter ones of its batch "
                f"({found}), so texts of more than {self.limit:,} tokens are refused"
            )
        return f"it does not hold that {MEANINGS[self.name]} ({found}): {LEFT[self.name]}"


@frozen
class Probe:
    """The checks of one model. on: which weights it had."""

    on: str
    checks: tuple[Check, ...]
    seconds: float

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Probe:
        return cls(values["on"], tuple(Check(**each) for each in values["checks"]), values["seconds"])

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.holds)

    @property
    def is_whole(self) -> bool:
        """Whether drafts were verified with it; of weights that would take too long they are not."""
        return any(check.name == SPECULATION for check in self.checks)

    @property
    def is_usable(self) -> bool:
        """Whether all checks hold, if need be for texts up to a limit."""
        return all(check.limit is not None for check in self.failed)

    @property
    def failed_names(self) -> frozenset[str]:
        return frozenset(check.name for check in self.failed)

    @property
    def refusal(self) -> str:
        """Why it cannot be a target; empty where it can."""
        return self._sentences(lambda check: check.name in NEEDED)

    @property
    def warning(self) -> str:
        """What is not possible with it although it can be a target; empty for nothing."""
        return self._sentences(lambda check: check.name not in NEEDED)

    @property
    def unverified(self) -> str:
        """Why answers by a draft would not be its own; empty where they are."""
        return self._sentences(lambda check: check.name in (BLOCKS, SPECULATION))

    @property
    def unbatched(self) -> str:
        """Why texts have to run one at a time; empty where a batch gives the same."""
        return self._sentences(lambda check: check.name == PADDING)

    @property
    def verdict(self) -> str:
        """What dflow can do with the target, in a line."""
        limits = [check.limit for check in self.failed if check.limit is not None]
        within = f", for texts of up to {min(limits):,} tokens" if limits else ""
        alone = ", one text at a time" if PADDING in self.failed_names else ""
        if self.refusal:
            return "it cannot be a target"
        if self.unverified:
            return f"possible{within}{alone}: capture, training, export; not evaluate, nor eval_every of a training"
        return f"it can be a target{within}{alone}"

    def _sentences(self, wanted: Callable[[Check], bool]) -> str:
        found = "; ".join(check.sentence for check in self.failed if wanted(check))
        return f"measured on {self.on}: {found}" if found else ""

    def rows(self) -> list[tuple[str, str, str]]:
        """A row for each check: its name, whether it holds, and by how much or why not."""
        return [
            (check.name, _result(check), check.sentence if not check.holds else _rounding(check))
            for check in self.checks
        ]


def _result(check: Check) -> str:
    if check.limit is not None:
        return "limit"
    return "holds" if check.holds else "FAILS"


def _rounding(check: Check) -> str:
    if check.difference is None:
        return check.sentence
    return f"{check.sentence} ({f'within {check.difference:.1e}' if check.difference else 'exactly'})"


@frozen
class Measurements:
    """What was measured of a target: the probe of its copy, then that of its weights, as far as there are, and in
    sentences what was not.
    """

    probes: tuple[Probe, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measurements:
        return cls(tuple(map(Probe.from_json, values["probes"])), tuple(values["notes"]))

    def to_json(self) -> dict[str, Any]:
        return {"probes": [probe.to_json() for probe in self.probes], "notes": list(self.notes)}

    @property
    def together(self) -> Probe:
        """Each check as it was found last, so that the weights decide what was tried on them."""
        checks = {check.name: check for probe in self.probes for check in probe.checks}
        return Probe(self.probes[-1].on, tuple(checks.values()), sum(probe.seconds for probe in self.probes))


def probe_of_copy(config: Mapping[str, Any], begun: Trying = in_silence) -> Probe:
    """The probe of a small random copy of a complete config.json, in a process of its own.

    begun: called with each step. Raises DataError as `measured_target` does.
    """
    return measured_target(config, begun=begun).probes[0]


def measured_target(
    config: Mapping[str, Any], directory: Path | None = None, minutes: float = 0, begun: Trying = in_silence
) -> Measurements:
    """What is measured of a target, in a process of its own: on a small random copy of its complete config.json, and
    on the weights of its whole checkpoint, if its directory is given, as far as half of the free memory holds them.

    minutes: the longest time for the weights; if all checks take longer, only some run on them. begun: called with each
    step. Raises DataError where nothing can be measured, or the process fails.
    """
    last = ""
    asked = {"config": config, "directory": None if directory is None else str(directory), "minutes": minutes}
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+", errors="replace") as errors:
        json.dump(asked, given)
        given.seek(0)
        command = module_command("ops.lib.target.measure")
        with subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True, env=child_environment()
        ) as process:
            for last in process.stdout or ():  # libraries may print before the last line
                if last.startswith(SAID):
                    begun(last.removeprefix(SAID).strip())
        errors.seek(0)
        said = errors.read().strip().rpartition("\n")[2]
    if process.returncode < 0:
        raise DataError(
            f"the probe of the target was ended by signal {-process.returncode}; perhaps this machine ran out of "
            "memory: free some, and run it again"
        )
    if process.returncode:
        raise DataError(f"the probe of the target failed: {said}")
    found = Measurements.from_json(json.loads(last))
    if not found.probes:
        raise DataError("; ".join(found.notes))
    return found


def kept_probes(folder: Path) -> list[Probe]:
    """The probes that load_target kept in a target's artifact; none where another run's measurements are there."""
    file = folder / MEASURED
    return [Probe.from_json(each) for each in read_object(file).get("probes", [])] if file.is_file() else []


def heeded(probes: Sequence[Probe]) -> Probe | None:
    """The probe that decides what is possible: the last with all checks, of the weights if they have it."""
    return next((probe for probe in reversed(probes) if probe.is_whole), None)


def failed_checks(probes: Sequence[Probe]) -> dict[str, list[str]]:
    """The entry of target.json on the checks that fail, so that another verdict is another artifact; none if all
    hold.
    """
    probe = heeded(probes)
    return {} if probe is None or not probe.failed else {"fails": sorted(probe.failed_names)}


def is_measured(size: int, free: int) -> bool:
    """Whether so many bytes of weights in float32 are loaded to measure them. free: bytes of the machine's memory."""
    return size < free / 2


def measured_turns(parameters: int, minutes: float) -> int:
    """How often all checks can run on the weights within so many minutes, by an estimate; at most TURNS."""
    return min(TURNS, int(minutes / turn_minutes(parameters)))


def turn_minutes(parameters: int) -> float:
    """About how long all checks take on the weights in float32, by what a pass reads and what a token computes."""
    cores = len(os.sched_getaffinity(0))
    return parameters * (PASSES * 4 / READ + TOKENS * 2 / (COMPUTED * cores)) / 60


def measuring_time(parameters: int, minutes: float) -> str:
    """About how long those checks on the weights take that run within so many minutes, in words."""
    share = 1 if measured_turns(parameters, minutes) else OF_FEW
    found = round(turn_minutes(parameters) * share)
    if found < 2:
        return "about a minute" if found else "less than a minute"
    return f"about {found:,} minutes"


def shortened(parameters: int, minutes: float) -> str:
    """What is measured of the weights where `measured_turns` is 0, and how to measure the rest."""
    return (
        f"of its weights only layers, head and embedding are measured: all checks take about "
        f"{turn_minutes(parameters):,.0f} minutes on this CPU, and measure_minutes of load_target is {minutes:g}; set "
        "it higher to measure padding, blocks and speculation on them too"
    )
