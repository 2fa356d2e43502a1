"""The address of MLflow: its secrets are put in where it is used, and shown nowhere."""

from pathlib import Path

import pytest

from dsl.errors import ConfigError
from executor.track import shown_error, tracking_uri


def test_a_password_is_put_into_the_address_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "https://me:${secret:MLFLOW_PASSWORD}@host:5000/mlflow"
    monkeypatch.setenv("MLFLOW_PASSWORD", "s3cret")
    assert tracking_uri(tmp_path, written, tmp_path) == "https://me:s3cret@host:5000/mlflow"
    monkeypatch.delenv("MLFLOW_PASSWORD")
    with pytest.raises(ConfigError, match="MLFLOW_PASSWORD is not set"):
        tracking_uri(tmp_path, written, tmp_path)


def test_an_error_shows_no_password_of_an_address() -> None:
    error = OSError("API request to https://me:s3cret@host:5000/api/x failed, as did http://token@other/\nmore")
    assert shown_error(error) == "API request to https://***@host:5000/api/x failed, as did http://***@other/"
