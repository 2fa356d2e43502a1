"""What is shown of a stage's log is bounded, and no terminal obeys it."""

from executor.system.output import TAIL_BYTES, TAIL_LENGTH, TAIL_LINES, last_lines


def test_of_a_log_without_ends_of_lines_its_end_is_shown(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 3 * TAIL_BYTES + b"\nValueError: a bug\n\n")
    cut, last = last_lines(log, 0)
    assert (cut, last) == (f"... {'x' * TAIL_LENGTH} ...", "ValueError: a bug")


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
    assert last_lines(log, start) == tuple(str(number) for number in range(100 - TAIL_LINES, 100))
