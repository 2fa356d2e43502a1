"""What the report shows of a target that was trained: the same as of one that was loaded."""

from __future__ import annotations

from ops.load_target.report import report as report
