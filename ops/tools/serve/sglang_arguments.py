"""SGLang arguments that `dflow serve` sets itself, and SGLang's messages when it cannot serve a draft."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsl.errors import ConfigError

OF_THE_RUN = "the run decides it; for another draft name its run, or choose with --node"
OWN = {
    "--port": "give --port before the --",
    "--host": "give --host before the --",
    "--model-path": OF_THE_RUN,  # or --model
    "--speculative-algorithm": OF_THE_RUN,
    "--speculative-draft-model-path": OF_THE_RUN,  # or --speculative-draft-model
}
# SGLang's messages without a GPU: before it loads a model it picks a device, and then checks the algorithm.
REFUSALS = re.compile(r"^.*(?:speculative decoding is not supported by|No accelerator \(CUDA).*$", re.MULTILINE)


def refuse_own(extra: Sequence[str]) -> None:
    """Raises ConfigError for arguments that dflow serve sets itself, in every form that SGLang accepts: with "=",
    with underscores, and abbreviated.
    """
    wrong = []
    for argument in extra:
        name = argument.partition("=")[0].replace("_", "-")
        own = next((each for each in OWN if name.startswith("--") and len(name) > 2 and each.startswith(name)), None)
        if own is not None:
            wrong.append(f"  {argument}: {OWN[own]}")
    if wrong:
        raise ConfigError("arguments after -- that dflow serve sets itself:\n" + "\n".join(wrong))


def refusal(log: str) -> str | None:
    """The last line of a server's log with which SGLang refuses the draft on this machine, None without one."""
    found = REFUSALS.findall(log)
    return found[-1].strip() if found else None
