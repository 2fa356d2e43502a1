"""Samples of the train split for a reader, of every source and form, with every token in its colour: preview.html.

The page is one file without scripts and links; texts are of unknown origin and are escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby, zip_longest
from math import prod
from pathlib import Path
from pkgutil import get_data

from attrs import frozen

from ops.lib.data.token_shards import KINDS, TokenSample
from ops.lib.pages import page_text, thumbnail
from ops.lib.vision.processor import Processor

MOST_GROUPS = 50
COLOURED = ("reasoning", "call")
THUMBNAIL = 160  # pixels of the longer side


def source_of(sample_id: str) -> str:
    """The source in the id of a sample that has none of its own, such as that of "log:75"; empty for others."""
    return sample_id.rpartition(":")[0]


@frozen(eq=False)
class Shown:
    """A sample for the preview, with small data: URLs in place of its pixels, which may be large.

    starts: the first token of each answer that is learnt, or of the one that a prompt asks for.
    """

    place: int
    sample_id: str
    category: str
    ids: list[int]
    mask: list[bool]
    kinds: list[int] | None
    starts: list[int]
    pictures: tuple[str, ...]

    @property
    def learnt(self) -> str:
        """How many tokens are learnt, by kind where that is known."""
        answers = f"{len(self.starts)} answer{'s' * (len(self.starts) != 1)}"
        counts = Counter(self.kinds or ())
        by_kind = ", ".join(
            f"{counts[number]} {name}" for number, name in enumerate(KINDS) if number and counts[number]
        )
        return f"{sum(self.mask)} learnt in {answers}{f' ({by_kind})' if by_kind else ''}"


Group = tuple[str, tuple[int, ...]]  # the source, and the kinds of the learnt tokens


class Preview:
    """Collects samples for the preview: half of them with images if both kinds exist, and of these in turn one of each
    source and each form, the first of it first.

    At most `samples` of a group are kept, of MOST_GROUPS of them.
    """

    def __init__(self, samples: int, processor: Processor) -> None:
        self._wanted = samples
        self._processor = processor
        self._found: dict[str, dict[Group, list[Shown]]] = {"image": {}, "text": {}}
        self._seen = 0
        self._total = 0

    def add(self, sample: TokenSample) -> None:
        """Add a sample if there is room for its kind; images are shown as the target gets them, without decoding."""
        self._total += 1
        groups = self._found[sample.category]
        kinds = None if sample.kinds is None else sample.kinds.tolist()
        group = source_of(sample.id), tuple(sorted({*(kinds or ())}))
        if group not in groups and len(groups) == MOST_GROUPS:
            return
        of_group = groups.setdefault(group, [])
        if len(of_group) < self._wanted:
            of_group.append(
                Shown(
                    place=self._seen,
                    sample_id=sample.id,
                    category=sample.category,
                    ids=sample.input_ids.tolist(),
                    mask=sample.loss_mask.tolist(),
                    kinds=kinds,
                    starts=_starts(sample),
                    pictures=tuple(self._pictures(sample)),
                )
            )
            self._seen += 1

    def chosen(self) -> list[Shown]:
        """The samples to show, in order."""
        images, texts = (
            [shown for rank in zip_longest(*self._found[name].values()) for shown in rank if shown is not None]
            for name in ("image", "text")
        )
        with_images = min(len(images), max((self._wanted + 1) // 2, self._wanted - len(texts)))
        shown = images[:with_images] + texts[: self._wanted - with_images]
        return sorted(shown, key=lambda sample: sample.place)

    def write(self, file: Path) -> None:
        """Write the preview page."""
        samples = self.chosen()
        tokens = [_tokens(each, self._processor) for each in samples]
        has_kinds = any(each.kinds is not None for each in samples)
        template = get_data("ops.tokenize_chat", "preview.html")
        page = page_text(template, samples=samples, tokens=tokens, has_kinds=has_kinds, total=self._total)
        file.write_text(page, encoding="utf-8")

    def _pictures(self, sample: TokenSample) -> Iterator[str]:
        start = 0
        for grid in sample.image_grid_thw.tolist():
            rows = sample.pixel_values[start : start + prod(grid)]
            yield thumbnail(self._processor.picture(rows, grid), THUMBNAIL)
            start += prod(grid)


def _starts(sample: TokenSample) -> list[int]:
    """The first token of each run that is learnt; of a prompt without an answer its end."""
    mask = sample.loss_mask.tolist()
    starts = [place for place, learnt in enumerate(mask) if learnt and not (place and mask[place - 1])]
    return starts or [sample.prompt_tokens]


@frozen
class _Token:
    """A token, or run of image tokens, as the page shows it. kind: "l" if it is learnt, with "reasoning" or "call"
    where it is known to be one, "i" for an image's tokens. answer: the number of the answer that it begins, 0 for none.
    """

    text: str
    kind: str
    title: str
    answer: int


def _tokens(shown: Shown, processor: Processor) -> list[_Token]:
    """The text of every token; a run of image tokens counts as one."""
    texts = [processor.tokenizer.decode([token]) for token in shown.ids]
    tokens = []
    runs = groupby(
        enumerate(shown.ids), key=lambda item: (0, -1) if item[1] == processor.image_token_id else (1, item[0])
    )
    for _, run in runs:
        places = [place for place, _ in run]
        first, token = places[0], shown.ids[places[0]]
        text, kind, title = texts[first], "l" if shown.mask[first] else "", f"id {token}, position {first}"
        if kind and shown.kinds is not None:
            name = KINDS[shown.kinds[first]]
            kind, title = f"l {name}" if name in COLOURED else kind, f"{name}, {title}"
        if token == processor.image_token_id:
            text, kind, title = f"{text} x {len(places)}", "i", f"{title} to {places[-1]}"
        answer = shown.starts.index(first) + 1 if first in shown.starts else 0
        tokens.append(_Token(text, kind, title, answer))
    return tokens
