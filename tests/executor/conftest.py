"""Fixtures of more than one file."""

from __future__ import annotations

from pathlib import Path

import pytest
from link_canary import fill


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLOW_STORE", raising=False)
    return tmp_path


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A folder for links to lead to, which has to stay as it is; see link_canary.py."""
    folder = tmp_path / "behind the link"
    folder.mkdir()
    fill(folder)
    return folder
