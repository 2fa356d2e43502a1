"""The `dflow` command: a table of commands, each in a module of executor/commands that is loaded when it is called."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dsl.errors import DflowError, NotTrusted, PipelineError, UnknownName, did_you_mean, on_one_line, shortened
from dsl.files import USER_ERRNOS, clear_error
from dsl.finding import Finding
from dsl.imports import named_function
from executor.system.output import (
    FAILED,
    INTERRUPTED,
    STORE_OPTION,
    USAGE,
    output_errors_text,
    prepare_streams,
    print_lines,
)

PROXIES, LOCAL = ("http_proxy", "https_proxy", "all_proxy"), ("localhost", "127.0.0.1", "::1")
PROJECT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "init": "look at your data, and write a pipeline file for it",
    "run": "run what is stale in a pipeline",
    "tune": "try values of a training, stop the worse ones early, and write the best one's pipeline",
    "resume": "continue a run, or rerun a part of it",
    "plan": "show what would run, and why: of all nodes, of one, or as a graph",
    "accept": "keep an artifact valid across a harmless change of its code",
    "diff": "show what differs between two runs",
    "diagnose": "measure the usual causes of a draft's low tau, and name those found",
    "evaluate": "measure tau, speed-up and losslessness of a draft, without a pipeline file",
    "report": "write runs and their differences into one HTML file",
    "status": "show a run",
    "runs": "list the runs of a store, and name them",
    "logs": "show the output of a node",
    "doctor": "check this machine, or the store's artifacts, or whether both capture backends agree",
    "ops": "list the ops, describe one, or print the JSON schema of pipeline files",
    "gc": "remove what no kept run uses, or show disk use; without --delete, nothing goes",
    "rm": "remove a run",
    "push": "copy a run's artifacts to a shared directory or bucket",
    "pull": "fetch pushed artifacts",
    "sync": "send to MLflow what it is missing, of one run or of all",
    "ui": "serve the MLflow UI on the store",
    "serve": "serve a run's target with its draft in SGLang or vLLM, and send it one prompt",
}
MOVED = {
    "compare-backends": "doctor FILE --backends",
    "du": "gc --usage",
    "explain": "plan FILE --why NODE",
    "graph": "plan FILE --graph",
    "schema": "ops --schema",
    "tag": "runs --tag NAME RUN",
    "verify": "doctor --verify",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of the command line. Returns the exit code.

    0: success; 1: failure; 2: a mistake in usage or in a pipeline, an unknown name, an untrusted store; 130: Ctrl-C.
    """
    if arguments is None:
        gc.disable()  # the process ends with the command: a last search for cycles would be a third of a `plan`
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, extra = _split_for_engine(given)
    prepare_streams()
    _spare_local_servers()
    try:
        _check_directory()
        _check_not_shadowed()
        options = _options(own)
        options.extra, options.given = extra, own
        code: int = options.main(options)
    except KeyboardInterrupt:
        print_lines("dflow: stopped", error=True)
        return INTERRUPTED
    except PipelineError as error:
        print_lines("\n".join(map(_mistake_text, error.mistakes)), error=True)
        return USAGE
    except DflowError as error:
        print_lines(f"dflow: {error}", error=True)
        return USAGE if isinstance(error, NotTrusted | UnknownName) else FAILED
    except OSError as error:
        if error.errno not in USER_ERRNOS:
            raise
        print_lines(f"dflow: {clear_error(error, Path(error.filename or '.'))}", error=True)
        return FAILED
    finally:
        STORE_OPTION.clear()
    if output_errors_text():
        print_lines(f"dflow: {output_errors_text()}", error=True)
        return code or FAILED
    return code


def _mistake_text(mistake: Finding) -> str:
    """The text of a mistake: it starts with its place if it has one, else with "dflow:"."""
    return str(mistake) if mistake.position or mistake.path else f"dflow: {mistake}"


def _split_for_engine(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into dflow's own and the engine's, which follow "--" of `dflow serve`."""
    end = arguments.index("--") if arguments[:1] == ["serve"] and "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _check_directory() -> None:
    """Check that the working directory exists, since relative paths need it. Raises DflowError."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise DflowError("the working directory was removed; change to an existing one (`cd`)") from None


def _spare_local_servers() -> None:
    """Exclude this machine's own servers from proxies, for this process, its children and libraries such as MLflow."""
    if not any(os.environ.get(name) for name in (*PROXIES, *map(str.upper, PROXIES))):
        return
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = ",".join(dict.fromkeys([*filter(None, given.split(",")), *LOCAL]))


def _check_not_shadowed() -> None:
    """Check that no other package called `ops` comes before dflow's own. Raises DflowError."""
    found = importlib.util.find_spec("ops")
    origin = found.origin if found is not None else None
    if origin is None or Path(origin).resolve() != PROJECT / "ops" / "__init__.py":
        raise DflowError(
            f'Python imports the package "ops" from {origin}, not from dflow in {PROJECT}; '
            "rename it, or leave the folder that holds it"
        )


def _options(given: list[str]) -> argparse.Namespace:
    """Parse the command line; only the module of the given command is imported."""
    name = given[0] if given else ""
    if name not in COMMANDS:
        _show_commands(given)
    # argparse makes a formatter for every option, and the imports for the terminal's width take milliseconds.
    fixed = partial(argparse.HelpFormatter, width=78)
    is_help = not {"-h", "--help"}.isdisjoint(given)
    formatter = argparse.HelpFormatter if is_help else fixed
    parser = _Parser(prog=f"dflow {name}", description=COMMANDS[name], formatter_class=formatter)
    module = f"executor.commands.{name}"
    add_arguments: Callable[[argparse.ArgumentParser], None] = named_function(f"{module}:add_arguments")
    main: Callable[[argparse.Namespace], int] = named_function(f"{module}:main")
    add_arguments(parser)
    parser.set_defaults(main=main)
    # A RUN may follow options, but what follows `--` is no option: parse_intermixed_args does not know it.
    parse = parser.parse_args if "--" in given else parser.parse_intermixed_args
    return parse(given[1:])


def _show_commands(given: list[str]) -> NoReturn:
    """Print the list of commands, for `dflow` without a command, and exit."""
    parser = _Parser(prog="dflow", description="Pipelines that train DFlash drafts: cached, resumable, tracked.")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help)
    if given and given[0] in MOVED:
        parser.exit(USAGE, f"dflow: `dflow {given[0]}` is now `dflow {MOVED[given[0]]}`\n")
    if given and not given[0].startswith("-"):
        hint = did_you_mean(given[0], list(COMMANDS)) or "run `dflow` to list them"
        parser.error(f'there is no command "{on_one_line(shortened(given[0]))}" ({hint})')
    parser.parse_args(given)
    parser.print_help()
    parser.exit(USAGE)


class _Once(argparse.Action):
    """Stores a value. An option that is given again would silently replace the first one: that is a mistake."""

    _given: object = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if self.option_strings and self._given is not None:
            raise argparse.ArgumentError(self, f"given twice, as {self._given} and as {values}; give it once")
        self._given = values
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like dflow's other messages, below the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"dflow: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
