"""MLflow: whether the server answers, or whether the database matches the installed version."""

from __future__ import annotations

import base64
import importlib.util
import re
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dsl.finding import Finding

REVISION = re.compile(r"^(down_)?revision\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
ANSWER_S = 5.0
SYNC_LATER = "runs continue without it; `dflow sync` sends the rest later"


def tracking_findings(store: Path, uri: str | None) -> Iterator[Finding]:
    """uri: resolved, of [mlflow] in a pipeline file; None for the database in the store."""
    uri = uri or f"sqlite:///{store / 'mlflow.db'}"
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        yield _server(uri)
    elif scheme == "sqlite":
        yield _database(Path(unquote(urlsplit(uri).path)[1:]))
    else:
        yield Finding(f"runs go to {scheme}; not checked", level="good", code="MLflow")


def _server(uri: str) -> Finding:
    """As MLflow does, a name and a password in the address are sent as basic authentication."""
    parts = urlsplit(uri)
    user, _, place = parts.netloc.rpartition("@")
    shown = parts._replace(netloc=place).geturl()
    request = urllib.request.Request(f"{shown.rstrip('/')}/health")
    if user:
        request.add_header("Authorization", f"Basic {base64.b64encode(unquote(user).encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S):
            return Finding(f"{shown} answers", level="good", code="MLflow")
    except urllib.error.HTTPError as error:
        return Finding(
            f"{shown}/health answers with {error.code} {error.reason}",
            advice=SYNC_LATER,
            level="warning",
            code="MLflow",
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding(f"{shown} cannot be reached: {reason}", advice=SYNC_LATER, level="warning", code="MLflow")


def _database(path: Path) -> Finding:
    """Migrations are read from the files of the installed MLflow, which is not imported."""
    if not path.exists():
        return Finding(f"{path}: does not exist yet; the first run creates it", level="good", code="MLflow")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            (row,) = opened.execute("SELECT version_num FROM alembic_version").fetchall()
    except (sqlite3.Error, ValueError) as error:
        message = f"{path} is not an MLflow database ({error})"
        return Finding(
            message,
            advice="move it away; the next `dflow sync --all` sends everything again",
            level="warning",
            code="MLflow",
        )
    known, newest = _revisions()
    if row[0] in newest:
        return Finding(f"{path} has the installed version", level="good", code="MLflow")
    if row[0] in known:
        return Finding(
            f"{path} has an older version",
            advice="the next run migrates it; back it up first",
            level="warning",
            code="MLflow",
        )
    message = f"{path} was written by a newer MLflow than the installed one"
    return Finding(message, advice="install that version, or move the database away", level="warning", code="MLflow")


def _revisions() -> tuple[set[str], set[str]]:
    """(all revisions that the installed MLflow knows, the newest of them)."""
    spec = importlib.util.find_spec("mlflow")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    known: set[str] = set()
    before: set[str] = set()
    for folder in folders:
        for file in Path(folder).glob("store/db_migrations/versions/*.py"):
            for is_before, revision in REVISION.findall(file.read_text("utf-8")):
                (before if is_before else known).add(revision)
    return known, known - before
