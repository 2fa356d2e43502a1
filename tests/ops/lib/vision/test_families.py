"""Every family, from a saved checkpoint to captured features, against transformers' own processor and a hook.

The table: every family, dense and with experts, x {text, image, two images, mixed batch}; a text family refuses images.
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from fake_stage import FakeStage
from family_checkpoints import FAMILIES, LAYERS, make_checkpoint, picture, token_sample
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, BaseVideoProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import ImageSamples, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.backend import forward_batch
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.lib.data.files import write_jsonl
from ops.lib.data.image_packs import PackWriter
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import Target, read_config
from ops.lib.vision.batch import ModelInputs, collate
from ops.lib.vision.families import FAMILIES as CLASSES
from ops.lib.vision.families import AnyText, family_of
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

LAYER_IDS = (0, 1, 3, 6)
# The class that AutoProcessor takes for a family, and the class of its model.
REAL = {
    "qwen3": (None, AutoModelForCausalLM),
    "qwen3_moe": (None, AutoModelForCausalLM),
    "qwen2_5_vl": (Qwen2_5_VLProcessor, AutoModelForImageTextToText),
    "qwen3_vl": (Qwen3VLProcessor, AutoModelForImageTextToText),
    "qwen3_vl_moe": (Qwen3VLProcessor, AutoModelForImageTextToText),
    "qwen3_5": (Qwen3VLProcessor, AutoModelForImageTextToText),
    "qwen3_5_moe": (Qwen3VLProcessor, AutoModelForImageTextToText),
}
IMAGES = {"wide": picture(40, 16), "tall": picture(16, 32, seed=1), "large": picture(60, 44, seed=2)}
# Turns of a user and an assistant by turns; a word in <> is an image.
CONVERSATIONS = {
    "text": ["Count to three.", "One, two, three."],
    "image": ["<wide> What is it?", "A red square beside a green circle."],
    "two images": ["<tall> Compare this with <large> and say which is red.", "The second.", "Sure?", "Very sure."],
    "long text": ["What is it? Describe the image in a few words. " * 3, "There is none, so I cannot say."],
}
KINDS = {
    "text": ("text",),
    "image": ("image",),
    "two images": ("two images",),
    "mixed batch": ("long text", "two images", "text", "image"),
}
CASES = [
    (family, kind)
    for family, row in FAMILIES.items()
    for kind, names in KINDS.items()
    if row.vision or "text" in names  # of a mixed batch a text family takes the texts
]


class NoVideo(BaseVideoProcessor):
    """Stands where the real processor class insists on a video processor, which would need torchvision."""

    def __init__(self):
        pass


@frozen
class Loaded:
    """A family: its checkpoint, the artifacts made of it, and what transformers itself makes of the checkpoint."""

    name: str
    checkpoint: Path
    target: Target
    tokens: TokenShards
    features: FeatureReader
    real: Any
    model: Any

    @property
    def names(self) -> list[str]:
        """The conversations that this family can take."""
        return taken(self.name)

    def sample(self, name: str) -> TokenSample:
        reader = TokenReader(self.tokens)
        return reader.sample(next(i for i, record in enumerate(reader.records) if record["id"] == name))

    def states(self, samples: list[TokenSample]) -> list[torch.Tensor]:
        """The features of each sample, [S, F], from one forward pass."""
        features_BSF, _ = forward_batch(self.target, samples, LAYER_IDS)
        return [features_BSF[row, : len(sample.input_ids)] for row, sample in enumerate(samples)]

    def captured(self, name: str) -> torch.Tensor:
        """The features that capture_targets stored of a conversation."""
        reader = TokenReader(self.tokens, "train")
        index = next(i for i, row in enumerate(reader.records) if row["id"] == name)
        return self.features.features(index, 0, self.features.lengths[index])

    def forward_arguments(self, batch: ModelInputs) -> dict[str, Any]:
        return self.target.model_arguments(batch)

    def real_inputs(self, names: list[str]) -> dict[str, torch.Tensor]:
        """What transformers' own processor gives the model for conversations, padded on the right."""
        texts = [self.real.apply_chat_template(as_messages(CONVERSATIONS[name]), tokenize=False) for name in names]
        options = {"padding": True, "padding_side": "right"}
        images = [IMAGES[word] for name in names for word in image_names(CONVERSATIONS[name])]
        inputs = self.real(text=texts, **({"images": images} if images else {}), **options)
        return {name: torch.as_tensor(value) for name, value in inputs.items()}


def words(turn: str) -> list[str]:
    return [part for part in turn.replace("<", "|<").replace("> ", ">|").split("|") if part]


