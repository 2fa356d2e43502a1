"""What a kill left half written does not count, and the whole lines are not written anew."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest

from ops.evaluate.statistics import BatchTime
from ops.evaluate.turns import BatchResult
from ops.evaluate.turns import Journal as Decoded
from ops.regenerate_answers.shards import Answer
from ops.regenerate_answers.shards import Journal as Answers

CASES = {
    "answers": (Answers, {("a", 0): Answer("yes", "stop", 2)}, lambda journal: journal.answers),
    "decoded": (
        lambda path: Decoded(path, []),
        BatchResult((), BatchTime(1.0, 2, 1.0, 2), {}),
        lambda journal: journal.batches,
    ),
}


@contextmanager
def full_disk():
    """No file can be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("case", CASES)
def test_half_a_line_is_left_out_even_where_nothing_can_be_written(tmp_path, case):
    path, (opened, batch, kept) = tmp_path / "journal", CASES[case]
    opened(path).add(batch)
    whole, expected = path.read_bytes(), kept(opened(path))
    with path.open("ab") as file:
        file.write(b'{"half": ')
    with full_disk():
        assert expected == kept(opened(path))
    assert path.read_bytes().startswith(whole)
    opened(path).add(batch)
    assert path.read_bytes().count(b"\n") >= 2
    again = kept(opened(path))
    assert (expected if isinstance(again, dict) else [batch, batch]) == again
