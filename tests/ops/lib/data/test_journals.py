"""What a kill left half written is cut off without the whole lines being written anew."""

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
    "answers": (Answers, {("a", 0): Answer("yes", "stop", 2)}),
    "decoded": (lambda path: Decoded(path, []), BatchResult((), BatchTime(1.0, 2, 1.0, 2), {})),
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
def test_half_a_line_is_cut_off_even_where_nothing_can_be_written(tmp_path, case):
    path, (opened, batch) = tmp_path / "journal", CASES[case]
    opened(path).add(batch)
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"half": ')
    with full_disk():
        opened(path)
    assert whole == path.read_bytes()
