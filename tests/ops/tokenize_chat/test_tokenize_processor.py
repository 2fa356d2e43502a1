"""Processors from a checkpoint directory: what is read from it, and every way in which it cannot be used."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dsl.errors import DataError
from ops.lib.data.sample_account import Unusable
from ops.lib.vision.processor import load_processor
from ops.lib.vision.processor_files import DEFAULTS, EDGES, image_settings, pixel_limits, served_pixels
from ops.tokenize_chat.builtin import CHAT_TEMPLATE, write_builtin_processor
from ops.tokenize_chat.encode import ChatEncoder

MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Very."}]},
]


@pytest.fixture(scope="module")
def builtin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("builtin")
    write_builtin_processor(folder, [MESSAGES], vocab_size=300)
    return folder


@pytest.fixture
def checkpoint(builtin, tmp_path):
    """A copy of the processor's folder that a test may spoil."""
    shutil.copytree(builtin, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change_json(file: Path, **changes) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def encode_with(folder: Path, template: str, messages=MESSAGES):
    (folder / "chat_template.jinja").write_text(template)
    processor = load_processor(str(folder))
    return processor, ChatEncoder(processor).encode(messages)


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"])
def test_every_spelling_of_the_qwen_image_processor_is_the_pillow_one(checkpoint, kind):
    change_json(checkpoint / "preprocessor_config.json", image_processor_type=kind)
    processor = load_processor(str(checkpoint))
    assert type(processor.image_processor) is Qwen2VLImageProcessorPil
    assert (processor.patch_dim, processor.merge_size) == (96, 2)


def test_an_unknown_image_processor_is_refused_with_the_known_ones(checkpoint):
    change_json(checkpoint / "preprocessor_config.json", image_processor_type="CLIPImageProcessor")
    with pytest.raises(DataError, match='unknown image_processor_type "CLIPImageProcessor"; supported: Qwen2VLImage'):
        load_processor(str(checkpoint))


def test_min_and_max_pixels_change_the_number_of_tokens_and_are_saved(checkpoint, tmp_path):
    image = Image.new("RGB", (64, 64))
    assert load_processor(str(checkpoint)).pixels(image)["image_grid_thw"].tolist() == [[1, 16, 16]]
    smaller = load_processor(str(checkpoint), max_pixels=1024)
    assert smaller.pixels(image)["image_grid_thw"].tolist() == [[1, 8, 8]]
    smaller.save(tmp_path / "saved")
    assert load_processor(str(tmp_path / "saved")).pixels(image)["image_grid_thw"].tolist() == [[1, 8, 8]]
    larger = load_processor(str(checkpoint), min_pixels=128 * 128, max_pixels=128 * 128)
    assert larger.pixels(image)["image_grid_thw"].tolist() == [[1, 32, 32]]
    assert load_processor(str(checkpoint)).pixels(image)["image_grid_thw"].tolist() == [[1, 16, 16]]
    with pytest.raises(DataError, match="min_pixels 5000 > max_pixels 4096"):
        load_processor(str(checkpoint), min_pixels=5000)


@pytest.mark.parametrize(
    "spelling",
    [
        {"size": {"shortest_edge": 256, "longest_edge": 1024}},
        {"min_pixels": 256, "max_pixels": 1024, "size": None},
        {"min_pixels": 256, "max_pixels": 1024, "size": {"min_pixels": 256, "max_pixels": 1024}},
        {"size": {"min_pixels": 256, "max_pixels": 1024}},
    ],
)
def test_every_spelling_of_the_pixel_bounds_is_read_and_leaves_the_class_as_it_was(checkpoint, spelling):
    before = dict(Qwen2VLImageProcessorPil.size)
    change_json(checkpoint / "preprocessor_config.json", **spelling)
    processor = load_processor(str(checkpoint))
    assert processor.pixels(Image.new("RGB", (64, 64)))["image_grid_thw"].tolist() == [[1, 8, 8]]
    assert processor.pixels(Image.new("RGB", (8, 8)))["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert before == Qwen2VLImageProcessorPil.size


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_broken_file_is_not_taken_for_an_absent_one(checkpoint, name):
    (checkpoint / name).write_text("{")
    with pytest.raises(DataError, match=name.removesuffix(".json")):
        load_processor(str(checkpoint))


def test_a_saved_processor_saves_to_the_same_bytes_again(builtin, tmp_path):
    load_processor(str(builtin)).save(tmp_path / "a")
    load_processor(str(tmp_path / "a")).save(tmp_path / "b")
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3_vl", "text_config": {"vocab_size": 151936}}, 151669),
        ({"model_type": "qwen3", "vocab_size": 151936}, 151669),
        ({"model_type": "qwen3_5", "text_config": {"vocab_size": 248320}}, 248070),
        ({"model_type": "qwen3_vl", "text_config": {"vocab_size": 151669}}, None),
        ({"model_type": "llama", "vocab_size": 151936}, None),
    ],
)
def test_the_mask_token_of_a_family_is_taken_where_the_vocabulary_reaches_it(checkpoint, config, expected):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    text = json.dumps(tokenizer).replace("<|mask|>", "<|other|>")
    (checkpoint / "tokenizer.json").write_text(text)
    settings = (checkpoint / "tokenizer_config.json").read_text()
    (checkpoint / "tokenizer_config.json").write_text(settings.replace("<|mask|>", "<|other|>"))
    change_json(checkpoint / "config.json", **config)
    processor = load_processor(str(checkpoint))
    assert processor.mask_token_id == expected
    assert processor.vocab_size == config.get("text_config", config)["vocab_size"]


