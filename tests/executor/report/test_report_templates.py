"""Templates are files of their package, escape every value, and refuse a name that they lack."""

from __future__ import annotations

from importlib.resources import files

import pytest
from counting_runs import EVIL
from jinja2 import UndefinedError
from markupsafe import escape

from executor.report.templates import NOTHING, page, render, table
from ops.lib.pages import page_text


@pytest.mark.parametrize(("package", "endings"), [("executor.report", {".html", ".css"}), ("ops.lib", {".css"})])
def test_templates_lie_in_their_package(package: str, endings: set[str]) -> None:
    found = [file for file in files(package).iterdir() if "." in file.name and not file.name.endswith(".py")]
    assert endings == {f".{file.name.rpartition('.')[2]}" for file in found if file.is_file()}
    assert all(file.read_text(encoding="utf-8") for file in found if file.is_file())


def test_texts_numbers_and_nothing_are_shown_as_they_should_be() -> None:
    cells = [EVIL, "a\x1b[31mb", 3, 0.000123456, None, True]
    text = table(["a"] * len(cells), [cells])
    assert f"<td>{escape(EVIL)}</td>" in text
    assert "\x1b" not in text
    assert '<td class="number">3</td><td class="number">0.0001235</td>' in text
    assert f"<td>{NOTHING}</td><td>True</td>" in text


def test_a_name_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'pipeline' is undefined"):
        page()
    with pytest.raises(UndefinedError, match="'name' is undefined"):
        page_text(b"<p>{{ name }}</p>")
    with pytest.raises(UndefinedError, match="'rows' was not provided"):
        render("table", ["a"])


def test_a_page_of_an_op_escapes_its_values_and_has_the_common_style() -> None:
    text = page_text(b"<style>{{ style }}</style><p>{{ name }}</p>", name=EVIL)
    assert f"<p>{escape(EVIL)}</p>" in text
    assert "prefers-color-scheme: dark" in text.partition("</style>")[0]
