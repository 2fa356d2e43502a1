"""The families of targets: everything that differs between them, one small class each.

Adding a family: a class here, its place in FAMILIES, and a row in tests/support/data/family_checkpoints.py.

    B batch, S sequence length, R pixel rows, I images, V image tokens of a batch, M hidden size
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from dsl.errors import DataError
from ops.lib.data.token_shards import IMAGE_TOKENS, TokenSample
from ops.lib.vision.batch import ModelInputs
from ops.lib.vision.config_classes import is_causal_class
from ops.lib.vision.family_config import (
    MTP,
    OF_IMAGES,
    QWEN,
    QWEN3,
    QWEN3_MASK_ID,
    QWEN3_VL,
    QWEN25_VL,
    QWEN35,
    QWEN35_MASK_ID,
    VISUAL,
    check_family_config,
    check_model_type,
    check_served_config,
    full_attention_interval,
    has_recurrent_layers,
    image_token_of,
    is_tied,
    patch_dim,
    sees_by_name,
    text_part,
)

Part = Literal["vision", "projector", "text"]


@frozen
class Family:
    """A family of target models; this class is a text-only decoder, and the interface of all. config: a config.json.

    mask_token_id: an id that the family's tokenizer never produces, None if no single one is known for the family.
    other_parts: prefixes of names, in a checkpoint, of tensors that do not belong to the language model.
    """

    config: Mapping[str, Any]

    model_types: ClassVar[tuple[str, ...]] = ()
    mask_token_id: ClassVar[int | None] = None
    other_parts: ClassVar[tuple[str, ...]] = ()

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model: text_config if there is one, else the whole."""
        return text_part(self.config)

    @property
    def has_vision(self) -> bool:
        return has_vision(self.config)

    @property
    def auto_class(self) -> type[AutoModelForImageTextToText | AutoModelForCausalLM]:
        return AutoModelForImageTextToText if self.has_vision else AutoModelForCausalLM

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weights."""
        return is_tied(self.config)

    @property
    def has_linear_attention(self) -> bool:
        """Whether some layers have a recurrent state, which cannot be cropped in a cache or divided over a sequence."""
        return False

    def check(self) -> None:
        """Check that a config is valid in this family. Raises DataError."""
        check_family_config(self.config)

    def arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        """Arguments of the model's forward for a batch that starts at position 0; the model derives the positions.

        Raises DataError for images, if the model has no vision.
        """
        if inputs.has_images:
            raise DataError(f"the batch has images, but a {self.config.get('model_type')} target is a text model")
        return {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}

    def check_sample(self, sample: TokenSample) -> None:
        """Check that a sample's image tokens are those of its images, for tensors of its target's own processor.

        Raises DataError.
        """

    def check_seen(self, inputs: ModelInputs, output: Any) -> None:
        """Check that the model made as many image tokens as the batch has. Raises DataError. Qwen's models check it."""

    @property
    def has_own_positions(self) -> bool:
        """Whether the model derives positions itself, which are not the counts of tokens."""
        return False

    def forget_positions(self, model: Any) -> None:
        """Drop the model's cached positions of an earlier prompt; a text model has none."""

    def position_offsets(self, model: Any) -> Tensor | int:
        """The difference between the last prefill's positions and its token counts, int64 [B], or 0 for all rows."""
        return 0

    def slice_visuals(self, arguments: Mapping[str, Any], part: slice) -> dict[str, Any]:
        """The arguments of the language model that are given per image token, for a slice of every sequence.

        Embeddings, positions and the mask are not among them.
        """
        return {}

    def part_of(self, parameter: str) -> Part:
        """The part of the model to which a parameter belongs, by its name in `model.named_parameters()`."""
        return "text"

    def for_serving(self) -> dict[str, Any]:
        """The config with the fields that serving engines read and transformers omits.

        SGLang reads whether the head is tied at the top level only.
        """
        return {**self.config, "tie_word_embeddings": True} if self.tied else dict(self.config)

    def check_serving(self) -> None:
        """Check that SGLang loads the config as transformers does. Raises DataError."""
        check_served_config(self.config)

    def for_saving(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """The weights to save, under their saved names, and whether `save_pretrained` must convert them."""
        return dict(weights), True


@frozen
class VisionFamily(Family):
    """A base class of the vision-language families, which share Qwen's patches, mRoPE and image tokens.

    Text and images mix in a batch. For images, `mm_token_type_ids` (1 on image tokens) tells the model which positions
    are three-dimensional; without it Qwen2.5-VL would silently use one dimension.
    """

    other_parts: ClassVar[tuple[str, ...]] = (VISUAL,)

    @property
    def has_own_positions(self) -> bool:
        return self.has_vision

    @property
    def vision_config(self) -> Mapping[str, Any]:
        return self.config["vision_config"]

    @property
    def merge_size(self) -> int:
        """The number of patches along each side of what becomes one image token."""
        return int(self.vision_config.get("spatial_merge_size", 2))

    @property
    def patch_dim(self) -> int:
        """The length of a row of pixel values."""
        return patch_dim(self.vision_config)

    @property
    def image_token_id(self) -> int:
        return int(self.config["image_token_id"])

    def arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        arguments = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
        pixel_values, image_grid_thw = inputs.pixels_or_none()
        if pixel_values is not None:
            arguments |= {
                "pixel_values": pixel_values,
                "image_grid_thw": image_grid_thw,
                "mm_token_type_ids": (inputs.input_ids == self.image_token_id).int(),
            }
        return arguments

    def forget_positions(self, model: Any) -> None:
        """Drop the `rope_deltas` that a Qwen-VL model keeps from its last prefill; they would shift every
        later token.
        """
        model.model.rope_deltas = None

    def position_offsets(self, model: Any) -> Tensor | int:
        """The difference between positions and tokens of the last prefill, kept by the model as `rope_deltas` [B, 1].

        An image takes fewer positions than tokens.
        """
        deltas = model.model.rope_deltas
        return 0 if deltas is None else deltas[:, 0]

    def image_features(self, seen: Any) -> list[Tensor]:
        """The tensors for the language model in a result of `get_image_features`. seen: that result.

        First [tokens, M] of each image, then [tokens, M] of each deepstack layer.
        """
        return list(seen.pooler_output)

    def part_of(self, parameter: str) -> Part:
        name = parameter.removeprefix("model.")
        if not name.startswith(VisionFamily.other_parts):
            return "text"
        return "projector" if "merger" in name else "vision"


@frozen
class Qwen3(Family):
    """The family Qwen3, text-only: dense, or with a mixture of experts."""

    model_types = QWEN3
    mask_token_id = QWEN3_MASK_ID


@frozen
class Qwen25Vl(VisionFamily):
    """The family Qwen2.5-VL, with windowed attention in the vision tower; older checkpoints have no text_config."""

    model_types = QWEN25_VL
    mask_token_id = QWEN3_MASK_ID


@frozen
class Qwen3Vl(VisionFamily):
    """The family Qwen3-VL: deepstack adds visual features to the outputs of the first text layers.

    `hidden_states` of transformers lacks that addition; the input of the next layer, which serving engines capture, has
    it.
    """

    model_types = QWEN3_VL
    mask_token_id = QWEN3_MASK_ID

    @property
    def has_experts(self) -> bool:
        return "moe_intermediate_size" in self.text_config

    def for_saving(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """The weights to save, with experts transposed back to the checkpoints' form [experts, in, out].

        The model has [experts, out, in]. transformers 5.12 transposes them when loading, but not when saving; SGLang
        expects the checkpoints' form.
        """
        if not self.has_experts:
            return super().for_saving(weights)
        transposed = {
            name: tensor.transpose(1, 2).contiguous() if is_expert(name) else tensor for name, tensor in weights.items()
        }
        return transposed, False

    def image_features(self, seen: Any) -> list[Tensor]:
        return [*super().image_features(seen), *seen.deepstack_features]

    def slice_visuals(self, arguments: Mapping[str, Any], part: slice) -> dict[str, Any]:
        """The visual arguments of a text model, cut to a part of the tokens.

        deepstack_visual_embeds: a list of [V, M], V the image tokens of visual_pos_masks, bool [B, S].
        """
        if arguments.get("deepstack_visual_embeds") is None:
            return {}
        visual_BS = arguments["visual_pos_masks"]
        inside_BS = torch.zeros_like(visual_BS)
        inside_BS[:, part] = True
        kept_V = inside_BS[visual_BS]
        return {
            "visual_pos_masks": visual_BS[:, part],
            "deepstack_visual_embeds": [rows_VM[kept_V] for rows_VM in arguments["deepstack_visual_embeds"]],
        }


@frozen
class Qwen35(VisionFamily):
    """The family Qwen3.5: three of four text layers are linear attention (gated delta rule); no deepstack.

    A text-only checkpoint, with `_text` or without vision_config, is a target as well.
    """

    model_types = QWEN35
    mask_token_id = QWEN35_MASK_ID
    other_parts = (VISUAL, MTP)

    @property
    def has_linear_attention(self) -> bool:
        return "linear_attention" in self.text_config.get("layer_types", ("linear_attention",))

    def arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        return super().arguments(inputs) if self.has_vision else Family.arguments(self, inputs)

    def forget_positions(self, model: Any) -> None:
        if self.has_vision:
            super().forget_positions(model)

    def position_offsets(self, model: Any) -> Tensor | int:
        return super().position_offsets(model) if self.has_vision else 0

    def for_serving(self) -> dict[str, Any]:
        """The config with the fields that SGLang reads, set to the values that transformers computes with.

        SGLang derives the layers' kinds from an interval, and reads the rotary share outside the rope table. Without
        deepstack_visual_indexes it uses Qwen3-VL's. transformers omits the interval where it made layer_types itself,
        always writes a share of 0.25, and omits the indexes unless they were given.
        """
        text = dict(self.text_config)
        interval = full_attention_interval(text)
        if interval is not None:
            text["full_attention_interval"] = interval
        share = (text.get("rope_parameters") or {}).get("partial_rotary_factor")
        if share is not None:
            text["partial_rotary_factor"] = share
        whole = super().for_serving()
        whole |= {"text_config": text} if self.config.get("text_config") else text
        if self.has_vision:
            whole["vision_config"] = {"deepstack_visual_indexes": [], **self.vision_config}
        return whole

    def check_serving(self) -> None:
        super().check_serving()
        expected, present = _flat(self.for_serving()), _flat(self.config)
        wrong = [name for name, value in expected.items() if name not in present or present[name] != value]
        if wrong:
            raise DataError(
                f"config.json: SGLang would misread {', '.join(wrong)}: missing, or not what transformers uses; "
                "load_target and finetune_vlm write a config with them"
            )


@frozen
class AnyText(Family):
    """The language model of any other model type; what holds for it is measured on the checkpoint (target/probe.py).

    A model with images is read as its language model, unless it is an `AnyVision`: samples with images are refused.
    """

    @property
    def has_vision(self) -> bool:
        return False

    @property
    def auto_class(self) -> type[AutoModelForImageTextToText | AutoModelForCausalLM]:
        wrapped = has_vision(self.config) and not is_causal_class(self.config["model_type"])
        return AutoModelForImageTextToText if wrapped else AutoModelForCausalLM

    @property
    def has_linear_attention(self) -> bool:
        return has_recurrent_layers(self.text_config)


@frozen
class AnyVision(AnyText):
    """A model of SEEING with its images: tensors of any names and shapes, as its own processor makes them.

    In a batch they stand one sample after the other, as the processors have them: tensors of the images of several
    samples are joined along their first dimension. What the processors fill with zeros there, and the models leave
    out, is filled here too.
    """

    # Where some processors give tokens of images a type, by which they see each other.
    TYPE_IDS: ClassVar[Mapping[str, str]] = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
    # Numbers of tiles, and their sides, differ between samples.
    FILLED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "llava_onevision": ("pixel_values",),
        "idefics3": ("pixel_values", "pixel_attention_mask"),
        "smolvlm": ("pixel_values", "pixel_attention_mask"),
    }

    @property
    def has_vision(self) -> bool:
        return True

    @property
    def auto_class(self) -> type[AutoModelForImageTextToText | AutoModelForCausalLM]:
        return AutoModelForImageTextToText

    @property
    def image_token_id(self) -> int | None:
        return image_token_of(self.config)

    @property
    def _type(self) -> str:
        return str(self.config["model_type"])

    def check_sample(self, sample: TokenSample) -> None:
        found = int((sample.input_ids == self.image_token_id).sum())
        expected = int(sample.seen[IMAGE_TOKENS].sum()) if sample.seen else 0
        if found != expected:
            raise DataError(
                f'sample "{sample.id}": {found} image tokens in the text, but its images have {expected}; an image or '
                "its tokens were left out: run tokenize_chat again"
            )

    def arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        arguments = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
        seen = inputs.seen_or_none()
        if inputs.has_images and not seen:
            raise DataError(f"the batch has patches of Qwen's, which a {self._type} does not read")
        seen.pop(IMAGE_TOKENS, None)
        if not seen:
            return arguments
        if self._type in self.TYPE_IDS:
            arguments[self.TYPE_IDS[self._type]] = (inputs.input_ids == self.image_token_id).long()
        filled = self.FILLED.get(self._type, ())
        return arguments | {name: _joined(name, tensors, name in filled) for name, tensors in seen.items()}

    def check_seen(self, inputs: ModelInputs, output: Any) -> None:
        if not inputs.seen_or_none():
            return
        tokens = int((inputs.input_ids == self.image_token_id).sum())
        states = output.image_hidden_states  # since transformers 5.19, some classes give the encoder's whole output
        rows = getattr(states, "pooler_output", states).numel() // int(self.text_config["hidden_size"])
        if rows != tokens:
            raise DataError(f"{tokens} image tokens, but the model makes {rows} of the images")

    def part_of(self, parameter: str) -> Part:
        name = parameter.lower()
        if not any(part in name for part in OF_IMAGES):
            return "text"
        return "vision" if "vision" in name else "projector"


def _joined(name: str, tensors: list[Tensor], is_filled: bool) -> Tensor:
    """The tensors of several samples, one after the other; behind the smaller ones zeros, if they are filled.

    Raises DataError where their shapes do not fit.
    """
    shapes = {tensor.shape[1:] for tensor in tensors}
    if len(shapes) > 1 and is_filled:
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        tensors = [_filled(tensor, largest) for tensor in tensors]
    elif len(shapes) > 1:
        raise DataError(f"{name} of several samples cannot be joined: shapes {[list(each.shape) for each in tensors]}")
    return torch.cat(tensors)


def _filled(tensor: Tensor, sizes: list[int]) -> Tensor:
    """A tensor with zeros behind, up to these sizes of all dimensions but the first."""
    room = [(0, size - own) for own, size in zip(tensor.shape[1:], sizes, strict=True)]
    return pad(tensor, [side for sides in reversed(room) for side in sides])


FAMILIES: tuple[type[Family], ...] = (Qwen3, Qwen25Vl, Qwen3Vl, Qwen35)


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a vision-language model."""
    return config.get("vision_config") is not None


def is_expert(name: str) -> bool:
    """Whether a tensor has one matrix for each expert of a layer."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json, None for one that names no model type."""
    wanted = config.get("model_type")
    if wanted is not None and wanted not in QWEN:
        return AnyVision(config) if sees_by_name(config) else AnyText(config)
    return next((family(config) for family in FAMILIES if wanted in family.model_types), None)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises DataError as `check_model_type`."""
    check_model_type(config)
    family = find_family(config)
    assert family is not None  # it has a model type
    return family


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config by dotted name, with those of text_config and vision_config."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("text_config", "vision_config") and value is not None:
            fields |= {f"{name}.{inner}": of_it for inner, of_it in value.items()}
        else:
            fields[name] = value
    return fields
