"""Files of a checkpoint as real ones have them: where the chat template lies, code of their own, a slow tokenizer's."""

import json
import shutil

import pytest
import torch
from chat_samples import NoVideo, png
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from dsl.errors import DataError
from ops.lib.vision.chunks import ImageChunk
from ops.lib.vision.images import decode
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.template import Template

ASK = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "A cat. Yes, it's one."}]}

# As Qwen's VL checkpoints write it: parts or strings, images known by several keys, counted on demand.
VL_TEMPLATE = """\
{% set image_count = namespace(value=0) %}{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
{% set image_count.value = image_count.value + 1 %}\
{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def builtin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("builtin")
    write_builtin_processor(folder, [[ANSWER] * 3], vocab_size=320)
    return folder


@pytest.fixture
def checkpoint(builtin, tmp_path):
    shutil.copytree(builtin, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change_json(file, **changes) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


PLACES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "processor_config.json")


@pytest.mark.parametrize("places", [PLACES[:count] for count in range(1, 5)] + [PLACES[2:3], PLACES[0:3:2]], ids=str)
def test_the_chat_template_is_the_one_that_transformers_processor_takes(checkpoint, places):
    """Each place has another one; the tokenizer's own serves where the processor has none."""
    (checkpoint / "chat_template.jinja").unlink()
    for place in places:
        if place.endswith(".jinja"):
            (checkpoint / place).write_text(f"{{# {place} #}}")
        else:
            change_json(checkpoint / place, chat_template=f"{{# {place} #}}")
    settings, _ = Qwen3VLProcessor.get_processor_dict(str(checkpoint))
    expected = settings.get("chat_template", "{# tokenizer_config.json #}")
    assert expected == load_processor(str(checkpoint)).tokenizer.chat_template


def test_the_processors_template_is_saved_where_both_find_it_again(checkpoint, tmp_path):
    change_json(checkpoint / "chat_template.json", chat_template=VL_TEMPLATE)
    load_processor(str(checkpoint)).save(tmp_path / "saved")
    again = load_processor(str(tmp_path / "saved"))
    assert VL_TEMPLATE == again.tokenizer.chat_template
    assert VL_TEMPLATE == Qwen3VLProcessor.get_processor_dict(str(tmp_path / "saved"))[0]["chat_template"]


def test_a_text_model_has_the_tokenizers_template(checkpoint):
    (checkpoint / "preprocessor_config.json").unlink()
    expected = AutoTokenizer.from_pretrained(checkpoint).chat_template
    change_json(checkpoint / "chat_template.json", chat_template="{# other #}")
    assert expected == load_processor(str(checkpoint)).tokenizer.chat_template


def test_a_broken_chat_template_file_is_named(checkpoint):
    (checkpoint / "chat_template.json").write_text("{}")
    with pytest.raises(DataError, match="its chat template cannot be read: 'chat_template'"):
        load_processor(str(checkpoint))


def test_a_tokenizers_own_code_does_not_run_unless_it_is_trusted(checkpoint):
    (checkpoint / "tok.py").write_text('raise RuntimeError("it ran")\n')
    change_json(checkpoint / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tok.Tok"]})
    assert "TokenizersBackend" == type(load_processor(str(checkpoint)).tokenizer).__name__
    with pytest.raises(RuntimeError, match="it ran"):
        load_processor(str(checkpoint), trust_remote_code=True)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "auto_map", [{"AutoTokenizer": [None, "other/repo--tok.Tok"]}, ["other/repo--tok.Tok", None]], ids=["map", "list"]
)
def test_code_of_another_repository_is_refused_even_where_code_is_trusted(checkpoint, name, auto_map):
    change_json(checkpoint / name, auto_map=auto_map)
    with pytest.raises(DataError, match=rf"auto_map of {name} names code of another repository \(other/repo--tok.Tok"):
        load_processor(str(checkpoint), trust_remote_code=True)


@pytest.fixture
def vocab_and_merges(builtin, tmp_path):
    """A checkpoint of vocab.json and merges.txt, with the tokenizer class and the config of a real VLM's."""
    folder = tmp_path / "slow"
    folder.mkdir()
    model = json.loads((builtin / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    shutil.copyfile(builtin / "preprocessor_config.json", folder / "preprocessor_config.json")
    added = json.loads((builtin / "tokenizer.json").read_text())["added_tokens"]
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    decoder = {str(token["id"]): {flag: token[flag] for flag in flags} for token in added}
    change_json(
        folder / "tokenizer_config.json",
        tokenizer_class="Qwen2Tokenizer",
        added_tokens_decoder=decoder,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=VL_TEMPLATE,
    )
    change_json(folder / "chat_template.json", chat_template=VL_TEMPLATE)
    change_json(folder / "config.json", model_type="qwen3_vl", text_config={"vocab_size": 400})
    return folder


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # between the two libraries
def test_a_checkpoint_of_vocab_and_merges_gives_what_the_real_processor_gives(vocab_and_merges):
    processor = load_processor(str(vocab_and_merges))
    assert "Qwen2Tokenizer" == type(processor.tokenizer).__name__
    real = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(vocab_and_merges),
        tokenizer=AutoTokenizer.from_pretrained(vocab_and_merges),
        video_processor=NoVideo(),
        chat_template=VL_TEMPLATE,
    )
    image = decode(png(40, 24))
    text = real.apply_chat_template([ASK, ANSWER], tokenize=False)
    expected = real(text=[text], images=[image])
    encoded = ChatEncoder(processor).encode([ASK, ANSWER])
    chunk = ImageChunk.from_image(processor, image)
    place = encoded.input_ids.tolist().index(processor.image_token_id)
    ids = encoded.input_ids.tolist()
    ids[place : place + 1] = [processor.image_token_id] * chunk.num_tokens
    assert list(expected["input_ids"][0]) == ids
    assert torch.as_tensor(expected["pixel_values"]).tolist() == chunk.pixel_values.tolist()
    assert text == Template(processor).render([ASK, ANSWER])


def test_named_templates_without_a_default_are_refused_until_one_is_copied(checkpoint):
    text = (checkpoint / "chat_template.jinja").read_text()
    (checkpoint / "chat_template.jinja").unlink()
    change_json(checkpoint / "tokenizer_config.json", chat_template=[{"name": "rag", "template": text}])
    with pytest.raises(
        DataError, match=r"its chat templates are named rag, and none is the default; copy the one to use"
    ):
        load_processor(str(checkpoint))
    (checkpoint / "chat_template.jinja").write_text(text)
    assert text == load_processor(str(checkpoint)).tokenizer.get_chat_template()


def test_the_vocabulary_reaches_to_the_largest_id_of_a_tokenizer_with_gaps(checkpoint):
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    change_json(checkpoint / "tokenizer.json", model=model | {"vocab": model["vocab"] | {"far": 500}})
    processor = load_processor(str(checkpoint))
    assert 500 == processor.tokenizer.convert_tokens_to_ids("far")
    assert 501 == processor.vocab_size
