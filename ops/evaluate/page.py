"""The page of prompts and their answers, with each accepted run in its colour: prompts.html.

One file without scripts and links; texts are of unknown origin and are escaped. Radio buttons choose the order of the
prompts: each prompt has its place in every order as a number that the style sheet reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from pkgutil import get_data

import numpy as np
from attrs import frozen
from PIL import Image
from torch import Tensor

from ops.evaluate.summary import Summary
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.pages import page_text, thumbnail
from ops.lib.vision.processor import Processor

SHOWN = 200
THUMBNAIL = 96  # pixels of the longer side
INCOMPLETE = "\ufffd"  # a tokenizer's text for the first bytes of a character
ORDERS = (
    ("file", "as in the file"),
    ("worst", "lowest tau first"),
    ("best", "highest tau first"),
    ("kind", "category"),
)
VERDICTS = {
    "identical": ("good", "the target's own answer"),
    "tie": ("warn", "differs at a tie"),
    "differs": ("bad", "differs: an error"),
    "sampled": ("none", "sampled, not comparable"),
}


@frozen(kw_only=True)
class Shown:
    """A prompt and its answer on the page.

    runs: (step from 1, or 0 for the prefill; accepted text; text of the target's token).
    """

    id: str
    category: str
    prompt: str
    pictures: tuple[str, ...]
    runs: tuple[tuple[int, str, str], ...]
    answer: Decoded
    verdict: str

    @property
    def tau(self) -> float | None:
        return self.answer.generated / self.answer.steps if self.answer.steps else None


def write_page(file: Path, summary: Summary, processor: Processor) -> None:
    """Write the page with at most 200 prompts: first those whose answers differ, then others in order."""
    verdicts = ["sampled" if summary.losses is None else summary.losses.verdict(result) for result in summary.results]
    places = sorted(range(len(verdicts)), key=lambda place: (verdicts[place] in ("identical", "sampled"), place))
    chosen = sorted(places[:SHOWN])
    shown = [
        show(
            summary.prompts[place].sample(),
            summary.results[place].speculative,
            verdicts[place],
            processor,
            summary.prompts[place].topic,
        )
        for place in chosen
    ]
    file.write_text(page(shown, len(verdicts)), encoding="utf-8")


def show(sample: TokenSample, answer: Decoded, verdict: str, processor: Processor, topic: str | None = None) -> Shown:
    """A sample on the page; only its prompt is used."""
    prompt = sample.input_ids[: sample.prompt_tokens]
    images = int((prompt == processor.image_token_id).sum()) > 0 if processor.image_token_id is not None else False
    return Shown(
        id=sample.id,
        category=sample.category if topic is None else f"{sample.category}, {topic}",
        prompt=_prompt_text(processor, prompt.tolist()),
        pictures=tuple(thumbnails(sample, processor)) if images else (),
        runs=tuple(runs(answer, processor)),
        answer=answer,
        verdict=verdict,
    )


def page(shown: Sequence[Shown], total: int) -> str:
    """The HTML page of prompts and answers. total: the number of all prompts."""
    by_tau = sorted(range(len(shown)), key=lambda place: (shown[place].tau is None, shown[place].tau or 0.0))
    by_kind = sorted(range(len(shown)), key=lambda place: shown[place].category)
    worst = {place: rank for rank, place in enumerate(by_tau)}
    kind = {place: rank for rank, place in enumerate(by_kind)}
    places = [
        {"file": place, "worst": worst[place], "best": -worst[place], "kind": kind[place]}
        for place in range(len(shown))
    ]
    template = get_data("ops.evaluate", "prompts.html")
    return page_text(template, prompts=shown, places=places, total=total, orders=ORDERS, verdicts=VERDICTS)


def runs(answer: Decoded, processor: Processor) -> Iterator[tuple[int, str, str]]:
    """The parts of an answer, cut at its verification steps. A character of several tokens stands where it
    is complete.
    """
    cuts = [1]
    for accepted in answer.accepted:
        cuts += [cuts[-1] + accepted, cuts[-1] + accepted + 1]
    starts = [0, *cuts[:-1]]
    texts = list(_texts(processor, [answer.tokens[start:end] for start, end in zip(starts, cuts, strict=True)]))
    yield 0, "", texts[0]
    for step in range(len(answer.accepted)):
        yield step + 1, texts[1 + 2 * step], texts[2 + 2 * step]


def token_text(processor: Processor, token: int) -> str:
    """The text of one token."""
    return str(processor.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def thumbnails(sample: TokenSample, processor: Processor) -> Iterator[str]:
    """Small data: URLs of a sample's images, as the target saw them."""
    start = 0
    for t, h, w in sample.image_grid_thw.tolist():
        image = picture(sample.pixel_values[start : start + t * h * w], (t, h, w), processor)
        start += t * h * w
        yield thumbnail(image, THUMBNAIL)


def picture(pixel_values: Tensor, grid: tuple[int, int, int], processor: Processor) -> Image.Image:
    """The first frame of an image, from its pixel rows [t * h * w, channels * frames * p * p].

    Rows are ordered (t, h / m, w / m, m, m), with m the merge_size: patches of one token are adjacent.
    """
    t, h, w = grid
    settings = processor.image_processor
    m, p, frames = settings.merge_size, settings.patch_size, settings.temporal_patch_size
    patches = pixel_values.float().numpy().reshape(t, h // m, w // m, m, m, 3, frames, p, p)[0, ..., 0, :, :]
    channels_last = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * p, w * p, 3)
    colours = channels_last * np.array(settings.image_std) + np.array(settings.image_mean)
    return Image.fromarray((colours.clip(0, 1) * 255).round().astype(np.uint8))


def _prompt_text(processor: Processor, tokens: Sequence[int]) -> str:
    """The prompt's text with its special tokens; an image's tokens appear once, with their number."""
    parts = []
    for is_image, group in groupby(tokens, key=lambda token: token == processor.image_token_id):
        run = list(group)
        if is_image:
            parts.append(f"{processor.image_token} x {len(run)}")
        else:
            parts += _texts(processor, [run])
    return "".join(parts)


def _texts(processor: Processor, groups: Iterable[Sequence[int]]) -> Iterator[str]:
    """The text of each group of tokens; a character is shown with the group that completes it."""
    pending: list[int] = []
    shown = ""
    for group in groups:
        pending += group
        text = processor.tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        complete = text.rstrip(INCOMPLETE)
        yield complete[len(shown) :]
        shown = complete
        if complete == text:
            pending, shown = [], ""