def image_names(turns: list[str]) -> list[str]:
    return [word[1:-1] for turn in turns for word in words(turn) if word.startswith("<")]


def as_messages(turns: list[str]) -> list[dict[str, Any]]:
    def part(word: str) -> dict[str, str]:
        return {"type": "image"} if word.startswith("<") else {"type": "text", "text": word}

    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": [part(word) for word in words(turn)]} for i, turn in enumerate(turns)]


def image_samples(folder: Path, names: list[str]) -> ImageSamples:
    """What inject_images would write of the conversations, the images in place."""
    folder.mkdir(parents=True)
    packs, rows = PackWriter(folder), []
    for name in names:
        references = []
        for word in image_names(CONVERSATIONS[name]):
            file = io.BytesIO()
            IMAGES[word].save(file, format="PNG")
            references.append(packs.add(file.getvalue()))
        row = {"id": name, "split": "train", "category": "image" if references else "text", "images": references}
        rows.append(row | {"messages": as_messages(CONVERSATIONS[name])})
    write_jsonl(folder / "samples.jsonl", rows)
    return ImageSamples(folder, "samples")


def real_processor(name: str, checkpoint: Path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    processor_class, _ = REAL[name]
    if processor_class is None:
        return tokenizer
    return processor_class(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
        tokenizer=tokenizer,
        video_processor=NoVideo(),
        chat_template=tokenizer.chat_template,
    )


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory) -> Loaded:
    name = request.param
    folder = tmp_path_factory.mktemp("family")
    checkpoint = make_checkpoint(name, folder / "checkpoint")
    tokens = tokenized(checkpoint, folder, taken(name))
    stage = FakeStage(folder / "target")
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    target = stage.artifact(TargetModel)
    stage = FakeStage(folder / "capture", {"tokens": tokens, "target": target})
    # A budget that puts several samples, those with images among them, into one forward pass.
    config = CaptureTargets(
        tokens=Ref("a"), target=Ref("b"), target_layer_ids=LAYER_IDS, batch_tokens=400, splits=("train",)
    )
    capture_targets(config, stage)
    return Loaded(
        name,
        checkpoint,
        Target.load(target),
        tokens,
        FeatureReader(stage.artifact(TargetFeatures), "train"),
        real_processor(name, checkpoint),
        REAL[name][1].from_pretrained(checkpoint, dtype=torch.float32).eval(),
    )


def taken(family_name: str) -> list[str]:
    return [name for name, turns in CONVERSATIONS.items() if FAMILIES[family_name].vision or not image_names(turns)]


def tokenized(checkpoint: Path, folder: Path, names: list[str]) -> TokenShards:
    stage = FakeStage(folder / "tokenize", {"samples": image_samples(folder / "samples", names)})
    config = TokenizeChat(samples=Ref("inject"), processor=str(checkpoint), min_loss_tokens=1, workers=1)
    tokenize_chat(config, stage)
    return stage.artifact(TokenShards)


