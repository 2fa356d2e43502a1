"""The `dflow` command: a table of commands, each in a module of executor/commands that is loaded when it is called."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dsl.errors import DflowError, Mistake, PipelineError, did_you_mean, on_one_line, shortened
from executor.system.exits import FAILED, INTERRUPTED, USAGE
from executor.system.os_errors import TOLD, clear_error
from executor.system.output import prepare_streams, print_lines, unheard

PROJECT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "init": "look at your data, and write a pipeline file for it",
    "run": "run what is stale in a pipeline",
    "resume": "go on with a run, or run a part of it anew",
    "plan": "show what would run, and why",
    "graph": "draw the nodes of a pipeline and what reads from what",
    "explain": "say why a node would run, or where its artifact came from",
    "accept": "keep an artifact valid over a change of its code that does no harm",
    "diff": "show what differs between two runs",
    "diagnose": "name what keeps a draft's tau low, by measuring the usual causes",
    "report": "write what runs did, and how they differ, into one HTML file",
    "status": "show a run",
    "runs": "list the runs of a store",
    "logs": "print what a node prints",
    "agent": "lend this host to stages that run on several",
    "doctor": "check what works on this machine, and say what to install for what does not",
    "ops": "list the ops, or describe one",
    "schema": "print the JSON schema of pipeline files, for editors",
    "verify": "find artifacts that were damaged, and take them out of use",
    "gc": "remove what no kept run uses; show it unless --delete is given",
    "rm": "remove a run",
    "tag": "name a run, which keeps what it uses",
    "du": "show what takes space in the store",
    "push": "copy a run's artifacts to a directory or a bucket that a team shares",
    "pull": "fetch artifacts that somebody pushed",
    "sync": "send to MLflow what it lacks, of one run or of all",
    "ui": "serve the MLflow UI on the store",
    "serve": "serve a run's target with its draft in SGLang, and ask it one prompt",
    "compare-backends": "capture a few samples with transformers and with SGLang, and compare",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. Exit code 0 where all is well, 1 after a failure, 2 for a mistake in usage or in a pipeline.

    130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, extra = _for_sglang(given)
    prepare_streams()
    try:
        _check_directory()
        _check_not_shadowed()
        options = _options(own)
        options.extra = extra
        code: int = options.main(options)
    except KeyboardInterrupt:
        print_lines("dflow: stopped", error=True)
        return INTERRUPTED
    except PipelineError as error:
        print_lines("\n".join(map(_told, error.mistakes)), error=True)
        return USAGE
    except DflowError as error:
        print_lines(f"dflow: {error}", error=True)
        return FAILED
    except OSError as error:
        if error.errno not in TOLD:
            raise
        print_lines(f"dflow: {clear_error(error, Path(error.filename or '.'))}", error=True)
        return FAILED
    if unheard():
        print_lines(f"dflow: {unheard()}", error=True)
        return code or FAILED
    return code


def _told(mistake: Mistake) -> str:
    """A mistake in a file or in a value begins with its place, all others with who speaks."""
    return str(mistake) if mistake.position or mistake.path else f"dflow: {mistake}"


def _for_sglang(arguments: list[str]) -> tuple[list[str], list[str]]:
    """dflow's own arguments, and those behind "--" of `dflow serve`, which are SGLang's."""
    end = arguments.index("--") if arguments[:1] == ["serve"] and "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _check_directory() -> None:
    """Raises DflowError where the working directory is gone: no path of the user's means anything there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise DflowError("the working directory was removed; change to one that is there (`cd`)") from None


def _check_not_shadowed() -> None:
    """Raises DflowError where another package called `ops` comes before dflow's own."""
    found = importlib.util.find_spec("ops")
    origin = found.origin if found is not None else None
    if origin is None or Path(origin).resolve() != PROJECT / "ops" / "__init__.py":
        raise DflowError(
            f'the package "ops" that Python finds is {origin}, not that of dflow in {PROJECT}; '
            "rename it, or leave the folder that holds it"
        )


def _options(given: list[str]) -> argparse.Namespace:
    """Only the command that is called is loaded, and takes arguments."""
    name = given[0] if given else ""
    if name not in COMMANDS:
        _tell_commands(given)
    parser = _Parser(prog=f"dflow {name}", description=COMMANDS[name])
    module = importlib.import_module(f"executor.commands.{name.replace('-', '_')}")
    module.add_arguments(parser)
    parser.set_defaults(main=module.main)
    return parser.parse_args(given[1:])


def _tell_commands(given: list[str]) -> NoReturn:
    """All that `dflow` itself takes is the request for help."""
    parser = _Parser(prog="dflow", description="Pipelines that train DFlash drafts: cached, resumable, tracked.")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help)
    if given and not given[0].startswith("-"):
        hint = did_you_mean(given[0], list(COMMANDS)) or "`dflow` alone lists them"
        parser.error(f'there is no command "{on_one_line(shortened(given[0]))}" ({hint})')
    parser.parse_args(given)
    parser.print_help()
    parser.exit(USAGE)


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as dflow tells all others, below the usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"dflow: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
