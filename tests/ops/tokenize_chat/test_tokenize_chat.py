"""Token shards: the same tokens as the real processor, masks that cover the answers exactly, and a full account."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from chat_samples import LONG_ANSWER, conversation, png, real_processor, run_tokenize, summary_of, write_samples
from fake_stage import FakeStage
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from transformers import AutoTokenizer

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TargetModel, TokenShards
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_jsonl
from ops.lib.data.image_packs import read_packed
from ops.lib.data.limited_process import LimitedProcess
from ops.lib.data.token_shards import TokenReader
from ops.tokenize_chat.builtin import MAX_PIXELS, MIN_PIXELS
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

TENSORS = {
    "input_ids": (torch.int32, 1),
    "loss_mask": (torch.uint8, 1),
    "token_offsets": (torch.int64, 1),
    "pixel_values": (torch.float32, 2),
    "pixel_offsets": (torch.int64, 1),
    "image_grid_thw": (torch.int64, 2),
    "image_offsets": (torch.int64, 1),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Forty digits and forty passages of prose, injected."""
    folder = tmp_path_factory.mktemp("chain")
    first = FakeStage(folder / "ingest")
    ingest(Ingest(source="builtin:digits", max_samples=40, seed=0), first)
    second = FakeStage(folder / "inject", {"samples": first.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("ingest")), second)
    return second.artifact(ImageSamples)


@pytest.fixture(scope="module")
def tokens(images, tmp_path_factory):
    stage = run_tokenize(tmp_path_factory.mktemp("tokenize"), images, vocab_size=600, shard_samples=16)
    return stage.artifact(TokenShards)


@pytest.fixture(scope="module")
def processor_dir(tokens):
    return tokens.path / "processor"


@pytest.fixture(scope="module")
def tokenizer(processor_dir):
    return AutoTokenizer.from_pretrained(processor_dir)


def test_tokens_and_pixels_equal_those_of_the_real_qwen3_vl_processor(images, tokens, processor_dir):
    real = real_processor(processor_dir)
    rows = {row["id"]: row for row in read_jsonl(images.path / "samples.jsonl")}
    reader = TokenReader(tokens)
    assert {record["category"] for record in reader.records} == {"image", "text"}
    for index in range(len(reader)):
        sample = reader.sample(index)
        row = rows[sample.id]
        text = real.apply_chat_template(row["messages"], tokenize=False)
        prompt = real.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
        pictures = {}
        if row["images"]:
            pictures = {"images": [Image.open(io.BytesIO(read_packed(images.path, row["images"][0])))]}
        expected = real(text=[text], **pictures)
        assert expected["input_ids"][0] == sample.input_ids.tolist()
        assert real(text=[prompt], **pictures)["input_ids"][0] == expected["input_ids"][0][: sample.prompt_tokens]
        assert bool(row["images"]) == ("pixel_values" in expected) == bool(len(sample.pixel_values))
        if row["images"]:
            assert expected["image_grid_thw"].tolist() == sample.image_grid_thw.tolist() == [[1, 4, 4]]
            assert expected["pixel_values"].tolist() == sample.pixel_values.tolist()
            assert expected["input_ids"][0].count(reader.info["image_token_id"]) == 4


def test_the_loss_mask_covers_exactly_the_answer_and_its_eos(tokens, tokenizer):
    reader = TokenReader(tokens)
    for index, record in enumerate(reader.records):
        sample = reader.sample(index)
        assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == record["label"] + "<|im_end|>"
        assert record["loss_tokens"] == int(sample.loss_mask.sum())
        assert record["prompt_tokens"] == sample.loss_mask.tolist().index(True)


