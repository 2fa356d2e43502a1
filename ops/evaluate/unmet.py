"""Missing requirements of an evaluation, before a run's first stage."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import DataError
from ops.evaluate.benchmark_rows import check_benchmark
from ops.evaluate.op import Evaluate


def unmet(config: Evaluate) -> dict[str, str]:
    """Mistakes in the benchmark file, which would otherwise be found late. A missing file is reported elsewhere."""
    if config.benchmark is None or not Path(config.benchmark).exists():
        return {}
    try:
        check_benchmark(Path(config.benchmark))
    except DataError as error:
        return {"benchmark": str(error)}
    return {}
