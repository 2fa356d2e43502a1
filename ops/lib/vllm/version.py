"""The version of vLLM that dflow's command and exports are written for, and where it is. Loads neither torch nor vllm.

vLLM needs other versions of torch than dflow, so it lies in an environment of its own, whose program `vllm` is on PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from dsl.errors import DataError

VLLM_VERSION = "0.33.0"
INSTALL = (
    f"pip install vllm=={VLLM_VERSION} in an environment of its own, since it needs another version of torch than "
    "dflow, and put that environment's bin folder on PATH"
)
ASK = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
ASK_WITHIN_S = 60.0


def require_vllm(what: str) -> Path:
    """The program `vllm`, beside this Python or on PATH.

    what: the purpose, for the error. Raises DataError if the program is missing or of another version. How vLLM reads a
    draft changed with several releases, and a misread draft still gives right answers, only slower.
    """
    program = _find()
    if program is None:
        raise DataError(f"{what} needs vLLM {VLLM_VERSION}, which is neither beside this Python nor on PATH: {INSTALL}")
    found = _version(program)
    if found != VLLM_VERSION:
        raise DataError(
            f"{what} is written for vLLM {VLLM_VERSION}, and {program} is of {found or 'an unknown version'}: {INSTALL}"
        )
    return program


def _find() -> Path | None:
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    return None if found is None else Path(found)


def _version(program: Path) -> str | None:
    """The version of the vLLM installation to which a `vllm` program belongs; None if it cannot be found out.

    The program's Python is asked, since `vllm --version` would load torch. Its path is in the program's first line;
    where that line names a shell instead, as it does for a long path, the Python beside the program is asked.
    """
    for python in (_first_line(program), [str(program.resolve().with_name("python3"))]):
        try:
            asked = subprocess.run(
                [*python, "-c", ASK], capture_output=True, text=True, timeout=ASK_WITHIN_S, check=True
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        return asked.stdout.strip()
    return None


def _first_line(program: Path) -> list[str]:
    with program.open("rb") as script:
        return script.readline().decode(errors="replace").removeprefix("#!").split()