def test_every_answer_of_a_conversation_is_in_the_mask_and_the_last_one_is_prompted(tmp_path):
    turns = [
        ("system", "Answer with one word."),
        ("user", "One or two? One."),
        ("assistant", "One."),
        ("user", "One."),
        ("assistant", "One.\n\nAnd two, naïve: 你好."),
        ("user", "Thanks."),
    ]
    samples = write_samples(tmp_path / "in", [conversation(*turns, image=png(24, 16))])
    reader = TokenReader(run_tokenize(tmp_path, samples, min_loss_tokens=1).artifact(TokenShards))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/processor")
    sample = reader.sample(0)
    spans = torch.tensor_split(sample.input_ids, (sample.loss_mask[1:] != sample.loss_mask[:-1]).nonzero()[:, 0] + 1)
    assert [tokenizer.decode(span) for span in spans[1::2]] == [
        "One.<|im_end|>",
        "One.\n\nAnd two, naïve: 你好.<|im_end|>",
    ]
    assert tokenizer.decode(sample.input_ids[: sample.prompt_tokens]) == (
        "<|im_start|>system\nAnswer with one word.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>One or two? One.<|im_end|>\n"
        "<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>user\nOne.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert reader.records[0]["label"] == "One.\n\nAnd two, naïve: 你好."


def test_prompts_are_those_of_the_answered_conversations_and_need_no_answer_and_no_train_split(tmp_path, processor_dir):
    ask, answer = ("user", "One or two? One."), ("assistant", LONG_ANSWER)
    talks = [
        conversation(ask, answer, image=png(24, 16), split="test"),
        conversation(ask, ("assistant", "One."), ("user", "One."), answer, split="test"),
    ]
    prompts = [conversation(*talk["turns"][:-1], image=talk["image"], split="test") for talk in talks]
    own = {"processor": str(processor_dir)}
    train = conversation(ask, answer)
    answered = run_tokenize(tmp_path / "answered", write_samples(tmp_path / "in", [*talks, train]), **own)
    expected = TokenReader(answered.artifact(TokenShards), "test")
    samples = write_samples(tmp_path / "prompts", [*talks, *prompts, conversation(("user", "x " * 400), split="test")])
    stage = run_tokenize(tmp_path / "asked", samples, prompts_only=True, max_length=300, **own)
    assert {"longer than max_length": 1} == summary_of(stage)["dropped"]
    reader = TokenReader(stage.artifact(TokenShards), "test")
    assert 4 == len(reader)
    assert [LONG_ANSWER.strip()] * 2 + ["", "One."] == [record["label"].strip() for record in reader.records]
    for place in range(4):
        sample, other = reader.sample(place), expected.sample(place % 2)
        assert sample.input_ids.tolist() == other.input_ids[: other.prompt_tokens].tolist()
        assert other.pixel_values.tolist() == sample.pixel_values.tolist()
        assert (len(sample.input_ids), False) == (sample.prompt_tokens, bool(sample.loss_mask.any()))


ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
# hypothesis also tries texts that it finds in the code, special tokens among them, which drop a sample.
TEXT = ANY_TEXT.map(str.strip).filter(lambda text: bool(text) and "<|" not in text and "<think" not in text)


@settings(max_examples=50)
@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_masked_tokens_decode_to_the_answers_whatever_the_text(tmp_path_factory, processor_dir, texts):
    folder = tmp_path_factory.mktemp("any")
    turns = [turn for ask, answer in texts for turn in (("user", ask), ("assistant", answer))]
    stage = run_tokenize(
        folder, write_samples(folder / "in", [conversation(*turns)]), processor=str(processor_dir), min_loss_tokens=1
    )
    sample = TokenReader(stage.artifact(TokenShards)).sample(0)
    decoded = AutoTokenizer.from_pretrained(processor_dir).decode(sample.input_ids[sample.loss_mask])
    assert decoded == "".join(answer + "<|im_end|>" for _, answer in texts)


def test_every_tensor_is_in_every_shard_with_offsets_that_fit(tokens):
    info = json.loads((tokens.path / "tokens.json").read_text())
    records = list(read_jsonl(tokens.path / "samples.jsonl"))
    assert [shard["file"] for shard in info["shards"]][:2] == ["train-00000.safetensors", "train-00001.safetensors"]
    assert sum(shard["samples"] for shard in info["shards"]) == len(records) == 80
    for shard in info["shards"]:
        with safe_open(tokens.path / shard["file"], framework="pt") as file:
            content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        assert {name: (tensor.dtype, tensor.ndim) for name, tensor in content.items()} == TENSORS
        assert content["pixel_values"].shape[1] == info["patch_dim"] == 96
        mine = [record for record in records if record["shard"] == shard["file"]]
        assert [record["row"] for record in mine] == list(range(shard["samples"]))
        assert {record["split"] for record in mine} == {shard["split"]}
        assert content["token_offsets"].diff().tolist() == [record["tokens"] for record in mine]
        assert content["image_offsets"].diff().tolist() == [int(record["category"] == "image") for record in mine]
        assert content["pixel_offsets"].diff().tolist() == [16 * int(record["category"] == "image") for record in mine]
        for name, offsets in (("input_ids", "token"), ("pixel_values", "pixel"), ("image_grid_thw", "image")):
            assert len(content[name]) == content[f"{offsets}_offsets"][-1]
        assert shard["tokens"] == len(content["input_ids"]) == len(content["loss_mask"])


def test_the_reader_keeps_the_order_of_a_split(tokens):
    everything, test = TokenReader(tokens), TokenReader(tokens, "test")
    assert [record["split"] for record in test.records] == ["test"] * len(test)
    wanted = [index for index, record in enumerate(everything.records) if record["split"] == "test"]
    for index, same in enumerate(wanted):
        assert test.sample(index).id == everything.sample(same).id
        assert test.sample(index).input_ids.tolist() == everything.sample(same).input_ids.tolist()


def test_a_text_only_sample_has_empty_pixel_tensors(tokens):
    reader = TokenReader(tokens)
    index = next(index for index, record in enumerate(reader.records) if record["category"] == "text")
    sample = reader.sample(index)
    assert (sample.pixel_values.shape, sample.pixel_values.dtype) == ((0, 96), torch.float32)
    assert (sample.image_grid_thw.shape, sample.image_grid_thw.dtype) == ((0, 3), torch.int64)
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (torch.int64, torch.bool)


def test_a_set_without_images_has_a_shard_with_every_tensor(tmp_path, processor_dir):
    samples = write_samples(tmp_path / "in", [conversation(("user", "Hm?"), ("assistant", "Yes."))])
    stage = run_tokenize(tmp_path, samples, processor=str(processor_dir), min_loss_tokens=1)
    with safe_open(stage.out_dir / "train-00000.safetensors", framework="pt") as file:
        assert file.get_tensor("pixel_values").shape == (0, 96)
        assert set(file.keys()) == set(TENSORS)


def test_the_same_samples_give_the_same_bytes(images, tokens, tmp_path):
    again = run_tokenize(tmp_path, images, vocab_size=600, shard_samples=16)
    assert tokens.digest == again.artifact(TokenShards).digest


def test_tokens_json_says_what_a_reader_needs(tokens, tokenizer):
    info = TokenReader(tokens).info
    shards = info.pop("shards")
    assert set(shards[0]) == {"file", "split", "samples", "tokens"}
    assert info == {
        "format": 1,
        "mask_token_id": tokenizer.convert_tokens_to_ids("<|mask|>"),
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_ids": [tokenizer.convert_tokens_to_ids("<|im_end|>")],
        "vocab_size": 600,
        "patch_dim": 96,
        "merge_size": 2,
        "image_backend": "pillow",
        "pixel_limits": {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS},
        "enable_thinking": None,
    }


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (conversation(("user", "Hm?"), ("assistant", "x1y2" * 100)), "longer than max_length"),
        (conversation(("user", "Hm?"), ("assistant", "No.")), "fewer than min_loss_tokens"),
        (conversation(("user", "<|image_pad|>"), ("assistant", LONG_ANSWER)), "special token in the text"),
        (conversation(("user", "Hm?"), ("assistant", LONG_ANSWER + "<|im_end|>")), "special token in the text"),
        (conversation(("user", "?"), ("assistant", LONG_ANSWER), image=png(2, 402)), "image refused by the processor"),
    ],
)
def test_a_sample_at_fault_is_dropped_with_its_reason(tmp_path, processor_dir, sample, reason):
    good = conversation(("user", "Hm?"), ("assistant", LONG_ANSWER))
    samples = write_samples(tmp_path / "in", [good, sample])
    stage = run_tokenize(tmp_path, samples, processor=str(processor_dir), max_length=250)
    summary = summary_of(stage)
    (loss,) = summary.pop("losses")
    assert f"50% of the samples (1 of 2) are dropped: 1 {reason}" == loss["text"]
    assert ("lower min_loss_tokens from 32" in loss["remedy"]) == (reason == "fewer than min_loss_tokens")
    assert summary == {
        "in": 2,
        "kept": 1,
        "dropped": {reason: 1},
        "splits": {"train": 1, "val": 0, "test": 0},
    }
    assert stage.logged[0] == ({"tokenize/kept": 1, "tokenize/dropped": 1}, 0)
    assert [record["id"] for record in TokenReader(stage.artifact(TokenShards)).records] == ["s0"]


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 60), max_size=12), split=st.sampled_from(["train", "val", "test"]))
def test_kept_and_dropped_add_up_and_no_answer_is_too_short(tmp_path_factory, processor_dir, lengths, split):
    folder = tmp_path_factory.mktemp("lengths")
    rows = [conversation(("user", "Hm?"), ("assistant", "the " * count + "end"), split=split) for count in lengths]
    rows.append(conversation(("user", "Hm?"), ("assistant", LONG_ANSWER)))
    stage = run_tokenize(folder, write_samples(folder / "in", rows), processor=str(processor_dir), shard_samples=3)
    summary = summary_of(stage)
    reader = TokenReader(stage.artifact(TokenShards))
    assert summary["in"] == len(rows) == summary["kept"] + sum(summary["dropped"].values())
    assert summary["kept"] == len(reader)
    assert all(record["loss_tokens"] >= 32 for record in reader.records)
    assert sum(summary["splits"].values()) == summary["kept"]


