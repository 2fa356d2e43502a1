"""prompts.html: texts escaped and whole, runs at the steps, images as the target saw them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ops.evaluate.page import page, picture, runs, show, thumbnails
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.vision.processor import Processor, load_processor


@pytest.fixture(scope="module")
def processor(tokens) -> Processor:
    return load_processor(str(tokens.path / "processor"))


def sample(processor: Processor, text: str, sample_id: str = "a", category: str = "text") -> TokenSample:
    ids = torch.tensor(processor.tokenizer.encode(text))
    none = torch.zeros(len(ids), dtype=torch.bool)
    empty = torch.empty(0, 3, dtype=torch.int64)
    return TokenSample(sample_id, category, ids, none, torch.empty(0, processor.patch_dim), empty, len(ids))


def answer(processor: Processor, text: str, *accepted: int) -> Decoded:
    return Decoded(tuple(processor.tokenizer.encode(text)), accepted)


@settings(max_examples=50)
@given(st.data())
def test_the_runs_of_an_answer_are_its_text_whatever_characters_the_steps_cut(processor, data):
    text = data.draw(st.text("a日é🙂 z\n", min_size=1, max_size=12))
    tokens = processor.tokenizer.encode(text)
    accepted, left = [], len(tokens) - 1
    while left > 0:
        accepted.append(data.draw(st.integers(0, 3)))
        left -= accepted[-1] + 1
    found = list(runs(Decoded(tuple(tokens), tuple(accepted)), processor))
    assert list(range(len(accepted) + 1)) == [step for step, _, _ in found]
    assert text == "".join(accepted + own for _, accepted, own in found)


def test_a_step_is_what_it_accepted_and_the_targets_own_token(processor):
    tokens = processor.tokenizer.encode("abcdef")
    texts = [processor.tokenizer.decode([token]) for token in tokens]
    first, second = 1, len(tokens) - 4
    assert second >= 0
    found = list(runs(Decoded(tuple(tokens), (first, second)), processor))
    assert [
        (0, "", texts[0]),
        (1, texts[1], texts[2]),
        (2, "".join(texts[3 : 3 + second]), texts[3 + second]),
    ] == found


def test_texts_are_escaped_and_the_page_loads_nothing(processor):
    evil = 'say <script>alert(1)</script>"&\u202e'
    accepted = len(processor.tokenizer.encode(evil)) - 2
    prompt = sample(processor, evil, f'<img src="x">{evil}', evil)
    shown = show(prompt, answer(processor, evil, accepted), "tie", processor)
    text = page([shown], 1)
    assert "<script" not in text
    assert 4 == text.count("&lt;script&gt;alert(1)&lt;/script&gt;")  # id, category, prompt, answer
    assert '<img src="x"' not in text
    assert "\u202e" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"(?:https?:)?//", text)
    assert "differs at a tie" in text


def test_prompts_can_be_ordered_by_tau_and_category_without_a_script(processor):
    prompt = sample(processor, "?")
    shown = [
        show(prompt, answer(processor, "abcdefghijk", *accepted), "identical", processor)
        for accepted in ((3, 3), (0, 0, 0), (), (9,))
    ]
    text = page(shown, 4)
    assert ["1", "0", "3", "2"] == re.findall(r"--worst: (\d+)", text)
    assert ["-1", "0", "-3", "-2"] == re.findall(r"--best: (-?\d+)", text)
    assert ["0", "1", "2", "3"] == re.findall(r"--file: (\d+)", text)
    for name in ("file", "worst", "best", "kind"):
        assert f"body:has(#{name}:checked) article {{ order: var(--{name}); }}" in text
        assert f'id="{name}"' in text
    assert "no step" in text
    assert "4 of 9 prompts" in page(shown, 9)


def test_an_image_is_shown_as_the_target_saw_it(processor):
    drawn = np.random.default_rng(0).integers(0, 256, size=(32, 48, 3), dtype=np.uint8)
    features = processor.pixels(Image.fromarray(drawn))
    t, h, w = features["image_grid_thw"][0].tolist()
    patch = processor.image_processor.patch_size
    resized = Image.fromarray(drawn).resize((w * patch, h * patch), Image.Resampling.BICUBIC)
    seen = picture(features["pixel_values"], (t, h, w), processor)
    assert (w * patch, h * patch) == seen.size
    assert np.abs(np.asarray(seen).astype(int) - np.asarray(resized).astype(int)).max() <= 1


def test_every_image_of_a_prompt_has_its_thumbnail(processor, tokens):
    images = [
        processor.pixels(Image.new("RGB", size, colour)) for size, colour in (((16, 16), "red"), ((32, 16), "blue"))
    ]
    seen = TokenSample(
        id="a",
        category="image",
        input_ids=torch.tensor([processor.image_token_id] * 6),
        loss_mask=torch.zeros(6, dtype=torch.bool),
        pixel_values=torch.cat([image["pixel_values"] for image in images]),
        image_grid_thw=torch.cat([image["image_grid_thw"] for image in images]),
        prompt_tokens=6,
    )
    assert 2 == len(list(thumbnails(seen, processor)))
    shown = show(seen, answer(processor, "abc"), "identical", processor)
    assert f"{processor.image_token} x 6" == shown.prompt
    assert 2 == page([shown], 1).count('<img alt="" src="data:image/png;base64,')
