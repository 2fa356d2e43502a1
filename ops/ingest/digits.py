"""The built-in sample of real images: 1,797 handwritten digits, each with a question and an answer about its pixels.

The images are those of scikit-learn's `load_digits`: 8 x 8 cells with 0 (paper) to 16 (full) units of ink. Rows count
from 1 at the top, columns from 1 at the left; the first one wins a tie. An answer is a function of its question and of
the image alone. It names the digit once, in the form "the digit 7", and continues with facts that have to be read
from the image, so that a draft model which only knows the phrasing fails every few tokens.
"""

from __future__ import annotations

import hashlib
import io
import re

import numpy as np
from attrs import frozen
from PIL import Image
from sklearn.datasets import load_digits

from ops.ingest.sample import IMAGE, RawSample, Turn

FULL = 16  # ink of a full cell
DARK = 8  # least ink of a dark cell
TEST_IMAGES = 297
VAL_IMAGES = 45

CLOSED_LOOPS = {0: 1, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 1, 7: 0, 8: 2, 9: 1}
DIGIT_NAMED = re.compile(r"\bthe digit ([0-9])\b")


@frozen
class Question:
    """A question, and its answer with names of facts in braces."""

    text: str
    answer: str


QUESTIONS = (
    Question(
        "Which digit is this, and where does its ink lie?",
        "The image shows the digit {digit}. Its darkest row is {dark_row} and its darkest column is {dark_column}. "
        "Most ink lies {most_quadrant} and least {least_quadrant}. The centre of mass is at row {row_centre}, column "
        "{column_centre}. Ink: about {ink_rounded}, which is {ink_class}.",
    ),
    Question(
        "Read the digit and count its cells.",
        "This is the digit {digit}, an {parity} number. It has {dark_cells} dark cells, {full_cells} full cells and "
        "{empty_cells} empty cells. The widest row is {widest_row} with width {width}, the darkest column is "
        "{dark_column} with {dark_column_ink} units. Empty corners: {empty_corners}.",
    ),
    Question(
        "What number is written here? Describe its outline.",
        "I can see the digit {digit}. It spans columns {first_column} to {last_column} and is widest in row "
        "{widest_row}, with width {width}. Strokes crossed in row 3: {strokes_row_3}, in column 4: {strokes_column_4}. "
        "It is {symmetry} and {side} and has {empty_corners} empty corners and {empty_cells} empty cells.",
    ),
    Question(
        "How much ink does this digit have?",
        "The writer drew the digit {digit} with about {ink_rounded} units of ink, a {ink_class} hand. The upper half "
        "holds {upper_percent} percent and the left half {left_percent} percent. Row {dark_row} has most, "
        "{dark_row_ink} units, and column {dark_column} has {dark_column_ink}. Full cells: {full_cells}.",
    ),
    Question(
        "Name the digit and say something about its number.",
        "Here stands the digit {digit}. One more is {next}, one less is {previous}, closed loops: {loops}. It has "
        "{dark_cells} dark cells in columns {first_column} to {last_column}, {full_cells} of them full, lies heaviest "
        "{most_quadrant}, with its weight at row {row_centre}, column {column_centre}; widest row: {widest_row}.",
    ),
    Question(
        "Is the digit symmetric? Where is its weight?",
        "It is the digit {digit}, and it is {symmetry}. It is {level} and {side}, its weight at row {row_centre}, "
        "column {column_centre}. The left half holds {left_percent} percent of the ink. The darkest column is "
        "{dark_column}, the lightest row {light_row}. The middle holds about {middle_ink} units.",
    ),
    Question(
        "Look at the rows of the image. What do they say?",
        "They say the digit {digit}. Row by row the dark cells are {dark_per_row}. The darkest row is {dark_row} with "
        "{dark_row_ink} units, the lightest is {light_row}, the widest is {widest_row}. It is "
        "{level}, its weight at row {row_centre}.",
    ),
    Question(
        "Look at the columns of the image. What do they say?",
        "They spell the digit {digit}. Column by column the dark cells are {dark_per_column}. The darkest column is "
        "{dark_column} with {dark_column_ink} units, the tallest is {tallest_column}. It is "
        "{side}, its weight at column {column_centre}.",
    ),
    Question(
        "Please read this digit and compare its quarters.",
        "You see the digit {digit}. Its quarters hold {upper_left_ink} units of ink upper left, {upper_right_ink} "
        "upper right, {lower_left_ink} lower left and {lower_right_ink} lower right. So most lies {most_quadrant}. "
        "Empty cells: {empty_cells}. Its darkest row is {dark_row}.",
    ),
    Question(
        "Which digit did somebody write, and how wide is it?",
        "Somebody wrote the digit {digit}, an {parity} one. The widest row is {widest_row} with width {width}, between "
        "columns {first_column} and {last_column}. It is lightest in row {light_row}, has {dark_cells} dark cells, "
        "about {ink_rounded} units of ink, {left_percent} percent of it on the left, looks {symmetry} and {level}.",
    ),
    Question(
        "Tell me the digit and what its strokes are like.",
        "My reading is the digit {digit}. Strokes crossed in row 3: {strokes_row_3}, column 4: {strokes_column_4}, "
        "column 5: {strokes_column_5}. Closed loops: {loops}. Full cells: {full_cells}, dark cells: {dark_cells}. The "
        "writer has a {ink_class}, {side} hand and presses hardest in row {dark_row}.",
    ),
    Question(
        "Describe the middle and the edges of this digit.",
        "The sheet holds the digit {digit}. In its middle lie about {middle_ink} of about {ink_rounded} units of ink. "
        "Empty corners: {empty_corners}, empty cells: {empty_cells}. It reaches from column {first_column} to column "
        "{last_column}, is darkest in column {dark_column} and lightest in row {light_row}, and is {side}.",
    ),
)


