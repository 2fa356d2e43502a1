"""What is shown of a stage's log is bounded, and no terminal obeys it."""

import pytest

from executor.launchers.log_tail import BLOCK_BYTES, LENGTH, LINES, TAIL_BYTES, Notes, last_lines


def test_of_a_log_without_ends_of_lines_its_end_is_shown(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 3 * TAIL_BYTES + b"\nValueError: a bug\n\n")
    cut, last = last_lines(log, 0)
    assert (cut, last) == (f"... {'x' * LENGTH} ...", "ValueError: a bug")


def test_the_last_lines_are_those_of_this_attempt_with_control_characters_written_out(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"earlier\n")
    start = log.stat().st_size
    assert last_lines(log, start) == ()
    with log.open("ab") as file:
        file.write(b"\x1b[2Jcleared\x00\ttab\xff\r\n  indented\n\n")
    assert last_lines(log, start) == ("\\x1b[2Jcleared\\x00\ttab�", "  indented")
    with log.open("ab") as file:
        file.writelines(b"%d\n" % number for number in range(100))
    assert last_lines(log, start) == tuple(str(number) for number in range(100 - LINES, 100))


def test_notes_are_told_once_when_their_lines_have_ended(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"dflow: of an earlier attempt\n")
    notes = Notes(log, log.stat().st_size)
    with log.open("ab", buffering=0) as file:
        file.write(b"other\ndflow: first\ndflow: sec")
        assert notes.read() == ["first"]
        file.write(b"ond \x1b[2J\n30 %\rdflow: third\r\n")
        assert notes.read() == ["second \\x1b[2J", "third"]
        assert notes.read() == []


@pytest.mark.parametrize("length", [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_no_line_is_too_long_to_be_passed_over(tmp_path, length):
    log = tmp_path / "a.log"
    notes = Notes(log, 0)
    log.write_bytes(b"x" * length)
    assert notes.read() == []
    with log.open("ab") as file:
        file.write(b"dflow: still the long line\ndflow: a note\n")
    assert notes.read() == ["a note"]
