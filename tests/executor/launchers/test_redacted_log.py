"""The pipe between a stage with secrets and its log: nothing hidden gets through, and nothing makes it hang."""

import base64
import os
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.launchers import redacted_log
from executor.launchers.redacted_log import RedactedLog


def log_of(folder, secrets, *pieces):
    log = folder / "a.log"
    log.write_bytes(b"")
    copy = RedactedLog(folder / "pipe", log, secrets)
    with copy.pipe.open("wb", buffering=0) as pipe:
        for piece in pieces:
            pipe.write(piece)
    copy.close()
    return log.read_bytes()


@settings(max_examples=100)
@given(st.lists(st.sampled_from([b"s3cr3t-value", b"s3cr3t", b"-value", b"xx", b"\n", b"s"]), max_size=30), st.data())
def test_no_secret_gets_through_wherever_lines_and_writes_end(tmp_path_factory, words, data):
    text = b"".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(redacted_log, "LONGEST", 16)
        shown = log_of(tmp_path_factory.mktemp("log"), ["s3cr3t-value"], *pieces)
    assert shown == re.sub(b"\n*".join(re.escape(bytes([byte])) for byte in b"s3cr3t-value"), b"***", text)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"a s3cr3t-\x1b[31mvalue b\n"],
        [b"a s3cr3t-", b"\x1b[", b"1;31mva", b"\x1b[0mlue b\n"],
        [b"a s3cr3t-v\r\nalue b\n"],
        [b"a s3", b"cr3t-v\n", b"alu\ne b\n"],
        [b"a s\n", b"\n", b"3cr3t-value b\n"],
    ],
)
def test_a_secret_that_colours_or_line_ends_split_is_hidden(tmp_path, pieces):
    assert log_of(tmp_path, ["s3cr3t-value"], *pieces) == b"a *** b\n"


def test_a_secret_in_base64_on_several_lines_is_hidden(tmp_path):
    lines = base64.encodebytes(bytes(range(65, 91)) * 4)  # of 76 characters
    assert log_of(tmp_path, [(bytes(range(65, 91)) * 4).decode()], lines) == b"***\n"


def test_a_secret_of_several_lines_is_hidden_however_it_is_written(tmp_path):
    shown = log_of(tmp_path, ["line one\nline two"], b"a\nline ", b"one\nli", b"ne two\nb\n")
    assert shown == b"a\n***\nb\n"


def test_much_output_without_ends_of_lines_gets_through(tmp_path):
    shown = log_of(tmp_path, ["s3cr3t-value"], *[b"x" * 65536] * 200, b"s3cr3t-value")
    assert shown == b"x" * 65536 * 200 + b"***"


def test_where_the_log_cannot_be_written_the_stage_learns_of_it_and_nothing_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("executor.launchers.redacted_log.appended", lambda _log: open("/dev/full", "ab"))  # noqa: PTH123, SIM115
    copy = RedactedLog(tmp_path / "pipe", tmp_path / "a.log", ["s3cr3t-value"])
    learned = threading.Event()

    def print_for_ever():
        with copy.pipe.open("wb", buffering=0) as pipe:
            try:
                while True:
                    pipe.write(b"x\n" * 10000)
            except BrokenPipeError:
                learned.set()

    threading.Thread(target=print_for_ever, daemon=True).start()
    assert learned.wait(120)
    copy.close()
    assert copy.error is not None
    assert os.strerror(copy.error.errno) == "No space left on device"
