"""A chat template of the user's, in the place of a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from dsl.errors import ConfigError, DataError
from ops.lib.data.files import read_object, write_json

FILE = "chat_template.jinja"
OTHERS = ("chat_template.json",)  # which a processor's loader reads as well
HOLDING = ("tokenizer_config.json", "processor_config.json")
LONGEST = 1 << 20  # bytes
CORRECT_IT = "correct it, or copy the template again from the model's source"


def read_chat_template(file: str | None) -> str | None:
    """The chat template in a file; None for None. Raises DataError with file and line if it is no template."""
    if file is None:
        return None
    try:
        with Path(file).open("rb") as opened:
            encoded = opened.read(LONGEST + 1)
        if len(encoded) > LONGEST:  # before it is decoded: it ends inside a character perhaps
            raise DataError(
                f"{file}: larger than {LONGEST >> 20} MiB; chat_template must name a file with a chat template"
            )
        text = encoded.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as a chat template: {error}") from error
    if not text.strip():
        raise DataError(f"{file}: is empty; chat_template must name a file with a chat template")
    check_template(text, file)
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as transformers reads it again


def check_thinking(enable_thinking: bool | None, texts: Iterable[str], source: str) -> None:
    """Check that one of the templates reads enable_thinking, if it is set. Raises ConfigError."""
    if enable_thinking is not None and not any("enable_thinking" in text for text in texts):
        raise ConfigError(f"the chat template of {source} does not read enable_thinking: remove it")


def check_template(text: str, place: str) -> None:
    """Check that a text is a chat template of at most LONGEST characters. It is parsed, never rendered.

    Raises DataError with place and line.
    """
    if len(text) > LONGEST:
        raise DataError(f"{place}: not a chat template: {len(text):,} characters, more than {LONGEST:,}; {CORRECT_IT}")
    try:
        Environment(extensions=("jinja2.ext.loopcontrols", _Generation)).parse(text)
    except TemplateSyntaxError as error:
        where = f"{place}:{error.lineno}"
        raise DataError(f"{where}: not a chat template: {error.message}; {CORRECT_IT}") from error
    except RecursionError as error:
        raise DataError(f"{place}: not a chat template: nested too deeply; {CORRECT_IT}") from error


def replace_chat_template(directory: Path, template: str) -> None:
    """Write a chat template into a checkpoint directory, and remove all others that transformers or engines
    would find.
    """
    for name in OTHERS:
        (directory / name).unlink(missing_ok=True)
    for name in HOLDING:
        if (directory / name).is_file():
            settings = read_object(directory / name)
            if settings.pop("chat_template", None) is not None:
                write_json(directory / name, settings)
    (directory / FILE).write_text(template, encoding="utf-8", newline="")


class _Generation(Extension):
    """The Jinja extension for the block `{% generation %}`, with which templates mark answers."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
