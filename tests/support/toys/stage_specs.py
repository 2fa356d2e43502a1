"""A StageSpec for tests of one side of a stage."""

from pathlib import Path
from typing import Any

from executor.launchers.stage_contract import StageSpec


def stage_spec(here: Path, **values: Any) -> StageSpec:
    """A StageSpec whose fields, if not given, are the folder `here` or empty."""
    paths = ("sources", "folder", "out_dir", "work_dir", "results", "events", "figures")
    plain = {"node": "n", "node_json": {}, "search_path": (), "sources_digest": "", "artifacts": {}, "lease_id": ""}
    numbers = {"token": 1, "attempt": 1, "started_before": False, "sp_degree": 2}
    return StageSpec(**{**dict.fromkeys(paths, here), **plain, **numbers, "device": "auto", **values})
