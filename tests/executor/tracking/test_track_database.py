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


def opened(store, cache, program=OPEN):
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", program, str(store)]
    return subprocess.Popen(command, env=environment, cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def test_a_database_whose_making_was_killed_is_made_anew_and_by_one_of_several_clients_at_once(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    killed = opened(store, tmp_path, KILLED + OPEN)
    assert (killed.communicate(timeout=120)[0], killed.returncode) == ("", -signal.SIGKILL)
    assert not (store / "mlflow.db").exists()
    with closing(sqlite3.connect(store / ".mlflow.db.new")) as half:
        assert half.execute("SELECT name FROM sqlite_master WHERE name = 'experiments'").fetchall() != []
    processes = [opened(store, tmp_path) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["1\n"] * 2
    assert sorted(path.name for path in store.iterdir()) == ["mlflow.db", "mlflow.lock"]


def test_the_next_store_gets_a_copy_without_migrations_and_with_its_own_place(tmp_path):
    tables = {}
    for name, program in (("first", OPEN), ("second", KILLED + OPEN)):  # the second migration would be killed
        (tmp_path / name).mkdir()
        said, _ = opened(tmp_path / name, tmp_path / "cache", program).communicate(timeout=120)
        assert said == "1\n"
        with closing(sqlite3.connect(tmp_path / name / "mlflow.db")) as database:
            tables[name] = database.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
            assert database.execute("SELECT artifact_location FROM experiments").fetchall() == [
                ((tmp_path / name / "mlartifacts" / "0").as_uri(),)
            ]
    assert tables["first"] == tables["second"]
    (kept,) = (tmp_path / "cache" / "dflow" / "mlflow").iterdir()
    assert kept.suffix == ".db"
