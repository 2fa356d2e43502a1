"""What a report says of the causes of a difference."""

from __future__ import annotations

from typing import Any

import pytest

from executor.explain import ValueChange
from executor.report.differences import told_of
from executor.run_diff import NodeDiff


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("setting", "x", 8, 1), "nothing that the key sees differs; also set otherwise, outside the key: x"),
        (("setting", "x", "@a", "@b"), "what differs: x"),
        (("setting", "x", ["@a"], ["@b"]), "what differs: x"),
        (("value", "x", 1, 2), "what differs: x"),
        (("config", "x", 1, 2), "what differs: x"),
    ],
)
def test_a_report_names_as_a_cause_what_may_have_made_another_artifact(
    change: tuple[str, str, Any, Any], expected: str
) -> None:
    kind, _, old, new = change
    diff = NodeDiff("eval", "both", ("1" * 64, "2" * 64), values=(ValueChange(kind, "x", old, new),))
    assert [f"eval: another artifact ({'1' * 12}, {'2' * 12}); {expected}"] == list(told_of(diff))
