"""`dflow serve`: serve a run's target with its draft in SGLang or vLLM, and send it one prompt."""

from __future__ import annotations

import argparse
import signal
from functools import partial

from dsl.errors import ConfigError
from executor.commands.arguments import add_address, add_run, add_store, add_trust, check_store, count, open_store
from executor.model_tools.engines import ENGINES
from executor.model_tools.serve import ServeOptions, serve_run
from executor.model_tools.served import DEFAULT_RUN, find_draft_run
from executor.system.output import FAILED, OK, print_lines
from ops.artifacts import CheckedDraft, Draft
from ops.tools.serve.measure import CONCURRENCIES, LoadSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, DEFAULT_RUN)
    parser.usage = (
        "dflow serve [RUN] [--engine {sglang,vllm}] [--check] [--node NODE] [--block-size N] [--host HOST] "
        "[--port PORT] [--measure [--url URL] [--plain-url URL] [--stream] [--concurrency N ...] [--max-tokens N]] "
        "[-- ARGUMENTS OF THE ENGINE]"
    )
    parser.add_argument("--engine", choices=tuple(ENGINES), default="sglang", help="the server; default: sglang")
    parser.add_argument(
        "--check", action="store_true", help="stop after the prompt; exit code 1 where it was not answered"
    )
    parser.add_argument("--node", metavar="NODE", help="the export node, where a run has several")
    parser.add_argument(
        "--block-size",
        type=partial(count, least=2),
        metavar="N",
        help="tokens that a step verifies, fewer than the draft was trained with; default: as trained",
    )
    add_address(parser, port=30000)
    parser.add_argument(
        "--measure", action="store_true", help="measure the server under load with held-out prompts, and stop"
    )
    parser.add_argument("--url", metavar="URL", help="with --measure: a server that runs already, instead of a new one")
    parser.add_argument(
        "--plain-url", metavar="URL", help="with --measure: a server of the target without the draft, to compare with"
    )
    parser.add_argument(
        "--stream", action="store_true", help="with --measure: stream the answers, and time their first tokens"
    )
    parser.add_argument(
        "--concurrency",
        type=partial(count, least=1),
        nargs="+",
        metavar="N",
        default=list(CONCURRENCIES),
        help=f"with --measure: requests in flight; default: {' '.join(map(str, CONCURRENCIES))}",
    )
    parser.add_argument(
        "--max-tokens", type=partial(count, least=2), metavar="N", default=128, help="with --measure: of an answer"
    )
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    """Run `dflow serve`. Exit code 0 where the prompt was answered with the draft's help, 1 otherwise.

    Raises ConfigError for an option of --measure without it, and with --url for one of a new server.
    """
    given = {"--url": options.url, "--plain-url": options.plain_url, "--stream": options.stream or None}
    if not options.measure and (alone := [name for name, value in given.items() if value is not None]):
        raise ConfigError(f"{', '.join(alone)}: only with --measure; add it, or leave this out")
    of_a_new_server = {
        "--block-size": options.block_size,
        "--check": options.check,
        "arguments after --": options.extra,
    }
    if options.url is not None and (useless := [name for name, value in of_a_new_server.items() if value]):
        raise ConfigError(f"{', '.join(useless)}: only of a new server, and that at --url runs already; leave this out")
    store = open_store(options)
    check_store(options, store.path)
    record, note = find_draft_run(store.records, options.run, options.node, (Draft, CheckedDraft))
    if note:
        print_lines(note, error=True)
    request = ServeOptions(
        store=store.path,
        run=record.run,
        node=options.node,
        engine=options.engine,
        host=options.host,
        port=options.port,
        check=options.check,
        extra=options.extra,
        block_size=options.block_size,
        load=load_settings(options) if options.measure else None,
        url=options.url,
        plain_url=options.plain_url,
    )
    # A shell starts background jobs with this signal ignored, and Python keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        serve_run(request)
    except KeyboardInterrupt:
        print_lines("dflow: interrupted; the server was stopped", error=True)
        return FAILED
    return OK


def load_settings(options: argparse.Namespace) -> LoadSettings:
    return LoadSettings(
        concurrencies=sorted(set(options.concurrency)), max_tokens=options.max_tokens, stream=options.stream
    )
