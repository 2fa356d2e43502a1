"""A tracking URI of a kind that MLflow does not have is a mistake of the pipeline, told with its place."""

from pathlib import Path

import pytest

from dsl.errors import ConfigError, PipelineError
from dsl.pipeline import Pipeline
from dsl.read_toml import read_graph

TEXT = """
[pipeline]
name = "p"

[mlflow]
experiment = "e"
tracking_uri = "URI"

[node.a]
op = "ingest"
source = "builtin:digits"
"""


def read(folder: Path, uri: str, *overrides: str) -> str | None:
    (folder / "p.toml").write_text(TEXT.replace("URI", uri))
    return read_graph(folder / "p.toml", overrides).tracking_uri


@pytest.mark.parametrize(
    "uri",
    [
        *("sqlite:///mlflow.db", "postgresql://u:p@host/db", "mysql+pymysql://host/db", "mssql+pyodbc://host/db"),
        *("http://127.0.0.1:5000", "https://host", "file:///runs", "databricks", "databricks://profile", "some/folder"),
        "HTTP://host",
    ],
)
def test_what_mlflow_knows_is_taken(tmp_path: Path, uri: str) -> None:
    assert uri == read(tmp_path, uri)


@pytest.mark.parametrize(
    ("uri", "kind", "hint"),
    [
        ("htp://host:5000", "htp:", 'did you mean "http"?'),
        ("postgres://host/db", "postgres:", 'did you mean "postgresql"?'),
        ("http+unix://host", "http+unix:", 'did you mean "http"?'),
        (
            "s3://bucket",
            "s3:",
            "supported: sqlite, postgresql, mysql, mssql, http, https, file, databricks, databricks-uc, uc",
        ),
    ],
)
def test_another_one_is_told_with_its_line_or_its_argument(tmp_path: Path, uri: str, kind: str, hint: str) -> None:
    said = f'MLflow does not support tracking servers of the kind "{kind}" ({hint})'
    with pytest.raises(PipelineError) as caught:
        read(tmp_path, uri)
    assert f"{tmp_path / 'p.toml'}:7:1: mlflow.tracking_uri: {said}" == str(caught.value)
    with pytest.raises(PipelineError) as caught:
        read(tmp_path, "http://host", f"mlflow.tracking_uri={uri}")
    assert f"-s mlflow.tracking_uri={uri}: {said}" == str(caught.value)
    with pytest.raises(ConfigError) as refused:
        Pipeline("p", tracking_uri=uri)
    assert said == str(refused.value)


def test_an_installed_plugin_of_mlflow_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "plugin" / "own_store-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: own-store\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[mlflow.tracking_store]\nown = own_store:Store\n")
    monkeypatch.syspath_prepend(str(plugin.parent))
    assert "own://host" == read(tmp_path, "own://host")