def test_a_train_split_that_is_empty_after_filtering_fails(tmp_path, processor_dir):
    samples = write_samples(
        tmp_path / "in",
        [
            conversation(("user", "Hm?"), ("assistant", LONG_ANSWER), split="test"),
            conversation(("user", "Hm?"), ("assistant", "No.")),
        ],
    )
    message = r"no sample is left in the train split:\n +1  fewer than min_loss_tokens \(first: sample \"s1\"\)"
    with pytest.raises(DataError, match=message):
        run_tokenize(tmp_path, samples, processor=str(processor_dir))


def test_images_need_a_processor_that_knows_images(tmp_path, processor_dir):
    text_only = tmp_path / "text-only"
    shutil.copytree(processor_dir, text_only)
    (text_only / "preprocessor_config.json").unlink()
    samples = write_samples(tmp_path / "in", [conversation(("user", "?"), ("assistant", "Yes."), image=png(16, 16))])
    with pytest.raises(DataError, match='sample "s0" has an image, but there is no image processor'):
        run_tokenize(tmp_path, samples, processor=str(text_only))


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_result_does_not_depend_on_the_number_of_workers(images, tokens, tmp_path, workers):
    again = run_tokenize(tmp_path, images, vocab_size=600, shard_samples=16, workers=workers)
    assert tokens.digest == again.artifact(TokenShards).digest


