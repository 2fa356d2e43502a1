"""prompts.html: every prompt and its answer as a person reads them, with each accepted run in its colour.

One file without scripts and without any address; texts are data of unknown origin and are escaped. The order of the
prompts is chosen by radio buttons: each prompt carries its place in every order as a number that the style sheet reads.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np
from attrs import frozen
from PIL import Image
from torch import Tensor

from ops.evaluate.summary import Summary
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.page_style import STYLE
from ops.lib.vision.processor import Processor
from ops.tokenize_chat.preview import visible

SHOWN = 200
THUMBNAIL = 96  # pixels of the longer side
INCOMPLETE = "\ufffd"  # what a tokenizer makes of the first bytes of a character
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
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Answers of the evaluation</title>
<style>{style}
body {{ margin: 0 auto; max-width: 70rem; padding: 1rem; }}
h1 {{ font-size: 1.3rem; margin: 0 0 .3rem; }}
h2 {{ font-size: 1rem; margin: 0 .6rem 0 0; overflow-wrap: anywhere; }}
p, .facts {{ color: var(--faint); margin: .2rem 0 .6rem; }}
.prompts {{ display: flex; flex-direction: column; }}
article {{ border-top: 1px solid var(--line); padding: .8rem 0; order: var(--file); min-width: 0; }}
{orders}
.head {{ display: flex; flex-wrap: wrap; align-items: baseline; }}
.verdict, .legend span {{ border-radius: 3px; padding: 0 .35rem; color: var(--text); }}
.text {{ font: 13px/1.8 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
.text span {{ border-radius: 3px; padding: 2px 0; }}
.a {{ background: var(--good); }} .b {{ background: var(--info); }}
.text b, .legend b {{ border-bottom: 2px solid var(--series-1); }}
.good {{ background: var(--good); }} .warn {{ background: var(--warn); }}
.bad {{ background: var(--bad); }} .none {{ background: var(--none); }}
img {{ min-height: 3rem; margin: .2rem .4rem .2rem 0; border: 1px solid var(--line); image-rendering: pixelated; }}
label {{ margin-right: .9rem; white-space: nowrap; }}
</style></head><body>
<h1>{title}</h1>
<p class="legend">The answers of speculative decoding. <span class="a">Each</span><span class="b">colour</span> is one
verification step: what it accepted of the draft, and behind it the <b>target's own token</b>, as is the first token of
all. Long runs are what makes decoding fast.</p>
{radios}
<div class="prompts">
{articles}
</div>
</body></html>
"""


@frozen(kw_only=True)
class Shown:
    """A prompt and its answer. runs: (step from 1, or 0 for the prefill; text accepted; text of the target's token)."""

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
    """At most 200 prompts: those that differ first, then the first ones in order."""
    verdicts = ["sampled" if summary.losses is None else summary.losses.verdict(result) for result in summary.results]
    places = sorted(range(len(verdicts)), key=lambda place: (verdicts[place] in ("identical", "sampled"), place))
    chosen = sorted(places[:SHOWN])
    shown = [
        show(summary.prompts[place].sample(), summary.results[place].speculative, verdicts[place], processor)
        for place in chosen
    ]
    file.write_text(page(shown, len(verdicts)), encoding="utf-8")


def show(sample: TokenSample, answer: Decoded, verdict: str, processor: Processor) -> Shown:
    """A sample as the page has it; only its prompt is looked at."""
    prompt = sample.input_ids[: sample.prompt_tokens]
    images = int((prompt == processor.image_token_id).sum()) > 0 if processor.image_token_id is not None else False
    return Shown(
        id=sample.id,
        category=sample.category,
        prompt=_prompt_text(processor, prompt.tolist()),
        pictures=tuple(thumbnails(sample, processor)) if images else (),
        runs=tuple(runs(answer, processor)),
        answer=answer,
        verdict=verdict,
    )


