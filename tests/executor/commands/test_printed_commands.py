"""Commands that dflow prints can be typed as they stand: they are parsed, and name the store that they are about."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
from toy_ops import ONE_NODE, PROJECT, Toy

from executor.cli import COMMANDS
from executor.system.output import ON_A_STORE, STORE_OPTION, as_typed, name_store

ROOMS = ("dsl", "executor", "ops", "pipelines")
# Sentences about a command, which nobody takes for one.
SENTENCES = (
    "evaluate one of them",
    "serve [RUN] [--engine {sglang",
    "serve and the model card do",
    "serve asks it by its host and port",
    "serve refuse others",
    "serve sets itself:",
)


def parser_of(command: str) -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise ValueError(f"dflow {command}: {message}")

    parser = Parser(prog=f"dflow {command}", exit_on_error=False)
    import_module(f"executor.commands.{command.replace('-', '_')}").add_arguments(parser)
    return parser


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every text of a module but its docstrings, with `x` for what is put in at run time."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in {*docstrings, *inner}:
            yield node.lineno, node.value


def printed_commands() -> Iterator[tuple[str, str]]:
    """The place and the words of each command: to its backtick, or to the end of a part of a sentence."""
    command = re.compile(rf"(`?)\bdflow ({'|'.join(sorted(COMMANDS, reverse=True))})(?![\w-])([^`;,)\n#]*)")
    for room in ROOMS:
        for file in sorted((PROJECT / room).rglob("*.py")):
            for line, text in texts(ast.parse(file.read_text())):
                for _tick, name, rest in command.findall(text):
                    words = re.split(r"\. |\.$|: | \(|, | - ", f"{name}{rest}")[0].strip().rstrip(".")
                    yield f"{file.relative_to(PROJECT)}:{line}", words


PRINTED = [each for each in printed_commands() if each[1] not in SENTENCES]


def test_every_command_that_a_text_names_is_parsed_by_that_command():
    assert len(PRINTED) > 60
    assert not set(SENTENCES) - {words for _place, words in printed_commands()}
    wrong = []
    for place, words in PRINTED:
        name, *arguments = shlex.split(re.sub(r"\bN\b", "8", words))
        try:
            if arguments:  # a name without arguments is that of a command
                parser_of(name).parse_intermixed_args(arguments)
        except (ValueError, argparse.ArgumentError) as error:
            wrong.append(f"{place}: dflow {words}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_commands_that_get_a_store_are_those_that_take_one():
    takes = {name for name in COMMANDS if "--store" in parser_of(name).format_help()}
    assert takes == set(ON_A_STORE)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name_store(tmp_path / "my runs" / "smoke", tmp_path / "runs")
    yield
    STORE_OPTION.clear()


def test_a_command_names_the_store_that_it_is_about_where_it_would_find_another(elsewhere):
    named = "--store 'my runs/smoke'"
    assert f"resume with: dflow resume {named} 1234 --from b; or `dflow gc {named} --delete`" == (
        as_typed("resume with: dflow resume 1234 --from b; or `dflow gc --delete`")
    )
    assert "dflow status --store other" == as_typed("dflow status --store other")
    assert "dflow run FILE --store DIR" == as_typed("dflow run FILE --store DIR")
    for text in ("the ops: dflow ops", "what dflow serve sets itself", "dflow evaluate one of them"):
        assert text == as_typed(text)


def test_every_printed_command_is_still_parsed_with_its_store(elsewhere):
    for _place, words in PRINTED:
        name, *arguments = shlex.split(as_typed(f"dflow {words}").replace(" N", " 8"))[1:]
        if arguments[:1] == ["--store"] and len(arguments) > 2:
            assert "my runs/smoke" == parser_of(name).parse_intermixed_args(arguments).store


def test_the_store_that_is_found_anyway_is_not_named(elsewhere, tmp_path):
    name_store(tmp_path / "runs", tmp_path / "runs")
    assert "dflow resume 1234" == as_typed("dflow resume 1234")


def test_what_a_failed_run_prints_can_be_typed_and_continues_it(tmp_path):
    failing = ONE_NODE.replace('text = "hello"', 'source = "text.txt"')
    toy = Toy(tmp_path, failing)
    (tmp_path / "text.txt").write_bytes(b"\xff")
    toy.store = tmp_path / "other store"
    failed = toy.dflow("run", toy.file.name, "-s", "a.note=why not")
    run = toy.state()["run"]
    last = failed.stderr.splitlines()[-1]
    assert (
        f"run {run} failed; after a fix of code or data: dflow resume --store 'other store' {run}; after a "
        f"change of the pipeline file: dflow run pipeline.toml -s 'a.note=why not' --store '{toy.store}'"
    ) == last
    (tmp_path / "text.txt").write_text("mended")
    for typed in re.findall("dflow (resume.*?|run.*)(?:;|$)", last):
        done = subprocess.run(
            [sys.executable, "-m", "executor.cli", *shlex.split(typed)],
            cwd=tmp_path,
            env={name: os.environ[name] for name in ("HOME", "XDG_STATE_HOME")}
            | {"PYTHONPATH": str(PROJECT), "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert (0, "") == (done.returncode, done.stderr)
        assert "mended" == toy.text("a")


WARNING = """

@op(version=1, run="toy:warning")
@frozen(kw_only=True)
class Warning:
    \"\"\"Warns.\"\"\"
    output = Text


def warning(config, stage):
    (stage.out_dir / "text.txt").write_text("text")
    stage.warn("odd; make it again: dflow resume RUN --from a")
"""


def test_the_commands_of_a_smoke_run_name_its_run_and_its_store(tmp_path):
    toy = Toy(tmp_path, ONE_NODE.replace('op = "make"\ntext = "hello"', 'op = "warning"'))
    with (tmp_path / "toy.py").open("a") as ops:
        ops.write(WARNING)
    result = toy.dflow("run", str(toy.file), "--smoke", "4")
    [record] = (toy.store / "smoke" / "records").iterdir()
    again = f"odd; make it again: dflow resume --store runs/smoke {record.name} --from a"
    assert (0, 2) == (result.returncode, result.stdout.count(again)), result.stdout
    full = toy.dflow("run", str(toy.file))
    assert 2 == full.stdout.count(f"odd; make it again: dflow resume {toy.state()['run']} --from a"), full.stdout
