"""Report sections of a trained target: the same as those of a loaded one."""

from __future__ import annotations

from ops.load_target.report import report as report
