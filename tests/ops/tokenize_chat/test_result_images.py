"""Images in the results of tools: ids, mask, pixels and grids of every context against a slow reference, in which
transformers' processor renders the prompt, the answer is written by hand, and the processor reads both.
"""

from __future__ import annotations

import io
import itertools

import pytest
from agent_rows import TOOLS, calls, conversation, say
from agent_templates import EXTENDS, with_parts
from chat_samples import SERVED, real_processor, run_tokenize, summary_of
from PIL import Image
from result_images import RAINY, SEEN, SHOWING, SUNNY, WRITES, images_of, shown, write_seen

from ops.artifacts import TokenShards
from ops.lib.data.token_shards import TokenReader
from ops.lib.vision.template_kinds import clock_now


def tokenized(folder, samples, template, **options):
    """The stage of these samples with a chat template, and its token samples."""
    folder.mkdir(exist_ok=True)
    (folder / "template").write_text(template)
    stage = run_tokenize(folder, samples, **SERVED | {"chat_template": str(folder / "template")} | options)
    reader = TokenReader(stage.artifact(TokenShards))
    return stage, [reader.sample(place) for place in range(len(reader))]


def pictures(messages):
    return [Image.open(io.BytesIO(image)) for image in images_of(messages)]


def read(real, text, messages):
    """What transformers' processor makes of a text with its images, which are the first of the conversation."""
    seen = pictures(messages)[: text.count("<|image_pad|>")]
    return real(text=[text], **({"images": seen} if seen else {}))


def expected(real, name, messages):
    """(text, spans that are learnt) of every context."""
    contexts = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = real.apply_chat_template(
            messages[:turn], tools=TOOLS, add_generation_prompt=True, tokenize=False, strftime_now=clock_now
        )
        text = prompt + WRITES[name](message)
        spans = contexts.pop()[1] if contexts and prompt.startswith(contexts[-1][0]) else []
        contexts.append((text, [*spans, (len(prompt), len(text))]))
    return contexts


@pytest.mark.parametrize("name", SHOWING)
def test_every_context_is_the_prompt_of_transformers_processor_and_the_answer_behind_it(tmp_path, name):
    stage, samples = tokenized(tmp_path, write_seen(tmp_path / "in"), SHOWING[name])
    real = real_processor(stage.out_dir / "processor")
    wanted = [(messages, *context) for messages in SEEN.values() for context in expected(real, name, messages)]
    assert len(wanted) == len(samples) == {"qwen3-vl": 4, "strips": 10, "rewrites": 6}[name]
    for (messages, text, spans), sample in zip(wanted, samples, strict=True):
        whole = read(real, text + "\n", messages)  # which every template writes behind an answer
        assert whole["input_ids"][0] == sample.input_ids.tolist()
        mask = [False] * len(sample.input_ids)
        for start, end in spans:
            first, behind = (len(read(real, text[:place], messages)["input_ids"][0]) for place in (start, end))
            mask[first:behind] = [True] * (behind - first)
        assert mask == sample.loss_mask.tolist()
        assert sample.prompt_tokens == len(read(real, text[: spans[-1][0]], messages)["input_ids"][0])
        if "<|image_pad|>" in text:
            assert whole["image_grid_thw"].tolist() == sample.image_grid_thw.tolist()
            assert whole["pixel_values"].tolist() == sample.pixel_values.tolist()
        assert ("<|image_pad|>" in text) == sample.has_images


def test_a_template_that_extends_gives_the_same_of_whole_conversations(tmp_path):
    both = {}
    for contexts in ("served", "whole"):
        samples = write_seen(tmp_path / contexts / "in")
        _, both[contexts] = tokenized(tmp_path / contexts, samples, with_parts(EXTENDS), contexts=contexts)
    assert len(both["served"]) == len(both["whole"]) == len(SEEN)
    for served, whole in zip(*both.values(), strict=True):
        for name in ("input_ids", "loss_mask", "pixel_values", "image_grid_thw"):
            assert getattr(served, name).tolist() == getattr(whole, name).tolist()


def test_a_sample_that_ends_behind_an_earlier_answer_has_the_images_before_it(tmp_path):
    _, [_, whole, *_] = tokenized(tmp_path / "whole", write_seen(tmp_path / "in"), SHOWING["qwen3-vl"])
    for longest, images in ((len(whole.input_ids) - 2, 4), (whole.answers[2][0], 2)):
        chain = write_seen(tmp_path / f"in{longest}", {"chain": SEEN["chain"]})
        vocabulary = {"processor": str(tmp_path / "whole" / "out" / "processor"), "max_length": longest}
        _, [shorter] = tokenized(tmp_path / str(longest), chain, SHOWING["qwen3-vl"], **vocabulary)
        length = len(shorter.input_ids)
        assert length <= longest and images == len(shorter.image_grid_thw)
        assert whole.input_ids[:length].tolist() == shorter.input_ids.tolist()
        assert whole.pixel_values[: len(shorter.pixel_values)].tolist() == shorter.pixel_values.tolist()


