"""preview.html: what it shows, that data of unknown origin stays text, and that it is the same each time."""

import base64
import html
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from chat_samples import LONG_ANSWER, conversation, png, run_tokenize, write_samples
from fake_stage import FakeStage
from PIL import Image

from ops.artifacts import TokenShards
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.preview import Preview

EVIL = "</span><script>alert(1)</script> \" onload='x' & \u202e {count} <img src=http://a/b>"


class Page(HTMLParser):
    """Tags with their attributes in order, and the text of each token's span with its class and title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = [("", {})]
        self.tokens: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.tags[-1]
        if tag == "span" and "title" in attributes:
            self.tokens.append((data, attributes["class"], attributes["title"]))

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", {}))


@pytest.fixture(scope="module")
def processor_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    write_builtin_processor(folder, [[{"role": "user", "content": [{"type": "text", "text": "Hm? word end"}]}]], 320)
    return folder


def preview(folder, conversations, processor_dir, **config) -> tuple[str, FakeStage]:
    samples = write_samples(folder / "in", conversations)
    stage = run_tokenize(folder, samples, processor=str(processor_dir), min_loss_tokens=1, **config)
    return (stage.out_dir / "preview.html").read_text("utf-8"), stage


def test_every_token_is_shown_with_id_position_and_mask(tmp_path, processor_dir):
    text, stage = preview(tmp_path, [conversation(("user", "Hm?"), ("assistant", "Yes.\nNo."))], processor_dir)
    sample = TokenReader(stage.artifact(TokenShards)).sample(0)
    decode = load_processor(str(processor_dir)).tokenizer.decode
    expected = [
        (decode([token]).replace("\n", "\u21b5\n"), "l" if learnt else "", f"id {token}, position {place}")
        for place, (token, learnt) in enumerate(zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True))
    ]
    assert expected == Page(text).tokens


@pytest.mark.parametrize("contexts", ["whole", "served"])
def test_every_answer_is_marked_with_its_number_where_it_begins_and_counted(tmp_path, processor_dir, contexts):
    turns = (("user", "Hm?"), ("assistant", "Yes."), ("user", "So?"), ("assistant", "No."))
    text, stage = preview(tmp_path, [conversation(*turns)], processor_dir, contexts=contexts)
    sample = TokenReader(stage.artifact(TokenShards)).sample(0)
    first, second, rest = re.split(r"<b>&?[^<]*</b>", text.split('<div class="tokens">')[1])
    assert sample.prompt_tokens == (first + second).count("<span")
    mask = sample.loss_mask.tolist()
    assert mask.index(True) == first.count("<span") and len(mask) == (first + second + rest).count("<span")
    assert ["\u25b61", "\u25b62"] == [html.unescape(mark) for mark in re.findall("<b>([^<]*)</b>", text)[1:]]
    told = f"{len(mask)} tokens, {sum(mask)} learnt in 2 answers"
    kinds = f" ({sum(mask) - 2} text, 2 end)" if contexts == "served" else ""
    assert f'<p class="facts">text, {told}{kinds}</p>' in text


def test_images_are_small_data_addresses_and_their_tokens_one_span(tmp_path, processor_dir):
    image = conversation(("user", "Hm?"), ("assistant", "Yes."), image=png(400, 200))
    text, _ = preview(tmp_path, [image], processor_dir)
    (address,) = [attributes["src"] for tag, attributes in Page(text).tags if tag == "img"]
    encoded = re.fullmatch(r"data:image/png;base64,([A-Za-z0-9+/=]+)", address).group(1)
    thumbnail = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert (88, 40) == thumbnail.size  # as the target gets it
    assert [("<|image_pad|> x 55", "i")] == [token[:2] for token in Page(text).tokens if token[1] == "i"]


@pytest.mark.parametrize("size", [(16, 24), (64, 32), (40, 40)])
def test_the_picture_of_pixel_values_is_the_image_that_was_not_resized(processor_dir, size):
    drawn = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    processor = load_processor(str(processor_dir))
    made = processor.pixels(Image.fromarray(drawn))
    picture = processor.picture(made["pixel_values"], made["image_grid_thw"][0].tolist())
    assert np.array_equal(drawn, np.asarray(picture))


def test_texts_and_ids_of_unknown_origin_stay_texts(tmp_path, processor_dir):
    rows = [conversation(("user", EVIL), ("assistant", EVIL), image=png(16, 16))]
    samples = write_samples(tmp_path / "in", rows)
    file = tmp_path / "in/samples.jsonl"
    file.write_text(file.read_text().replace('"s0"', '"<script>alert(2)</script>\\" onload=\\"x"'))
    stage = run_tokenize(tmp_path, samples, processor=str(processor_dir), min_loss_tokens=1)
    text = (stage.out_dir / "preview.html").read_text("utf-8")
    tags = Page(text).tags
    assert {"script", "iframe", "link", "object"}.isdisjoint(tag for tag, _ in tags)
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert all(
        value.startswith("data:") for _, attributes in tags for name, value in attributes.items() if name == "src"
    )
    assert "\u202e" not in text
    assert "default-src 'none'" in text
    shown = "".join(token for token, _, _ in Page(text).tokens)
    assert "<script>alert(1)</script>" in shown


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [("iiitttt", "iitt"), ("tttttti", "ttti"), ("iiiiii", "iiii"), ("ti", "ti"), ("tttiii", "ttii")],
)
def test_half_of_the_samples_have_images_where_both_kinds_exist(tmp_path, processor_dir, kinds, expected):
    rows = [
        conversation(("user", "Hm?"), ("assistant", "Yes."), image=png(16, 16) if kind == "i" else None)
        for kind in kinds
    ]
    text, _ = preview(tmp_path, rows, processor_dir, preview_samples=4)
    facts = re.findall(r'<p class="facts">(image|text), ', text)
    assert expected == "".join(fact[0] for fact in facts)


def test_the_preview_shows_the_train_split_only_and_is_the_same_each_time(tmp_path, processor_dir):
    rows = [
        conversation(("user", "Hm?"), ("assistant", LONG_ANSWER), split=split, image=png(24, 16))
        for split in ("test", "train", "val")
    ]
    first, _ = preview(tmp_path / "a", rows, processor_dir)
    second, _ = preview(tmp_path / "b", rows, processor_dir, workers=3)
    assert first == second
    assert ["s1"] == re.findall("<h2>(.*?)</h2>", first)


def test_samples_of_every_source_are_shown_in_turn(tmp_path, processor_dir):
    rows = [conversation(("user", "Hm?"), ("assistant", "Yes.")) for _ in range(9)]
    samples = write_samples(tmp_path / "in", rows)
    file = tmp_path / "in/samples.jsonl"
    names = [*(f"log:{place}" for place in range(6)), "chat:6", "chat:7", "own"]
    text = file.read_text()
    for place, name in enumerate(names):
        text = text.replace(f'"s{place}"', f'"{name}"')
    file.write_text(text)
    config = {"processor": str(processor_dir), "min_loss_tokens": 1, "preview_samples": 4}
    shown = (run_tokenize(tmp_path, samples, **config).out_dir / "preview.html").read_text("utf-8")
    assert ["log:0", "log:1", "chat:6", "own"] == re.findall("<h2>(.*?)</h2>", shown)
    assert "<h1>4 of 9 samples to train on" in shown and "call</span>." not in shown


def test_reasoning_and_calls_have_colours_and_a_legend_where_kinds_are_known(tmp_path, processor_dir):
    processor = load_processor(str(processor_dir))
    ids = processor.tokenizer("one two three four", return_tensors="pt").input_ids[0]
    page = Preview(3, processor)
    for name, of_sample in (("a:1", [0, 2, 2, 4]), ("a:2", [0, 2, 2, 4]), ("a:3", [0, 2, 2, 4]), ("a:4", [1, 2, 3, 4])):
        kinds = torch.tensor((of_sample * len(ids))[: len(ids)], dtype=torch.uint8)
        nothing = torch.empty(0, 4), torch.empty(0, 3, dtype=torch.int64)
        page.add(TokenSample(name, "text", ids, kinds > 0, *nothing, 1, kinds=kinds))
    assert ["a:1", "a:2", "a:4"] == [shown.sample_id for shown in page.chosen()]
    page.write(tmp_path / "preview.html")
    text = (tmp_path / "preview.html").read_text("utf-8")
    assert '<span class="call">call</span>.' in text
    for kind in ("reasoning", "call"):  # every second token has a colour of its kind too, not that of other learnt ones
        assert f".tokens span.{kind}:nth-of-type(even) {{ background: var(--{kind}-other); }}" in text
    found = [(kind, title.partition(",")[0]) for _, kind, title in Page(text).tokens][-len(ids) :]
    assert [("l reasoning", "reasoning"), ("l", "text"), ("l call", "call"), ("l", "end")] == found[:4]
