"""Seconds after which a run of the tests begins no further one, see quick.py."""

from __future__ import annotations

import os
import time

import pytest

SECONDS = "DFLOW_TESTS_SECONDS"  # since the first test of a process began
BEGAN: list[float] = []


def pytest_runtest_setup() -> None:
    BEGAN.append(time.monotonic())
    if BEGAN[-1] - BEGAN[0] > float(os.environ.get(SECONDS, "inf")):
        pytest.skip("not begun in the time of `make quick FILE=`; `make test` runs it")