def digit_samples() -> list[RawSample]:
    """All 1,797 samples with their splits: 297 test and 45 val by hash of the index, the rest train."""
    digits = load_digits()
    order = sorted(range(len(digits.target)), key=lambda index: _hash(f"digit {index}"))
    splits = dict.fromkeys(order, "train")
    splits.update(dict.fromkeys(order[:TEST_IMAGES], "test"))
    splits.update(dict.fromkeys(order[TEST_IMAGES : TEST_IMAGES + VAL_IMAGES], "val"))
    samples = []
    for index, (cells, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        ink = cells.astype(np.int64)
        question = QUESTIONS[_hash(f"question {index}") % len(QUESTIONS)]
        answer = question.answer.format(**digit_facts(ink, int(digit)))
        samples.append(
            RawSample(
                id=f"digit-{index:04d}",
                split=splits[index],
                turns=(Turn("user", (IMAGE, question.text)), Turn("assistant", (answer,))),
                images=(digit_png(ink),),
            )
        )
    return samples


def digit_named(text: str) -> int | None:
    """The digit that an answer names as "the digit 7", or None if it names none or several."""
    named = DIGIT_NAMED.findall(text)
    return int(named[0]) if len(named) == 1 else None


def digit_png(ink: np.ndarray) -> bytes:
    """16 x 16 grey PNG of 8 x 8 cells: every cell is 2 x 2 pixels, full ink is black, paper is white."""
    grey = np.rint(255 * (1 - ink / FULL)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(grey.repeat(2, axis=0).repeat(2, axis=1)).save(file, format="PNG", compress_level=0)
    return file.getvalue()


def digit_facts(ink: np.ndarray, digit: int) -> dict[str, str]:
    """Facts about a digit's image for answers, as text. ink: int [8, 8], 0..16.

    Sums are in units of ink. `_rounded` and the middle are rounded to 10, percentages to 5, centres of mass to a tenth
    of a cell, halves up. The middle is rows and columns 3 to 6; a corner is 2 x 2 cells.
    """
    total = int(ink.sum())
    dark = ink >= DARK
    facts: dict[str, object] = {
        "digit": digit,
        "parity": "odd" if digit % 2 else "even",
        "next": digit + 1,
        "previous": digit - 1,
        "loops": CLOSED_LOOPS[digit],
        "ink_rounded": _nearest(total, 10),
        "ink_class": _class(total, (290, 340), ("light", "medium", "heavy")),
        "dark_cells": int(dark.sum()),
        "full_cells": int((ink == FULL).sum()),
        "empty_cells": int((ink == 0).sum()),
        "dark_per_row": _listed(dark.sum(axis=1)),
        "dark_per_column": _listed(dark.sum(axis=0)),
        "middle_ink": _nearest(int(ink[2:6, 2:6].sum()), 10),
        "upper_percent": _percent(int(ink[:4].sum()), total),
        "left_percent": _percent(int(ink[:, :4].sum()), total),
        "empty_corners": sum(not corner.any() for corner in (ink[:2, :2], ink[:2, 6:], ink[6:, :2], ink[6:, 6:])),
        "symmetry": _class(
            int(np.abs(ink - ink[:, ::-1]).sum()) * 100 // total, (60, 95), ("symmetric", "uneven", "lopsided")
        ),
        **_line_facts(ink, dark),
        **_quarter_facts(ink),
        **_centre_facts(ink, total),
    }
    return {name: str(value) for name, value in facts.items()}


def _line_facts(ink: np.ndarray, dark: np.ndarray) -> dict[str, object]:
    """Facts about rows and columns: sums, extents of the dark cells, and runs of dark cells (strokes)."""
    rows, columns = ink.sum(axis=1), ink.sum(axis=0)
    widths, heights = [_extent(line) for line in dark], [_extent(line) for line in dark.T]
    dark_columns = np.flatnonzero(dark.any(axis=0))
    return {
        "dark_row": int(rows.argmax()) + 1,
        "dark_row_ink": int(rows.max()),
        "light_row": int(rows.argmin()) + 1,
        "dark_column": int(columns.argmax()) + 1,
        "dark_column_ink": int(columns.max()),
        "widest_row": int(np.argmax(widths)) + 1,
        "width": max(widths),
        "tallest_column": int(np.argmax(heights)) + 1,
        "first_column": int(dark_columns[0]) + 1,
        "last_column": int(dark_columns[-1]) + 1,
        "strokes_row_3": _runs(dark[2]),
        "strokes_column_4": _runs(dark[:, 3]),
        "strokes_column_5": _runs(dark[:, 4]),
    }


def _quarter_facts(ink: np.ndarray) -> dict[str, object]:
    """Ink of the four quarters to the nearest 10, and the names of the fullest and the emptiest."""
    quarters = {
        "upper left": int(ink[:4, :4].sum()),
        "upper right": int(ink[:4, 4:].sum()),
        "lower left": int(ink[4:, :4].sum()),
        "lower right": int(ink[4:, 4:].sum()),
    }
    inks = {f"{name.replace(' ', '_')}_ink": _nearest(value, 10) for name, value in quarters.items()}
    return {
        **inks,
        "most_quadrant": max(quarters, key=quarters.__getitem__),
        "least_quadrant": min(quarters, key=quarters.__getitem__),
    }


def _centre_facts(ink: np.ndarray, total: int) -> dict[str, object]:
    """The centre of mass in cells; 4.5 is the middle of the sheet."""
    places = np.arange(1, 9)
    row_tenths = _divide(10 * int(ink.sum(axis=1) @ places), total)
    column_tenths = _divide(10 * int(ink.sum(axis=0) @ places), total)
    return {
        "row_centre": f"{row_tenths // 10}.{row_tenths % 10}",
        "column_centre": f"{column_tenths // 10}.{column_tenths % 10}",
        "level": _class(row_tenths, (44, 46), ("top-heavy", "central", "bottom-heavy")),
        "side": _class(column_tenths, (44, 46), ("left-heavy", "centred", "right-heavy")),
    }


def _divide(a: int, b: int) -> int:
    """The quotient a / b rounded to the nearest integer, halves up."""
    return (2 * a + b) // (2 * b)


def _nearest(value: int, step: int) -> int:
    return _divide(value, step) * step


def _percent(part: int, total: int) -> int:
    return _divide(20 * part, total) * 5


def _class(value: int, bounds: tuple[int, int], names: tuple[str, str, str]) -> str:
    """The name of a value's class: the first below the first bound, the last above the second, else the middle one."""
    if value < bounds[0]:
        return names[0]
    return names[1] if value <= bounds[1] else names[2]


def _extent(line: np.ndarray) -> int:
    """The number of cells from the first dark one to the last, inclusive."""
    dark = np.flatnonzero(line)
    return int(dark[-1] - dark[0]) + 1 if dark.size else 0


def _runs(line: np.ndarray) -> int:
    """Number of unbroken runs of dark cells."""
    return int(line[0]) + int((line[1:] & ~line[:-1]).sum())


def _listed(counts: np.ndarray) -> str:
    return ", ".join(str(int(count)) for count in counts)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