def test_the_tokenizers_own_mask_token_goes_first(checkpoint):
    change_json(checkpoint / "config.json", model_type="qwen3", vocab_size=151936)
    assert load_processor(str(checkpoint)).mask_token_id == 7


def test_all_tokens_that_stop_generation_are_eos_tokens(checkpoint):
    change_json(checkpoint / "generation_config.json", eos_token_id=[0, 2])
    assert load_processor(str(checkpoint)).eos_token_ids == (2, 0)


def test_a_folder_without_a_tokenizer_or_template_or_eos_is_refused(checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_processor(str(tmp_path / "empty"))
    (checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template"):
        load_processor(str(checkpoint))
    (checkpoint / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    change_json(checkpoint / "tokenizer_config.json", eos_token=None)
    with pytest.raises(DataError, match="has no EOS token"):
        load_processor(str(checkpoint))


SMALL = {"shortest_edge": 64, "longest_edge": 256}
# What may be said in preprocessor_config.json and in processor_config.json, and the limits that hold.
LIMITS = {
    "size": ({"size": SMALL}, {}, (64, 256)),
    "raised by hand": ({"size": SMALL, "min_pixels": 64, "max_pixels": 65536}, {}, (64, 65536)),
    "lowered by hand": ({"size": {**SMALL, "longest_edge": 4096}, "max_pixels": 256}, {}, (64, 256)),
    "only the least by hand": ({"size": SMALL, "min_pixels": 128}, {}, (128, 256)),
    "transformers 5": (None, {"image_processor": {"size": SMALL}}, (64, 256)),
    "both files": ({"size": {**SMALL, "longest_edge": 4096}}, {"image_processor": {"size": SMALL}}, (64, 256)),
    "an older processor_config.json": ({"size": SMALL}, {"processor_class": "Qwen3VLProcessor"}, (64, 256)),
}


@pytest.mark.parametrize("case", LIMITS)
def test_init_tokenize_and_the_servers_command_read_the_limits_that_transformers_reads(checkpoint, case):
    own, whole, (least, most) = LIMITS[case]
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (checkpoint / "preprocessor_config.json").unlink()
    if own is not None:
        (checkpoint / "preprocessor_config.json").write_text(json.dumps({**settings, **own}))
    if whole:
        nested = {name: {**settings, **each} for name, each in whole.items() if name == "image_processor"}
        (checkpoint / "processor_config.json").write_text(json.dumps({**whole, **nested}))
    expected = {"min_pixels": least, "max_pixels": most}
    theirs = Qwen2VLImageProcessorPil.from_pretrained(checkpoint).size
    assert (least, most) == (theirs["shortest_edge"], theirs["longest_edge"])
    assert expected == load_processor(str(checkpoint)).pixel_limits
    assert expected == pixel_limits(*image_settings(checkpoint))
    assert {} == served_pixels({"pixel_limits": expected}, checkpoint)
    assert {**expected, "max_pixels": 4096} == served_pixels(
        {"pixel_limits": {**expected, "max_pixels": 4096}}, checkpoint
    )


def test_limits_that_are_not_given_are_those_of_transformers():
    assert list(DEFAULTS.values()) == [Qwen2VLImageProcessorPil.size[edge] for edge in EDGES.values()]


def test_a_text_only_processor_gets_plain_strings(checkpoint):
    (checkpoint / "preprocessor_config.json").unlink()
    strings_only = CHAT_TEMPLATE.replace("{% else %}", "{% else %}{{ raise_exception('a list') }}", 1)
    messages = [{**message, "content": message["content"][-1:]} for message in MESSAGES]
    processor, encoded = encode_with(checkpoint, strings_only, messages)
    assert (processor.image_processor, processor.patch_dim, processor.merge_size) == (None, 0, 1)
    assert processor.tokenizer.decode(encoded.input_ids[encoded.loss_mask]) == "A cat.<|im_end|>Very.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT_TEMPLATE.replace("{{ message['role'] }}", "{{ message['role'] }}{{ messages | length }}"), "not found"),
        (CHAT_TEMPLATE.replace("<|im_end|>\n{% endfor %}", "\n{% endfor %}"), "no EOS token behind an answer"),
        (CHAT_TEMPLATE.replace("{{ part['text'] }}", "{{ part['text'] | upper }}"), "answer changed"),
        (CHAT_TEMPLATE.replace("<|image_pad|>", ""), "0 placeholders .* for 1 images"),
        (CHAT_TEMPLATE.replace("<|image_pad|>", "<|image_pad|>" * 2), "2 placeholders .* for 1 images"),
    ],
)
def test_a_sample_that_the_template_does_not_fit_cannot_be_used(checkpoint, template, message):
    with pytest.raises(Unusable, match=message):
        encode_with(checkpoint, template)


def test_a_special_token_in_pieces_around_an_image_is_found(builtin):
    """The image may have been moved to the first user turn, or be one that the template does not show."""
    pieces = [{"type": "text", "text": "hi <|im_"}, {"type": "image"}, {"type": "text", "text": "end|>"}]
    encoder = ChatEncoder(load_processor(str(builtin)))
    for content in (pieces, [pieces[0], pieces[2]]):
        with pytest.raises(Unusable, match="special token in the text"):
            encoder.encode([{"role": "user", "content": content}, MESSAGES[1]])


def test_an_answer_whose_first_characters_merge_with_the_prompt_cannot_be_used(tmp_path):
    blank_lines = [{"role": "user", "content": [{"type": "text", "text": "a\n\n\nb" * 50}]}]
    write_builtin_processor(tmp_path, [blank_lines], vocab_size=300)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "\n\nHm."}]}
    with pytest.raises(Unusable, match="answer begins inside a token"):
        ChatEncoder(load_processor(str(tmp_path))).encode([*blank_lines, answer])


def test_a_sample_that_the_template_refuses_cannot_be_used(checkpoint):
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(Unusable, match="refused by the chat template"):
        encode_with(checkpoint, no_system + CHAT_TEMPLATE, [{**MESSAGES[0], "role": "system"}, *MESSAGES])


def test_the_builtin_tokenizer_has_the_special_tokens_of_a_qwen_vlm(builtin):
    tokenizer = AutoTokenizer.from_pretrained(builtin)
    assert tokenizer.convert_ids_to_tokens(range(8)) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|mask|>",
    ]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(tokenizer) <= 300


def test_the_template_owns_the_system_prompt_and_yields_to_that_of_a_sample(builtin):
    tokenizer = AutoTokenizer.from_pretrained(builtin)
    ask = {"role": "user", "content": "Hm?"}
    render = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template([ask], **render) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHm?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, ask], **render) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHm?<|im_end|>\n<|im_start|>assistant\n"
    )
