"""A target as the other ops see it: its sizes, its frozen embedding and head, and its forward pass.

B batch, S sequence length, R pixel rows, I images, V vocabulary, M hidden size of the target
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.files import read_json

# Families whose features were compared with an independent hook.
SUPPORTED = ("qwen3_vl", "qwen3")
EMBED_ENDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
HEAD_ENDINGS = ("lm_head.weight",)


@frozen
class ModelInputs:
    """One padded batch for a target; padding stands on the right.

    input_ids int64 [B, S]; attention_mask int64 [B, S]; pixel_values float32 [R, patch_dim] and
    image_grid_thw int64 [I, 3] of all samples in order, both None when the batch has no image.
    """

    input_ids: Tensor
    attention_mask: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None


@define
class Target:
    """A loaded target in evaluation mode; features are the inputs of decoder layers (see `capture_inputs`)."""

    model: Any
    info: Mapping[str, Any]
    device: torch.device

    @classmethod
    def load(cls, target: TargetModel, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Target:
        """Load model/ through `from_pretrained`, frozen. Raises DataError where the directory is incomplete."""
        return cls.from_directory(target.path / "model", target_info(target), device, dtype)

    @classmethod
    def from_directory(
        cls, directory: Path, info: Mapping[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Target:
        config = AutoConfig.from_pretrained(directory)
        auto = AutoModelForImageTextToText if is_vision_language(config.to_dict()) else AutoModelForCausalLM
        model = auto.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        model.requires_grad_(False)
        return cls(model, info, torch.device(device))

    @property
    def hidden_size(self) -> int:
        return int(self.info["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.info["num_layers"])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.info["eos_token_ids"])

    @property
    def decoder_layers(self) -> nn.ModuleList:
        return self.model.get_decoder().layers

    @property
    def embed_weight(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def inputs(self, samples: Sequence[Any]) -> ModelInputs:
        """Batch TokenSamples, padded on the right; empty pixel tensors become None."""
        longest = max(len(sample.input_ids) for sample in samples)
        input_ids = torch.zeros(len(samples), longest, dtype=torch.int64)
        attention_mask = torch.zeros(len(samples), longest, dtype=torch.int64)
        for row, sample in enumerate(samples):
            input_ids[row, : len(sample.input_ids)] = sample.input_ids
            attention_mask[row, : len(sample.input_ids)] = 1
        pixel_values = torch.cat([sample.pixel_values for sample in samples])
        image_grid_thw = torch.cat([sample.image_grid_thw for sample in samples])
        has_images = len(image_grid_thw) > 0
        return ModelInputs(
            input_ids.to(self.device),
            attention_mask.to(self.device),
            pixel_values.to(self.device) if has_images else None,
            image_grid_thw.to(self.device) if has_images else None,
        )

    def forward(self, inputs: ModelInputs, **options: Any) -> Any:
        """The model's output, logits included, for a batch that starts at position 0 (a prefill)."""
        return self.model(**self._arguments(inputs), **options)

    def hidden(self, inputs: ModelInputs) -> Tensor:
        """Hidden states after the final norm, [B, S, M], for a batch that starts at position 0; no logits are made."""
        return self.model.model(**self._arguments(inputs), use_cache=False).last_hidden_state

    def _arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        """The model derives its positions itself; the rope deltas that a Qwen-VL model keeps from an earlier prompt
        are dropped first, because stale ones shift the positions of every later token.
        """
        self.forget_positions()
        arguments: dict[str, Any] = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
        if inputs.pixel_values is not None:
            is_image = inputs.input_ids == self.model.config.image_token_id
            arguments |= {
                "pixel_values": inputs.pixel_values.to(self.model.dtype),
                "image_grid_thw": inputs.image_grid_thw,
                "mm_token_type_ids": is_image.int(),
            }
        return arguments

    def forget_positions(self) -> None:
        """Drop the rope deltas of the last prefill."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None

    @contextmanager
    def capture_inputs(self, layer_ids: Sequence[int]) -> Iterator[LayerInputs]:
        """While open, every forward pass records the input of layer k+1 for each k of `layer_ids`.

        That input is the feature of layer k which serving engines capture; `hidden_states[k + 1]` differs from it
        where something is added between layers (deepstack).
        """
        captured = LayerInputs({}, tuple(layer_ids))
        handles = [
            self.decoder_layers[k + 1].register_forward_pre_hook(captured.hook(k), with_kwargs=True) for k in layer_ids
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


@frozen
class LayerInputs:
    """The latest recorded inputs, by layer id."""

    by_layer: dict[int, Tensor]
    layer_ids: tuple[int, ...]

    def hook(self, layer_id: int) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.by_layer[layer_id] = args[0] if args else kwargs["hidden_states"]

        return record

    def features(self) -> Tensor:
        """[B, S, L * M] of the last forward pass, layers side by side in the order of the ids."""
        return torch.cat([self.by_layer[k] for k in self.layer_ids], dim=-1)


def target_info(target: TargetModel) -> dict[str, Any]:
    """The content of target.json."""
    return read_json(target.path / "target.json")


def is_vision_language(config: Mapping[str, Any]) -> bool:
    """Whether a model config is that of a vision-language model."""
    return config.get("vision_config") is not None


def text_config(target: TargetModel) -> dict[str, Any]:
    """The part of model/config.json that describes the language model."""
    config = read_config(target.path / "model")
    return config.get("text_config", config)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises DataError where it is missing or no JSON."""
    path = directory / "config.json"
    try:
        return read_json(path)
    except FileNotFoundError:
        raise DataError(
            f"{directory}: no config.json in this target directory; is it a Hugging Face checkpoint?"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None


def describe_target(directory: Path, mask_token_id: int | None, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """The target.json of a checkpoint directory; sizes come from text_config where there is one."""
    config = read_config(directory)
    if config.get("model_type") not in SUPPORTED:
        raise DataError(
            f"{directory}/config.json: model_type {config.get('model_type')!r} is not supported; known are "
            f"{', '.join(SUPPORTED)}"
        )
    text = config.get("text_config", config)
    embed_key = _find_key(directory, EMBED_ENDINGS, "embed_tokens")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    # A tied model ignores an lm_head.weight that its checkpoint may hold all the same.
    heads = [] if tied else [key for key in _tensor_files(directory) if key.endswith(HEAD_ENDINGS)]
    if not heads and not tied:
        raise DataError(f"{directory}: no lm_head.weight among the tensors, and tie_word_embeddings is not set")
    missing = [name for name in ("vocab_size", "hidden_size", "num_hidden_layers") if name not in text]
    if missing:
        raise DataError(f"{directory}/config.json: missing {', '.join(missing)}, also in text_config")
    if mask_token_id is None:
        raise DataError(
            f"{directory}: no mask token is known for this model; give mask_token_id an id that no text produces"
        )
    if not 0 <= mask_token_id < text["vocab_size"]:
        raise DataError(
            f"mask_token_id {mask_token_id} lies outside the vocabulary of {text['vocab_size']} in {directory}"
        )
    return {
        "model_type": config.get("model_type"),
        "vision": is_vision_language(config),
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "num_layers": text["num_hidden_layers"],
        "mask_token_id": mask_token_id,
        "eos_token_ids": sorted(eos_token_ids),
        "embed_key": embed_key,
        "lm_head_key": embed_key if tied else heads[0],
        "tied": tied,
    }


def check_tokens_fit(tokens: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Refuse tokens that were made for another vocabulary; `tokens` is tokens.json, `target` target.json.

    A tokenizer of another model would pass unnoticed wherever its ids are small enough, and the draft would be
    trained on nonsense. Raises DataError.
    """
    if tokens["vocab_size"] > target["vocab_size"]:
        why = f"they need {tokens['vocab_size']} embeddings, and the target has {target['vocab_size']}"
    elif not set(tokens["eos_token_ids"]) & set(target["eos_token_ids"]):
        why = f"their EOS ids are {tokens['eos_token_ids']}, and the target ends at {target['eos_token_ids']}"
    else:
        return
    raise DataError(f"the tokens do not fit the target: {why}; give tokenize_chat the target's checkpoint as processor")


def frozen_ends(target: TargetModel) -> tuple[Tensor, Tensor]:
    """Embedding and lm_head weight, float32 [V, M] each, read alone from the checkpoint's files."""
    info = target_info(target)
    files = _tensor_files(target.path / "model")

    def read(key: str) -> Tensor:
        with safe_open(files[key], framework="pt") as tensors:
            return tensors.get_tensor(key).float()

    embed = read(info["embed_key"])
    head = embed if info["lm_head_key"] == info["embed_key"] else read(info["lm_head_key"])
    return embed, head


def _find_key(directory: Path, endings: tuple[str, ...], what: str) -> str:
    found = [key for key in _tensor_files(directory) if key.endswith(endings) and "visual" not in key]
    if len(found) != 1:
        raise DataError(f"{directory}: expected one {what} tensor, found {found or 'none'}")
    return found[0]


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file. Raises DataError where the directory holds none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError(f"{directory}: no *.safetensors in this target directory; other formats are not loaded")
    names: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise DataError(f"{file}: damaged or cut short ({error}); copy the checkpoint anew") from error
    return names
