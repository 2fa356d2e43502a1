"""The database of a store, which the first client makes."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

from toy_ops import PROJECT

OPEN = """
import sys
from pathlib import Path
from executor.tracking.mlflow_client import open_client, tracking_uri

store = Path(sys.argv[1])
print(len(open_client(store, tracking_uri(store, None, store)).search_experiments()))
"""
# MLflow makes the tables of its first days, and then alters them revision by revision: one of these is the last here.
KILLED = """
import os, signal
from sqlalchemy import event
from sqlalchemy.engine import Engine

revisions = []

@event.listens_for(Engine, "before_cursor_execute")
def kill(connection, cursor, statement, *rest):
    if statement.startswith("UPDATE alembic_version"):
        revisions.append(statement)
        if len(revisions) == 20:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def opened(store, program=OPEN):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(store)],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}, cwd=PROJECT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_database_whose_making_was_killed_is_made_anew_and_by_one_of_several_clients_at_once(tmp_path):
    killed = opened(tmp_path, KILLED + OPEN)
    assert (killed.communicate(timeout=120)[0], killed.returncode) == ("", -signal.SIGKILL)
    assert not (tmp_path / "mlflow.db").exists()
    with closing(sqlite3.connect(tmp_path / ".mlflow.db.new")) as half:
        assert half.execute("SELECT name FROM sqlite_master WHERE name = 'experiments'").fetchall() != []
    processes = [opened(tmp_path) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["1\n"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "mlflow.lock"]
