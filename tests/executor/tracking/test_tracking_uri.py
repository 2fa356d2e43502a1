"""The address of MLflow: its secrets are put in where it is used, and shown nowhere."""

from pathlib import Path

import pytest

from dsl.errors import ConfigError
from executor.tracking.mlflow_client import shown_error, tracking_uri


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


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))", "Connection reset by peer"),
        (
            "HTTPConnectionPool(host='10.0.0.1', port=5000): Max retries exceeded with url: /api/x (Caused by "
            "ProtocolError('Connection aborted.', RemoteDisconnected('Remote end closed connection')))",
            "Remote end closed connection",
        ),
    ],
)
def test_a_connection_that_broke_is_told_with_its_server(told: str, shown: str) -> None:
    error = OSError(f"API request to http://me:s3cret@10.0.0.1:5000/api/x failed with exception {told}")
    assert shown_error(error) == f"10.0.0.1:5000: {shown}"
