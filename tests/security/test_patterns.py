"""A regular expression of the user's that backtracks on a text of somebody else."""

from __future__ import annotations

import pytest

from dsl.errors import DataError
from ops.finetune_vlm import measuring
from ops.finetune_vlm.measuring import Metric, measurable
from ops.finetune_vlm.op import search
from ops.lib.data.limited_process import LimitedProcess


class Reader:
    records = ({"id": "fine", "label": "ab"}, {"id": "e\nvil", "label": "a" * 50})


def test_a_pattern_that_backtracks_fails_with_the_sample(monkeypatch):
    process = LimitedProcess(search, seconds=0.2)
    monkeypatch.setattr(measuring, "limited", lambda function: process)
    metric = Metric("pattern", "(?:(a+)+)+b")
    assert metric.right("aab", "xaab") and not metric.right("aab", "ab")
    with pytest.raises(DataError, match=r'^sample "e\\nvil": searching pattern .* needs more than 0.2 s of CPU time'):
        measurable(Reader(), metric, None)