def hooked_features(model, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, S, L * M]: what stands before layer k + 1 for each k, from hooks of our own on all decoder layers."""
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    assert len(layers) == LAYERS
    inputs: dict[int, torch.Tensor] = {}

    def keep(index):
        def hook(_module, args, kwargs, _output):
            inputs[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [layer.register_forward_hook(keep(i), with_kwargs=True) for i, layer in enumerate(layers)]
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    with torch.no_grad():
        model(**arguments)
    for handle in handles:
        handle.remove()
    return torch.cat([inputs[k + 1] for k in LAYER_IDS], dim=-1)


def report(capsys, line: str) -> None:
    """Print to the terminal of the test run, whether it captures or not."""
    with capsys.disabled():
        print(f"\n{line}", end="")


@pytest.mark.parametrize(("loaded", "kind"), CASES, indirect=["loaded"])
def test_ids_pixels_and_features_equal_those_of_transformers_own_processor_and_a_hook(loaded, kind, capsys):
    names = [name for name in KINDS[kind] if name in loaded.names]
    samples = [loaded.sample(name) for name in names]
    arguments = loaded.real_inputs(names)
    batch = collate(samples)
    assert arguments["input_ids"].tolist() == batch.input_ids.tolist()
    assert arguments["attention_mask"].tolist() == batch.attention_mask.tolist()
    assert ("pixel_values" in arguments) == batch.has_images
    if batch.has_images:
        pixel_values, image_grid_thw = batch.pixels_or_none()
        assert torch.equal(arguments["pixel_values"], pixel_values)
        assert torch.equal(arguments["image_grid_thw"], image_grid_thw)
        assert torch.equal(arguments["mm_token_type_ids"], loaded.forward_arguments(batch)["mm_token_type_ids"])
    expected = hooked_features(loaded.model, arguments)
    together, alone, stored = [], [], []
    for row, (sample, features) in enumerate(zip(samples, loaded.states(samples), strict=True)):
        truth = expected[row, : len(sample.input_ids)]
        assert truth.abs().max() > 1  # weights so small that nothing could differ would prove nothing
        together.append(float((features - truth).abs().max()))
        alone.append(float((loaded.states([sample])[0] - truth).abs().max()))
        stored.append(float((loaded.captured(sample.id) - truth).abs().max()))
    figures = f"together {max(together):.1e}, one by one {max(alone):.1e}, captured {max(stored):.1e}"
    scale = float(expected.abs().max())
    report(capsys, f"{loaded.name}, {kind}: max abs difference of features up to {scale:.0f}: {figures}")
    assert max(together) < 1e-5 * scale
    # Another padded length sums in another order, and such weights amplify what is rounded.
    assert max(*alone, *stored) < 1e-4 * scale


@pytest.mark.parametrize("loaded", [name for name, row in FAMILIES.items() if not row.vision], indirect=True)
def test_a_text_family_refuses_images_when_they_are_tokenised_and_when_they_reach_the_model(loaded, tmp_path):
    with pytest.raises(DataError, match="image"):
        tokenized(loaded.checkpoint, tmp_path, ["image"])
    sample = token_sample(load_processor(str(loaded.checkpoint)), "Hm?")
    shown = evolve(sample, pixel_values=torch.zeros(4, 96), image_grid_thw=torch.tensor([[1, 2, 2]]))
    with pytest.raises(DataError, match=f"the batch has images, but a {loaded.name} target is a text model"):
        loaded.states([shown])


@pytest.mark.parametrize("loaded", [name for name, row in FAMILIES.items() if row.vision], indirect=True)
def test_a_vision_family_knows_its_patches_and_parts(loaded):
    family, processor = family_of(read_config(loaded.checkpoint)), load_processor(str(loaded.checkpoint))
    assert (processor.patch_dim, processor.merge_size) == (family.patch_dim, family.merge_size)
    assert processor.image_token_id == family.image_token_id
    parts = {name: family.part_of(name) for name, _ in loaded.model.named_parameters()}
    assert {"vision", "projector", "text"} == set(parts.values())
    assert {"vision", "projector"} == {part for name, part in parts.items() if ".visual." in name}
    assert all((part == "projector") == ("merger" in name) for name, part in parts.items())
    assert ("linear" in " ".join(name for name in parts if ".linear_attn" in name)) == family.has_linear_attention


def test_every_model_type_has_a_row_in_the_table():
    types = {kind for family in CLASSES for kind in family.model_types}
    assert types - {"qwen3_5_text", "qwen3_5_moe_text"} == set(FAMILIES)  # those two are cut out of the others


@pytest.mark.parametrize("kind", ["word_counter", "vit", None, ["llama"]])
def test_a_model_type_without_a_language_model_is_refused(kind):
    with pytest.raises(DataError, match="the installed transformers has no language model of this type; a later"):
        family_of({"model_type": kind})


def test_any_other_language_model_is_of_the_general_family_and_reads_no_images():
    family = family_of({"model_type": "llava", "vision_config": {}, "text_config": {"model_type": "llama"}})
    assert (AnyText, False, None) == (type(family), family.has_vision, family.mask_token_id)
    assert family_of({"model_type": "falcon_h1", "mamba_d_conv": 4}).has_linear_attention
    assert not family_of({"model_type": "llama"}).has_linear_attention


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3", "vocab_size": 9}, "missing hidden_size, num_hidden_layers, also in text_config"),
        ({"model_type": "qwen3_vl"}, "a qwen3_vl without vision_config"),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, "missing vision_config.patch_size, image_token"),
        (
            {"model_type": "qwen3_vl", "vision_config": {"depth": 2, "patch_size": 4}, "image_token_id": 5},
            r"deepstack_visual_indexes names the layers \[8, 16, 24\], but the vision tower has only 2",
        ),
    ],
)
def test_a_config_that_its_family_cannot_have_is_refused(config, message):
    sizes = {} if config["model_type"] == "qwen3" else {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2}
    with pytest.raises(DataError, match=message):
        family_of(config | sizes).check()


def test_nothing_here_needs_torchvision():
    assert importlib.util.find_spec("torchvision") is None
