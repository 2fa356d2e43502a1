"""`dflow logs`: show the output of a node, also while it runs."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections import deque
from pathlib import Path

from dsl.errors import DflowError, UnknownName, did_you_mean
from dsl.files import open_plain
from executor.commands.arguments import add_run, add_store, count, open_store
from executor.records.events import EventReader
from executor.records.run_list import running_runs
from executor.records.run_record import Record, find_record, is_begun, newest_that_ran
from executor.results.run_table import Live
from executor.store.artifact_store import Store
from executor.system.output import OK, print_lines, printable, write_on
from executor.system.symlinks import is_plain

POLL_S = 0.2
SHOWN_EACH_S = 2.0  # metrics
CHUNK = 65536
OVER = ("done", "failed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("node", metavar="NODE")
    parser.add_argument("-f", dest="follow", action="store_true", help="follow the output until the node has ended")
    parser.add_argument("-n", dest="lines", type=count, metavar="LINES", help="only the last LINES lines; default: all")
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    store = open_store(options)
    record = find_record(store.records, options.run)
    if options.node not in record.state.nodes:
        nodes = ", ".join(record.state.nodes)
        newest = _newest_log(store, options.node)
        hint = newest or did_you_mean(options.node, list(record.state.nodes))
        raise UnknownName(f'run {record.run} has no node "{options.node}"{hint and f"; {hint}"}; its nodes: {nodes}')
    log = _Log(record.log_path(options.node))
    waits = options.follow and record.state.nodes[options.node].state not in OVER
    if options.run is None and (log.exists or waits):
        print_lines(f"{options.node} in run {record.run}, the latest:", error=True)
    log.print_last(options.lines)
    if options.follow:
        _follow(record, options.node, log)
    if log.exists:
        _print_reached(record, options.node)
    else:
        _print_source(store, record, options.node, options.lines)
    return OK


def _follow(record: Record, node_id: str, log: _Log) -> None:
    """Print a node's output across attempts, with its progress and newest metrics, until the node has ended.

    It has ended when it is done, has failed for good, or no executor works on it any more.
    """
    reader, live, shown_at = EventReader(record.events_path), Live(), 0.0
    is_new = False
    while True:
        # The state is read before the log, so that the last lines before the end are printed too.
        is_alive = record.is_alive()
        record.reload()
        is_over = record.state.nodes[node_id].state in OVER or not is_alive
        log.print_more()
        for event in reader.read():
            is_new = (event.node == node_id and live.add(event)) or is_new
        if is_over:
            return
        if is_new and live.done is not None and time.monotonic() - shown_at >= SHOWN_EACH_S:
            print_lines(str(live))
            is_new, shown_at = False, time.monotonic()
        time.sleep(POLL_S)


def _print_reached(record: Record, node_id: str) -> None:
    """Print how far the node is and its newest metrics, apart from the log's own text; nothing without progress."""
    live = Live()
    for event in EventReader(record.events_path).read():
        if event.node == node_id:
            live.add(event)
    if live.done is not None:
        print_lines(live.reached_with_metrics, error=True)


def _print_source(store: Store, record: Record, node_id: str, lines: int | None) -> None:
    """Print the log of the run that computed a cached node. Raises DflowError without such a log."""
    node = record.state.nodes[node_id]
    if node.source_run is None:
        running = [each.run for each in running_runs(store.records) if _runs(each, node_id)]
        hint = f"it runs in run {running[0]}: dflow logs {running[0]} {node_id}" if running else ""
        hint = hint or _newest_log(store, node_id)
        raise DflowError(
            f"{node_id} printed nothing in run {record.run}: it did not run there, its state is {node.state}"
            f"{hint and f'; {hint}'}"
        )
    folder = store.records / node.source_run
    if not is_begun(folder):
        raise DflowError(f"{node_id} was computed by run {node.source_run}, whose record and log are gone")
    source = Record.load(folder)
    producers = [
        name
        for name, producer in source.state.nodes.items()
        if node.digest is not None and producer.digest == node.digest
    ]
    producer = node_id if node_id in producers or not producers else producers[0]
    log = _Log(source.log_path(producer))
    if not log.exists:
        raise DflowError(f"{node_id} was computed by run {source.run}, whose log of it is gone")
    print_lines(f"{node_id} was computed by run {source.run}; this is its log:", error=True)
    log.print_last(lines)
    _print_reached(source, producer)


def _newest_log(store: Store, node_id: str) -> str:
    """The command that shows the newest run in which a node of this name printed something; "" without one."""
    for record in newest_that_ran(store.records):
        if node_id in record.state.nodes and _Log(record.log_path(node_id)).exists:
            return f"its newest log is of run {record.run}: dflow logs {record.run} {node_id}"
    return ""


def _runs(record: Record, node_id: str) -> bool:
    return node_id in record.state.nodes and record.state.nodes[node_id].state == "running"


class _Log:
    """A reader that prints a growing log file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._on_terminal = sys.stdout.isatty()
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")  # 0x9b by itself is a control too

    @property
    def exists(self) -> bool:
        return is_plain(self._path, self._path.parent.parent)

    def print_last(self, lines: int | None) -> None:
        """Print the last lines of the log file; None for all."""
        if lines is None:
            self.print_more()
        elif self.exists:
            with open_plain(self._path) as file:
                for line in deque(file, maxlen=lines):
                    self._write(line)
                self._offset = file.tell()

    def print_more(self) -> None:
        """Print the text that was appended to the log since the last call."""
        if not self.exists:
            return
        with open_plain(self._path) as file:
            file.seek(self._offset)
            while data := file.read(CHUNK):
                self._write(data)
            self._offset = file.tell()

    def _write(self, data: bytes) -> None:
        """Write log output as it is, or without control sequences if the output is a terminal.

        On a terminal a carriage return ends the line, so that each state of a progress bar is a line of its own.
        """
        if self._on_terminal:
            text = self._decoder.decode(data).replace("\r\n", "\n").replace("\r", "\n")
            data = printable(text).encode()
        write_on(sys.stdout.buffer, data)
