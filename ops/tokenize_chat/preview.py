"""preview.html: the first samples of the train split as a person reads them, with every token in its colour.

The page is one file without scripts and without any address; texts are data of unknown origin and are escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from attrs import frozen
from PIL import Image

from ops.lib.data.image_packs import read_packed
from ops.lib.data.token_shards import TokenSample
from ops.lib.vision.images import decode
from ops.lib.vision.processor import Processor

THUMBNAIL = 160  # pixels of the longer side
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tokenised samples</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --text: #1f2328; --quiet: #656d76; --line: #d0d7de;
  --token: #f0f2f5; --other: #e4e8ed; --learnt: #b7efc5; --learnt-other: #9be3ae; --image: #dcd3fb;
  --prompt: #bc4c00; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #0d1117; --text: #e6edf3; --quiet: #8d96a0; --line: #30363d;
  --token: #1b2129; --other: #262d37; --learnt: #14532d; --learnt-other: #1c6b3b; --image: #42357a;
  --prompt: #f0883e; }} }}
body {{ margin: 0 auto; max-width: 70rem; padding: 1.5rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; }}
section {{ border-top: 1px solid var(--line); padding: 1rem 0; }}
h2 {{ font-size: 1rem; margin: 0; overflow-wrap: anywhere; }}
.facts, .legend {{ color: var(--quiet); margin: .2rem 0 .7rem; }}
.tokens, .legend span {{ font: 13px/1.8 ui-monospace, monospace; }}
.tokens {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.tokens span, .legend span {{ background: var(--token); border-radius: 3px; padding: 2px 0; }}
.tokens span:nth-of-type(even) {{ background: var(--other); }}
.tokens span.l, .legend .l {{ background: var(--learnt); }}
.tokens span.l:nth-of-type(even) {{ background: var(--learnt-other); }}
.tokens span.i, .legend .i {{ background: var(--image); }}
.legend span {{ color: var(--text); }}
.tokens b, .legend b {{ color: var(--prompt); }}
img {{ min-height: 4rem; max-height: 10rem; margin: 0 .5rem .5rem 0; border: 1px solid var(--line);
  image-rendering: pixelated; }}
</style></head><body>
<h1>The first {count} of the samples to train on</h1>
<p class="legend"><span class="l">in the loss mask</span> <span>not learnt</span> <span class="i">an image</span>
<b>&#9654;</b> the target answers from here on. Hold the pointer over a token for its id and position.</p>
{sections}
</body></html>
"""


@frozen(eq=False)
class Shown:
    """A sample without its pixels, which may be large. images: the references of those it has."""

    place: int
    sample_id: str
    category: str
    ids: list[int]
    mask: list[bool]
    prompt_tokens: int
    images: tuple[Mapping[str, Any], ...]


class Preview:
    """Collects the first samples that it is given: half of them with images, where both kinds exist."""

    def __init__(self, samples: int) -> None:
        self._wanted = samples
        self._found: dict[str, list[Shown]] = {"image": [], "text": []}

    def add(self, sample: TokenSample, images: Sequence[Mapping[str, Any]]) -> None:
        """images: the references of the sample's images, and maybe more behind them."""
        of_its_kind = self._found[sample.category]
        if len(of_its_kind) < self._wanted:
            of_its_kind.append(
                Shown(
                    place=sum(map(len, self._found.values())),
                    sample_id=sample.id,
                    category=sample.category,
                    ids=sample.input_ids.tolist(),
                    mask=sample.loss_mask.tolist(),
                    prompt_tokens=sample.prompt_tokens,
                    images=tuple(images[: len(sample.image_grid_thw)]),
                )
            )

    def chosen(self) -> list[Shown]:
        """What is shown, in the order of the samples."""
        images, texts = self._found["image"], self._found["text"]
        with_images = min(len(images), max((self._wanted + 1) // 2, self._wanted - len(texts)))
        shown = images[:with_images] + texts[: self._wanted - with_images]
        return sorted(shown, key=lambda sample: sample.place)

    def write(self, file: Path, folder: Path, processor: Processor) -> None:
        """The page; `folder` holds the image packs."""
        sections = "\n".join(_section(shown, folder, processor) for shown in self.chosen())
        file.write_text(PAGE.format(count=len(self.chosen()), sections=sections), encoding="utf-8")


def _section(shown: Shown, folder: Path, processor: Processor) -> str:
    learnt = sum(shown.mask)
    facts = f"{shown.category}, {len(shown.ids)} tokens, {shown.prompt_tokens} of them the prompt, {learnt} learnt"
    pictures = "".join(f'<img alt="" src="{_thumbnail(read_packed(folder, dict(ref)))}">' for ref in shown.images)
    return (
        f'<section><h2>{escape(shown.sample_id)}</h2><p class="facts">{facts}</p>{pictures}'
        f'<div class="tokens">{_tokens(shown, processor)}</div></section>'
    )


def _tokens(shown: Shown, processor: Processor) -> str:
    """One span for every token; one for all that stand for the same image, as far as they follow each other."""
    texts = [processor.tokenizer.decode([token]) for token in shown.ids]
    parts = []
    runs = groupby(
        enumerate(shown.ids), key=lambda item: (0, -1) if item[1] == processor.image_token_id else (1, item[0])
    )
    for _, run in runs:
        places = [place for place, _ in run]
        first, token = places[0], shown.ids[places[0]]
        text, title = texts[first], f"id {token}, position {first}"
        kind = "l" if shown.mask[first] else ""
        if token == processor.image_token_id:
            text, kind, title = f"{text} x {len(places)}", "i", f"{title} to {places[-1]}"
        if first == shown.prompt_tokens:
            parts.append("<b>&#9654;</b>")
        parts.append(f'<span class="{kind}" title="{title}">{visible(text)}</span>')
    return "".join(parts)


def visible(text: str) -> str:
    """A text of unknown origin for a page: escaped, line ends shown, and no character that would turn the direction of
    what follows.
    """
    plain = "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)
    return escape(plain).replace("\n", "&#8629;\n")


def _thumbnail(encoded: bytes) -> str:
    """A data: address of the image, made small."""
    image = decode(encoded)
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