ONE_TEXT = with_parts(EXTENDS).replace("<tool_response>' + shown(message.content)", "<tool_response>' + text")
TEXTS_ONLY = {
    "leaves them out": ONE_TEXT.replace(
        "{%- if message.role == 'tool' %}",
        "{%- if message.role == 'tool' %}{%- set text = message.content if message.content is string else "
        "message.content|selectattr('type', 'equalto', 'text')|map(attribute='text')|join %}",
    ),
    "writes the list": ONE_TEXT.replace(
        "{%- if message.role == 'tool' %}", "{%- if message.role == 'tool' %}{%- set text = message.content|string %}"
    ),
    "fails": ONE_TEXT.replace(
        "{%- if message.role == 'tool' %}", "{%- if message.role == 'tool' %}{%- set text = message.content + '' %}"
    ),
}


@pytest.mark.parametrize("contexts", ["served", "whole"])
@pytest.mark.parametrize("rule", TEXTS_ONLY)
def test_a_template_that_shows_no_images_of_results_drops_their_samples_by_name(tmp_path, rule, contexts):
    assert TEXTS_ONLY[rule] != with_parts(EXTENDS)
    stage, samples = tokenized(tmp_path, write_seen(tmp_path / "in"), TEXTS_ONLY[rule], contexts=contexts)
    assert ["text"] == [sample.id for sample in samples]
    dropped = {"images of tool results not shown by the chat template": 3}
    assert dropped == summary_of(stage)["dropped"]
    assert any("use a template that shows them (chat_template)" in text for text in stage.warnings)


def test_prompts_alone_are_checked_too(tmp_path):
    asked = {"a": conversation(*SEEN["one"], say("user", "And now?")), "b": [say("user", "Hm?")]}
    for template, kept in ((SHOWING["qwen3-vl"], ["a", "b"]), (TEXTS_ONLY["leaves them out"], ["b"])):
        for contexts in ("served", "whole"):
            folder = tmp_path / f"{contexts}{len(kept)}"
            options = {"prompts_only": True, "contexts": contexts}
            _, samples = tokenized(folder, write_seen(folder / "in", asked), template, **options)
            assert kept == [sample.id for sample in samples]


BY_CALL = with_parts(EXTENDS).replace(
    "{%- for message in messages %}",
    "{%- set sorted = namespace(all=[]) %}{%- for message in messages if message.role != 'tool' %}"
    "{%- set sorted.all = sorted.all + [message] %}{%- for call in message.tool_calls or [] %}"
    "{%- for result in messages if result.tool_call_id == call.id %}{%- set sorted.all = sorted.all + [result] %}"
    "{%- endfor %}{%- endfor %}{%- endfor %}{%- for message in sorted.all %}",
    1,
)


def test_results_that_a_template_puts_in_the_order_of_their_calls_must_have_it_if_they_have_images(tmp_path):
    ordered = conversation(
        say("user", "Both?"), calls("Paris", "Rome"), shown("tool", None), shown("tool", None, None), SUNNY
    )
    swapped = [*ordered[:2], ordered[3], ordered[2], *ordered[4:]]
    one = conversation(say("user", "Both?"), calls("Paris", "Rome"), shown("tool", None), say("tool", "wet"), RAINY)
    cases = {"ordered": ordered, "swapped": swapped, "one image": [*one[:2], one[3], one[2], *one[4:]]}
    stage, samples = tokenized(tmp_path, write_seen(tmp_path / "in", cases), BY_CALL)
    assert ["ordered", "one image"] == [sample.id for sample in samples]
    assert {"images of tool results in another order than their calls": 1} == summary_of(stage)["dropped"]
    _, samples = tokenized(tmp_path / "in order", write_seen(tmp_path / "again", cases), SHOWING["qwen3-vl"])
    assert list(cases) == [sample.id for sample in samples]
    assert list(itertools.chain(*(each.image_grid_thw.tolist() for each in samples))) == [
        grid for messages in cases.values() for grid in grids_of(messages)
    ]


def grids_of(messages):
    return [[1, image.height // 4, image.width // 4] for image in pictures(messages)]
