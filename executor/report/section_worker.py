"""The process in which ops show their artifacts, see op_sections.py.

    python -m executor.report.section_worker ASKED.json ANSWERS.jsonl SECONDS

Each answer is {"at", "sections"}, or {"at", "failed": why} where the op is not there any more, and is on disk
before the next op is asked. Nothing else is caught: the process ends, and whoever waits for it knows at which op; an op
that takes longer than SECONDS ends it by SIGALRM.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DflowError
from dsl.hooks import hook
from dsl.op_table import load_op
from executor.report.op_sections import section_to_json
from executor.store.run_measurements import with_own_files
from executor.system.jsonlines import append_line
from ops.lib.report_sections import Section


def main() -> int:
    asked, answers = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    for at, one in enumerate(asked):
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))
        append_line(answers, {"at": at, **_answer(one)})
    return 0


def _answer(one: Mapping[str, Any]) -> dict[str, Any]:
    try:
        show = hook(load_op(one["op"], tuple(map(Path, one["op_files"]))), "report")
        if show is None:
            return {"sections": []}
        folder = with_own_files(
            {name: Path(path) for name, path in one["own"].items()}, Path(one["folder"]), Path(one["view"])
        )
        sections = list(show(folder))
    except DflowError as error:
        return {"failed": str(error)}
    for section in sections:
        if not isinstance(section, Section):
            raise TypeError(f"expected a list of ops.lib.report_sections.Section, got {type(section).__name__} in it")
    return {"sections": [section_to_json(section, folder) for section in sections]}


if __name__ == "__main__":
    sys.exit(main())
