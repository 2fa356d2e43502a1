"""Arguments of SGLang that `dflow serve` sets or refuses, the key that it passes on, and SGLang's refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ops.lib.sglang.serve_command import REFUSAL
from ops.tools.serve.own_arguments import IN_ARGUMENTS, OF_THE_RUN, refuse

API_KEY = "SGLANG_API_KEY"
IN_A_FILE = f"{IN_ARGUMENTS}; put it into a YAML file and give --config FILE"
OWN = {
    "--port": "give --port before the --",
    "--host": "give --host before the --",
    "--model-path": OF_THE_RUN,  # or --model
    "--speculative-algorithm": OF_THE_RUN,
    "--speculative-draft-model-path": OF_THE_RUN,  # or --speculative-draft-model
    "--api-key": f"{IN_ARGUMENTS}; set the variable {API_KEY}",
    "--admin-api-key": IN_A_FILE,
    "--ssl-keyfile-password": IN_A_FILE,
}
SECRET = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
# SGLang's messages without a GPU: before it loads a model it picks a device, and then checks the algorithm.


def refuse_own(extra: Sequence[str]) -> None:
    """Raises ConfigError for arguments that dflow serve sets itself and for secrets, in every form that SGLang accepts:
    with "=", with underscores, and abbreviated.
    """
    refuse(extra, OWN, SECRET)


def key_config(key: str, extra: Sequence[str], folder: Path) -> list[str]:
    """Arguments by which SGLang reads its API key from a file in a private folder; none where `extra` names one."""
    if not key or any(argument.partition("=")[0] == "--config" for argument in extra):
        return []
    file = folder / "sglang.yaml"
    file.write_text(json.dumps({"api-key": key}))  # JSON of it is YAML
    return ["--config", str(file)]


def refusal(log: str) -> str | None:
    """The last line of a server's log with which SGLang refuses the draft on this machine, None without one."""
    found = REFUSAL.findall(log)
    return found[-1].strip() if found else None