def target_with(processor_dir: Path, folder: Path) -> TargetModel:
    shutil.copytree(processor_dir, folder / "model")
    (folder / "target.json").write_text(json.dumps({"trust_remote_code": False, "mask_token_id": None}))
    return TargetModel(path=folder, digest="t")


def test_a_targets_own_processor_is_taken(images, tokens, processor_dir, tmp_path):
    stage = FakeStage(tmp_path, {"samples": images, "target": target_with(processor_dir, tmp_path / "target")})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), target=Ref("target"), shard_samples=16), stage)
    ours = TokenReader(stage.artifact(TokenShards))
    expected = TokenReader(tokens)
    assert [record["id"] for record in expected.records] == [record["id"] for record in ours.records]
    for index in range(len(ours)):
        assert expected.sample(index).input_ids.tolist() == ours.sample(index).input_ids.tolist()


def test_a_target_and_a_processor_together_are_refused():
    with pytest.raises(ConfigError, match="target and processor are both given"):
        TokenizeChat(samples=Ref("inject"), target=Ref("target"), processor="Qwen/Qwen3-4B")


def test_more_drops_than_max_dropped_fail(tmp_path, processor_dir):
    samples = write_samples(tmp_path / "in", [conversation(("user", "Hm?"), ("assistant", "No."))] * 2)
    with pytest.raises(DataError, match="more than max_dropped = 1 samples were dropped"):
        run_tokenize(tmp_path, samples, processor=str(processor_dir), max_dropped=1)


def test_the_start_of_the_renderer_is_no_part_of_the_progress_that_a_trial_is_scaled_by(tmp_path, monkeypatch):
    order: list[str] = []
    whole, started = FakeStage.progress, LimitedProcess.map

    def progress(stage, done, total):
        order.append(f"{done} of {total}")
        whole(stage, done, total)

    def rendered(process, shared, items, seconds=None):
        replies = started(process, shared, items, seconds)
        order.append(f"{len(replies)} rendered")
        return replies

    monkeypatch.setattr(FakeStage, "progress", progress)
    monkeypatch.setattr(LimitedProcess, "map", rendered)
    talks = [conversation(("user", f"Say {number}."), ("assistant", f"It is {number}.")) for number in range(4)]
    run_tokenize(tmp_path / "out", write_samples(tmp_path / "samples", talks), min_loss_tokens=1)
    assert ["1 rendered", "0 of 4", "4 rendered", "4 of 4"] == [order[0], order[1], order[-2], order[-1]]
