"""Arguments of vLLM that `dflow serve` sets or refuses, and vLLM's refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ops.tools.serve.own_arguments import IN_ARGUMENTS, OF_THE_RUN, refuse

API_KEY = "VLLM_API_KEY"
OWN = {
    "--port": "give --port before the --",
    "--host": "give --host before the --",
    "--uds": "dflow serve asks it by its host and port",
    "--model": OF_THE_RUN,
    "--speculative-config": OF_THE_RUN,
    "--spec-method": OF_THE_RUN,
    "--spec-model": OF_THE_RUN,
    "--spec-tokens": OF_THE_RUN,
    "--api-key": f"{IN_ARGUMENTS}; set the variable {API_KEY}",
}
SECRET = ("--api-key",)
# vLLM's message without a GPU, before it loads a model.
REFUSALS = re.compile(r"^.*Failed to infer device type.*$", re.MULTILINE)


def refuse_own(extra: Sequence[str]) -> None:
    """Raises ConfigError for arguments that dflow serve sets itself and for secrets, in every form that vLLM accepts:
    with "=", with underscores, abbreviated, "-sc", and with the field of a table behind a dot.
    """
    given = [re.sub(r"^-sc(?=[=.]|$)", "--speculative-config", argument) for argument in extra]
    refuse(given, OWN, SECRET, shown=extra)


def refusal(log: str) -> str | None:
    """The last line of a server's log with which vLLM refuses this machine, None without one."""
    found = REFUSALS.findall(log)
    return found[-1].strip() if found else None