def page(shown: Sequence[Shown], total: int) -> str:
    """The whole page. total: how many prompts there were."""
    by_tau = sorted(range(len(shown)), key=lambda place: (shown[place].tau is None, shown[place].tau or 0.0))
    by_kind = sorted(range(len(shown)), key=lambda place: shown[place].category)
    worst = {place: rank for rank, place in enumerate(by_tau)}
    kind = {place: rank for rank, place in enumerate(by_kind)}
    articles = "\n".join(
        _article(prompt, {"file": place, "worst": worst[place], "best": -worst[place], "kind": kind[place]})
        for place, prompt in enumerate(shown)
    )
    title = f"{total} prompts" if len(shown) == total else f"{len(shown)} of {total} prompts (all: prompts.jsonl)"
    radios = "\n".join(
        f'<label><input type="radio" name="order" id="{name}"{" checked" if name == "file" else ""}>{text}</label>'
        for name, text in ORDERS
    )
    orders = "\n".join(f"body:has(#{name}:checked) article {{ order: var(--{name}); }}" for name, _ in ORDERS)
    return PAGE.format(style=STYLE, orders=orders, title=title, radios=radios, articles=articles)


def runs(answer: Decoded, processor: Processor) -> Iterator[tuple[int, str, str]]:
    """The answer cut at its verification steps; a character of several tokens stands where it is complete."""
    cuts = [1]
    for accepted in answer.accepted:
        cuts += [cuts[-1] + accepted, cuts[-1] + accepted + 1]
    starts = [0, *cuts[:-1]]
    texts = list(_texts(processor, [answer.tokens[start:end] for start, end in zip(starts, cuts, strict=True)]))
    yield 0, "", texts[0]
    for step in range(len(answer.accepted)):
        yield step + 1, texts[1 + 2 * step], texts[2 + 2 * step]


def token_text(processor: Processor, token: int) -> str:
    """One token by itself."""
    return str(processor.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def thumbnails(sample: TokenSample, processor: Processor) -> Iterator[str]:
    """A data: address of each image as the target saw it, made small."""
    start = 0
    for t, h, w in sample.image_grid_thw.tolist():
        image = picture(sample.pixel_values[start : start + t * h * w], (t, h, w), processor)
        start += t * h * w
        image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, format="PNG")
        yield f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def picture(pixel_values: Tensor, grid: tuple[int, int, int], processor: Processor) -> Image.Image:
    """The first frame of an image from its pixel rows [t * h * w, channels * frames * p * p].

    Rows stand in the order (t, h / m, w / m, m, m), m being merge_size: those of the patches that become one token
    side by side.
    """
    t, h, w = grid
    settings = processor.image_processor
    m, p, frames = settings.merge_size, settings.patch_size, settings.temporal_patch_size
    patches = pixel_values.float().numpy().reshape(t, h // m, w // m, m, m, 3, frames, p, p)[0, ..., 0, :, :]
    channels_last = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * p, w * p, 3)
    colours = channels_last * np.array(settings.image_std) + np.array(settings.image_mean)
    return Image.fromarray((colours.clip(0, 1) * 255).round().astype(np.uint8))


def _prompt_text(processor: Processor, tokens: Sequence[int]) -> str:
    """The prompt with its special tokens; those of an image once, with their number."""
    parts = []
    for is_image, group in groupby(tokens, key=lambda token: token == processor.image_token_id):
        run = list(group)
        if is_image:
            parts.append(f"{processor.image_token} x {len(run)}")
        else:
            parts += _texts(processor, [run])
    return "".join(parts)


def _texts(processor: Processor, groups: Iterable[Sequence[int]]) -> Iterator[str]:
    """The text of each group of tokens; what a group begins of a character is shown with the group that ends it."""
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


def _article(shown: Shown, places: dict[str, int]) -> str:
    colour, verdict = VERDICTS[shown.verdict]
    tau = "no step" if shown.tau is None else f"tau {shown.tau:.2f}"
    facts = f"{visible(shown.category)}, {tau}, {shown.answer.steps} steps, {len(shown.answer.tokens)} tokens"
    pictures = "".join(f'<img alt="" src="{escape(address)}">' for address in shown.pictures)
    style = "; ".join(f"--{name}: {place}" for name, place in places.items())
    return (
        f'<article style="{style}"><div class="head"><h2>{visible(shown.id)}</h2>'
        f'<span class="verdict {colour}">{verdict}</span></div><div class="facts">{facts}</div>{pictures}'
        f'<details><summary>prompt</summary><div class="text">{visible(shown.prompt)}</div></details>'
        f'<div class="text">{"".join(_run(*run) for run in shown.runs)}</div></article>'
    )


def _run(step: int, accepted: str, own: str) -> str:
    if step == 0:
        return f'<b title="from the prefill">{visible(own)}</b>'
    colour = "a" if step % 2 else "b"
    last = f"<b>{visible(own)}</b>" if own else ""
    return f'<span class="{colour}" title="step {step}">{visible(accepted)}{last}</span>'
