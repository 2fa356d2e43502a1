"""What stands in for SGLang's kernels of linear attention on a CPU computes what the kernels do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "interpreted_kernels.py"


def test_the_stand_ins_equal_sglangs_own_kernels_in_tritons_interpreter(capsys):
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # nothing is patched there
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert 0 == ran.returncode, ran.stderr
    differences = json.loads(ran.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{differences}")
    assert 12 == len(differences)
    assert all(difference < 2e-6 for difference in differences.values())
