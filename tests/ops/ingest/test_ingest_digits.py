"""The built-in sample: every fact against a slow reference, and answers that can teach and catch out."""

import io
import math
from collections import Counter
from fractions import Fraction
from itertools import zip_longest
from string import Formatter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from transformers import AutoTokenizer

from ops.ingest.digits import QUESTIONS, digit_facts, digit_named, digit_png, digit_samples
from ops.ingest.prose import passages, prose_samples
from ops.tokenize_chat.builtin import write_builtin_processor


def nearest(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def tenths(value: Fraction) -> str:
    return f"{nearest(10 * value) / 10:.1f}"


def first_place(values: list[int], wanted: int) -> int:
    return next(place for place, value in enumerate(values, start=1) if value == wanted)


def strokes(line: list[int]) -> int:
    return len("".join("x" if cell >= 8 else " " for cell in line).split())


def span(line: list[int]) -> int:
    return len("".join("x" if cell >= 8 else " " for cell in line).strip())


def slow_facts(cells: list[list[int]], digit: int) -> dict[str, str]:
    """Every fact once more, in plain Python with exact fractions."""
    columns = [[cells[row][column] for row in range(8)] for column in range(8)]
    facts = {
        "digit": digit,
        "parity": ["even", "odd"][digit % 2],
        "next": digit + 1,
        "previous": digit - 1,
        "loops": {0: 1, 6: 1, 8: 2, 9: 1}.get(digit, 0),
        **ink_facts(cells, columns),
        **share_facts(cells, columns),
        **line_facts(cells, columns),
    }
    return {name: str(value) for name, value in facts.items()}


def ink_facts(cells: list[list[int]], columns: list[list[int]]) -> dict[str, object]:
    """How much ink there is, and in how many cells."""
    everything = [cell for row in cells for cell in row]
    total = sum(everything)
    mirror_share = 100 * sum(abs(cells[r][c] - cells[r][7 - c]) for r in range(8) for c in range(8)) // total
    return {
        "ink_rounded": 10 * nearest(Fraction(total, 10)),
        "ink_class": ["light", "medium", "heavy"][(total >= 290) + (total > 340)],
        "dark_cells": sum(cell >= 8 for cell in everything),
        "full_cells": everything.count(16),
        "empty_cells": everything.count(0),
        "dark_per_row": ", ".join(str(sum(cell >= 8 for cell in row)) for row in cells),
        "dark_per_column": ", ".join(str(sum(cell >= 8 for cell in column)) for column in columns),
        "symmetry": ["symmetric", "uneven", "lopsided"][(mirror_share >= 60) + (mirror_share > 95)],
    }


def share_facts(cells: list[list[int]], columns: list[list[int]]) -> dict[str, object]:
    """Facts on where the ink is: by blocks of cells, and its centre."""
    row_sums, column_sums = [sum(row) for row in cells], [sum(column) for column in columns]
    total = sum(row_sums)

    def block(rows: range, places: range) -> int:
        return sum(cells[row][column] for row in rows for column in places)

    low, high = range(4), range(4, 8)
    quarters = {
        "upper left": block(low, low),
        "upper right": block(low, high),
        "lower left": block(high, low),
        "lower right": block(high, high),
    }
    corners = [block(rows, places) for rows in (range(2), range(6, 8)) for places in (range(2), range(6, 8))]
    row_centre = Fraction(sum(place * ink for place, ink in enumerate(row_sums, start=1)), total)
    column_centre = Fraction(sum(place * ink for place, ink in enumerate(column_sums, start=1)), total)
    return {
        "middle_ink": 10 * nearest(Fraction(block(range(2, 6), range(2, 6)), 10)),
        "upper_percent": 5 * nearest(Fraction(20 * sum(row_sums[:4]), total)),
        "left_percent": 5 * nearest(Fraction(20 * sum(column_sums[:4]), total)),
        "empty_corners": corners.count(0),
        **{name.replace(" ", "_") + "_ink": 10 * nearest(Fraction(ink, 10)) for name, ink in quarters.items()},
        "most_quadrant": next(name for name, ink in quarters.items() if ink == max(quarters.values())),
        "least_quadrant": next(name for name, ink in quarters.items() if ink == min(quarters.values())),
        "row_centre": tenths(row_centre),
        "column_centre": tenths(column_centre),
        "level": ["top-heavy", "central", "bottom-heavy"][
            (nearest(10 * row_centre) >= 44) + (nearest(10 * row_centre) > 46)
        ],
        "side": ["left-heavy", "centred", "right-heavy"][
            (nearest(10 * column_centre) >= 44) + (nearest(10 * column_centre) > 46)
        ],
    }


def line_facts(cells: list[list[int]], columns: list[list[int]]) -> dict[str, object]:
    """Facts on single rows and columns."""
    row_sums, column_sums = [sum(row) for row in cells], [sum(column) for column in columns]
    widths, heights = [span(row) for row in cells], [span(column) for column in columns]
    inked = [place for place, column in enumerate(columns, start=1) if any(cell >= 8 for cell in column)]
    return {
        "dark_row": first_place(row_sums, max(row_sums)),
        "dark_row_ink": max(row_sums),
        "light_row": first_place(row_sums, min(row_sums)),
        "dark_column": first_place(column_sums, max(column_sums)),
        "dark_column_ink": max(column_sums),
        "widest_row": first_place(widths, max(widths)),
        "width": max(widths),
        "tallest_column": first_place(heights, max(heights)),
        "first_column": inked[0],
        "last_column": inked[-1],
        "strokes_row_3": strokes(cells[2]),
        "strokes_column_4": strokes(columns[3]),
        "strokes_column_5": strokes(columns[4]),
    }


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture(scope="module")
def samples():
    return digit_samples()


@pytest.fixture(scope="module")
def tokenizer(samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    train = [sample for sample in [*samples, *prose_samples()] if sample.split == "train"]
    conversations = [[turn.row() for turn in sample.turns] for sample in train]
    write_builtin_processor(folder, conversations, vocab_size=2048)
    return AutoTokenizer.from_pretrained(folder)


def test_the_facts_of_every_digit_equal_a_slow_reference(digits):
    for cells, digit in zip(digits.images.astype(int), digits.target.tolist(), strict=True):
        assert slow_facts(cells.tolist(), digit) == digit_facts(cells, digit)


@given(
    cells=st.lists(st.lists(st.integers(0, 16), min_size=8, max_size=8), min_size=8, max_size=8),
    mark=st.integers(0, 63),
    digit=st.integers(0, 9),
)
def test_the_facts_of_any_sheet_with_a_dark_cell_equal_a_slow_reference(cells, mark, digit):
    cells[mark // 8][mark % 8] = 16
    assert slow_facts(cells, digit) == digit_facts(np.array(cells), digit)


def test_every_answer_names_its_digit_early_and_once(digits, samples):
    for sample, digit in zip(samples, digits.target.tolist(), strict=True):
        answer = sample.turns[-1].content[-1]
        assert digit == digit_named(answer)
        assert answer.index("the digit") < 30


def test_an_answer_that_names_no_digit_or_two_names_none():
    assert digit_named("The image shows the digit 7.") == 7
    assert digit_named("The image shows a seven.") is None
    assert digit_named("It is the digit 7, or the digit 1.") is None
    assert digit_named("It is the digit 71.") is None


def test_a_sheet_becomes_a_png_with_doubled_cells_and_black_ink(digits):
    ink = digits.images[0].astype(int)
    with Image.open(io.BytesIO(digit_png(ink))) as image:
        grey = np.asarray(image)
    expected = [[round(255 - 255 * ink[row // 2][column // 2] / 16) for column in range(16)] for row in range(16)]
    assert expected == grey.tolist()


def test_297_images_are_held_out_and_the_splits_never_change(samples):
    assert Counter(sample.split for sample in samples) == {"train": 1455, "val": 45, "test": 297}
    held_out = [sample.id for sample in samples if sample.split == "test"]
    assert held_out[:5] == ["digit-0000", "digit-0004", "digit-0012", "digit-0015", "digit-0017"]


def test_the_phrasing_is_a_function_of_the_question(digits, samples):
    answers = {question.text: question.answer for question in QUESTIONS}
    assert len(QUESTIONS) == len(answers)
    for sample, cells, digit in zip(samples, digits.images.astype(int), digits.target.tolist(), strict=True):
        question, answer = (turn.content[-1] for turn in sample.turns)
        assert answers[question].format(**digit_facts(cells, digit)) == answer


def test_every_fact_is_told_in_some_answer(digits):
    told = {name for question in QUESTIONS for _, name, _, _ in Formatter().parse(question.answer) if name}
    assert set(digit_facts(digits.images[0].astype(int), 0)) == told


def test_every_question_is_asked_about_every_digit(digits, samples):
    asked = {
        (sample.turns[0].content[-1], digit) for sample, digit in zip(samples, digits.target.tolist(), strict=True)
    }
    assert len(QUESTIONS) * 10 == len(asked)


def test_answers_have_40_to_80_tokens(samples, tokenizer):
    lengths = [len(tokenizer(sample.turns[-1].content[-1])["input_ids"]) for sample in samples]
    assert len(lengths) == 1797
    assert min(lengths) >= 40
    assert max(lengths) <= 80


def test_every_fourth_to_sixth_token_cannot_be_guessed_from_question_and_digit(samples, tokenizer):
    """The best guess that has seen no image: the most frequent token at each place of an answer."""
    groups: dict[tuple[str, int | None], list[list[int]]] = {}
    for sample in samples:
        question, answer = (turn.content[-1] for turn in sample.turns)
        groups.setdefault((question, digit_named(answer)), []).append(tokenizer(answer)["input_ids"])
    tokens = sum(len(answer) for answers in groups.values() for answer in answers)
    guessed = sum(
        max(Counter(token for token in place if token is not None).values())
        for answers in groups.values()
        for place in zip_longest(*answers)
    )
    assert 4 <= tokens / (tokens - guessed) <= 6.5


def test_numbers_are_read_digit_by_digit(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 1797")["input_ids"]) == ["Ġ", "1", "7", "9", "7"]


def test_two_readings_of_the_sample_are_equal(samples):
    assert samples == digit_samples()
    assert prose_samples() == prose_samples()


def test_prose_is_about_300_passages_that_occur_once():
    prose = prose_samples()
    assert 250 <= len(prose) <= 300
    assert len(prose) == len({sample.turns[-1].content[-1] for sample in prose})
    splits = Counter(sample.split for sample in prose)
    assert (splits["test"], splits["val"]) == (25, 8)


def test_prose_answers_fit_into_120_tokens_or_nearly(tokenizer):
    lengths = [len(tokenizer(sample.turns[-1].content[-1])["input_ids"]) for sample in prose_samples()]
    assert min(lengths) >= 32
    assert max(lengths) <= 127
    assert sum(40 <= length <= 120 for length in lengths) / len(lengths) > 0.95


def test_passages_leave_out_headings_code_and_lists():
    sentence = " ".join(["word"] * 39)
    text = (
        f'The "x" statement\n*****\n\n   x ::= y\n\nA {sentence}.\n\n* A {sentence}.\n\nToo short.\n\nA {sentence}:\n'
    )
    assert [f"A {sentence}."] == passages(text)
