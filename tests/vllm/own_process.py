"""Runs vLLM's engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run_script(name: str, request: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python name REQUEST ANSWER` on a script of this directory; its answer is in folder/answer.json."""
    (folder / "request.json").write_text(json.dumps(request))
    command = [sys.executable, str(HERE / name), str(folder / "request.json"), str(folder / "answer.json")]
    path = f"{os.environ['PYTHONPATH']}:{ROOT}"
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
