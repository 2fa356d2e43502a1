"""Where MLflow's runs go: whether it answers, and whether its database fits the MLflow that is installed."""

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

from executor.doctor.finding import Finding

REVISION = re.compile(r"^(down_)?revision\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
ANSWER_S = 5.0
AWAY = "runs go on without it, and `dflow sync` sends the rest later"


def tracking_findings(store: Path, uri: str | None) -> Iterator[Finding]:
    """uri: of [mlflow] in a pipeline file, resolved; None for the database in the store."""
    uri = uri or f"sqlite:///{store / 'mlflow.db'}"
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        yield _server(uri)
    elif scheme == "sqlite":
        yield _database(Path(unquote(urlsplit(uri).path)[1:]))
    else:
        yield Finding("MLflow", "ok", f"runs go to {scheme}; nothing was asked there")


def _server(uri: str) -> Finding:
    """Asked as MLflow would: a name and a password in the address are sent as basic authentication."""
    parts = urlsplit(uri)
    user, _, place = parts.netloc.rpartition("@")
    shown = parts._replace(netloc=place).geturl()
    asked = urllib.request.Request(f"{shown.rstrip('/')}/health")
    if user:
        asked.add_header("Authorization", f"Basic {base64.b64encode(unquote(user).encode()).decode()}")
    try:
        with urllib.request.urlopen(asked, timeout=ANSWER_S):
            return Finding("MLflow", "ok", f"{shown} answers")
    except urllib.error.HTTPError as error:
        return Finding("MLflow", "warning", f"{shown}/health answers with {error.code} {error.reason}", AWAY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding("MLflow", "warning", f"{shown} cannot be reached: {reason}", AWAY)


def _database(path: Path) -> Finding:
    """Migrations are known by the files of the installed MLflow, which is not loaded."""
    if not path.exists():
        return Finding("MLflow", "ok", f"{path}: not there yet, the first run makes it")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            (row,) = opened.execute("SELECT version_num FROM alembic_version").fetchall()
    except (sqlite3.Error, ValueError) as error:
        told = f"{path} is no database of MLflow ({error})"
        return Finding("MLflow", "warning", told, "move it away: the next `dflow sync --all` sends everything again")
    known, newest = _revisions()
    if row[0] in newest:
        return Finding("MLflow", "ok", f"{path} is of the installed version")
    if row[0] in known:
        return Finding(
            "MLflow", "warning", f"{path} is of an older version", "the next run migrates it; copy it before"
        )
    told = f"{path} was made by a newer MLflow than the one installed"
    return Finding("MLflow", "warning", told, "install that one, or move the database away")


def _revisions() -> tuple[set[str], set[str]]:
    """(all revisions that the installed MLflow knows, those that none comes after)."""
    spec = importlib.util.find_spec("mlflow")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    known: set[str] = set()
    before: set[str] = set()
    for folder in folders:
        for file in Path(folder).glob("store/db_migrations/versions/*.py"):
            for is_before, revision in REVISION.findall(file.read_text("utf-8")):
                (before if is_before else known).add(revision)
    return known, known - before
