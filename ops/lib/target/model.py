"""A target for other ops: its sizes, its frozen embedding and head, and its forward pass.

B batch, S sequence length, R pixel rows, I images, V vocabulary, M hidden size of the target
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, define, field, frozen
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.data.files import read_json, read_object, write_json
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.target.attention import grouped_attention
from ops.lib.target.checkpoint_check import running_mistake, stored_mistakes, stored_tensors
from ops.lib.target.checkpoint_files import check_weights, trusts_own_code
from ops.lib.target.embedding_and_head import Head, stored_dtype, tensor_files
from ops.lib.target.head_settings import head_settings
from ops.lib.target.no_memory import lacks_memory
from ops.lib.target.quantised import method_of
from ops.lib.target.sizes import is_bounded, long_samples, rope_limit, too_long
from ops.lib.target.stored_weights import find_ends, head_bias, is_of_model, listed, unexpected_tensors
from ops.lib.target.token_ids import foreign_tokens, mask_of_texts
from ops.lib.vision.batch import ModelInputs, collate
from ops.lib.vision.families import AnyText, AnyVision, Family, Qwen3Vl, VisionFamily, family_of, find_family, is_expert
from ops.lib.vision.family_config import LEFT_OUT, TIED, is_tied, text_part, with_defaults
from ops.lib.vision.processor import LOADING_ERRORS

AGAIN = "copy config.json again from the checkpoint's source"
CODES = re.compile(r"\x1b\[[0-9;]*m")  # of terminals, for colours
# What torch says of tensors that do not fit together, as images and the tokens for them.
OF_SIZES = re.compile(r"\b(?:sizes?|shapes?|elements?|dimensions?|images?|tokens?)\b", re.IGNORECASE)


@define
class Target:
    """A loaded target in evaluation mode; features are the inputs of decoder layers (see `capture_inputs`)."""

    model: Any
    info: Mapping[str, Any]
    device: torch.device
    family: Family = field(default=Factory(lambda self: _family(self.model.config.to_dict()), takes_self=True))
    is_continued: bool = field(default=False, init=False)  # a pass goes on with the texts of the one before it

    @classmethod
    def load(cls, target: TargetModel, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Target:
        """Load a target's model/ through `from_pretrained`, frozen. Raises DataError if the directory is incomplete."""
        return cls.from_directory(target.path / "model", target_info(target), device, dtype)

    @classmethod
    def from_directory(
        cls, directory: Path, info: Mapping[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Target:
        """Load the target of a checkpoint directory. The checkpoint's own code runs only as `trusts_own_code` allows.

        Weights are loaded in the files' dtype, so that they stay in the files' pages, which all processes of a machine
        share. Each is then moved to the device, and cast there. Quantised ones are dequantised; raises DataError where
        transformers does not do that.
        """
        content = read_config(directory)
        family = family_of(content)
        check_weights(directory)
        if mistakes := stored_mistakes(directory):
            raise DataError("\n".join(mistakes))
        if mistake := running_mistake(content, directory):
            raise DataError(f"{directory}: {mistake}")
        trust = trusts_own_code(directory, info)
        config = _loaded(directory, AutoConfig.from_pretrained, trust_remote_code=trust)
        config.tie_word_embeddings = family.tied  # transformers only reads the top level of the config
        if method_of(content):
            config.quantization_config["dequantize"] = True
        AttentionInterface.register("sdpa", grouped_attention)  # for the whole process
        model, report = _loaded(
            directory,
            family.auto_class.from_pretrained,
            config=config,
            dtype=stored_dtype(directory) or dtype,
            attn_implementation=chosen_attention(family),
            trust_remote_code=trust,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
        )
        _check_report(directory, content.get("model_type"), report)
        unexpected = sorted(filter(is_of_model, report["unexpected_keys"]))
        if unexpected:
            raise DataError(unexpected_tensors(directory, unexpected))
        place_weights(model, device, dtype)
        return cls(model.eval().requires_grad_(False), info, torch.device(device))

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
        """The layers in their order. Raises DataError for a class that keeps them elsewhere."""
        decoder = self.model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if layers is None:
            raise DataError(f'dflow cannot find the layers of {type(decoder).__name__}, which has no "layers"')
        return layers

    @property
    def embed_weight(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def head(self) -> Head:
        """The head with what the target's logits are made by; no copy of its weights."""
        module = self.model.get_output_embeddings()
        return Head.of_target(module.weight, head_settings(self.family.config), getattr(module, "bias", None))

    @property
    def has_linear_attention(self) -> bool:
        """Whether some layers have a recurrent state, for which padding must not come before tokens."""
        return self.family.has_linear_attention

    def inputs(self, samples: Sequence[TokenSample]) -> ModelInputs:
        """A batch of samples on the target's device, padded on the right. Raises DataError for a sample whose image
        tokens are not those of its images, and for one longer than `rope_limit`.
        """
        limit = rope_limit(self.family.text_config)
        for sample in samples:
            self.family.check_sample(sample)
            length = len(sample.input_ids)
            if limit is not None and length > limit:
                raise DataError(f"sample {sample.id}: {too_long(length, limit, self.family.text_config)}")
        return collate(samples, self.device)

    def prompts(self, samples: Sequence[TokenSample]) -> ModelInputs:
        """A batch of samples without their last answers."""
        return self.inputs([sample.prompt() for sample in samples])

    def forward(self, inputs: ModelInputs, **options: Any) -> Any:
        """The model's output, logits included, for a batch that starts at position 0 (a prefill)."""
        return self._run(self.model, inputs, options)

    def hidden(self, inputs: ModelInputs) -> Tensor:
        """Hidden states after the final norm, [B, S, M], for a batch that starts at position 0; computes no logits."""
        return self._run(self.model.base_model, inputs, {"use_cache": False}).last_hidden_state

    def _run(self, model: Any, inputs: ModelInputs, options: Mapping[str, Any]) -> Any:
        """The output of the model or its base. Raises DataError where its vision tower and the image tokens differ.

        What torch raises of other things than sizes, such as a fault of the device, is raised as it is.
        """
        arguments = self.model_arguments(inputs)
        try:
            output = model(**arguments, **options)
        except (ValueError, RuntimeError) as error:
            is_about_images = isinstance(error, ValueError) or OF_SIZES.search(str(error))
            if not inputs.seen_or_none() or not is_about_images or lacks_memory(error):
                raise
            raise DataError(f"the model does not take these images: {error}") from error
        self.family.check_seen(inputs, output)
        return output

    def model_arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        """The arguments of the model's forward for a batch that starts at position 0; the model derives the positions.

        Positions cached for an earlier prompt are dropped first, as they would shift every later token.
        """
        self.forget_positions()
        return self.family.arguments(inputs)

    def forget_positions(self) -> None:
        """Drop the model's cached positions of the last prefill."""
        self.family.forget_positions(self.model)

    @contextmanager
    def capture_inputs(self, layer_ids: Sequence[int]) -> Iterator[LayerInputs]:
        """Open a context in which every forward pass records the input of layer k+1 for each k of `layer_ids`.

        That input is the feature of layer k that serving engines capture. `hidden_states[k + 1]` differs from it if
        something is added between layers (deepstack). A pass that goes on with the texts of the one before it
        (`is_continued`) is recorded behind that one.
        """
        captured = LayerInputs(self, tuple(layer_ids))
        handles = [
            self.decoder_layers[k + 1].register_forward_pre_hook(captured.hook(k), with_kwargs=True) for k in layer_ids
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def _family(config: Mapping[str, Any]) -> Family:
    """The family of a loaded model, whose type may be that of a part only, such as mllama_text_model."""
    return find_family(config) or AnyText(config)


@frozen
class LayerInputs:
    """The latest recorded inputs, in the parts in which their texts ran through the target."""

    target: Target
    layer_ids: tuple[int, ...]
    _parts: dict[int, list[Tensor]] = field(factory=dict, init=False)

    def hook(self, layer_id: int) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            before = self._parts[layer_id] if self.target.is_continued else []
            self._parts[layer_id] = [*before, args[0] if args else kwargs["hidden_states"]]

        return record

    @property
    def by_layer(self) -> dict[int, Tensor]:
        """The inputs by layer id, each [B, S, M]."""
        return {k: parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for k, parts in self._parts.items()}

    def features(self) -> Tensor:
        """The captured features of the last forward pass, [B, S, L * M], layers in the order of the ids."""
        by_layer = self.by_layer
        return torch.cat([by_layer[k] for k in self.layer_ids], dim=-1)


def _loaded(directory: Path, load: Callable[..., Any], **options: Any) -> Any:
    """The result of `load` for a directory. Raises DataError where transformers cannot load it.

    What transformers logs meanwhile has no codes for terminals.
    """
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_without_codes)
    try:
        return load(directory, **options)
    except LOADING_ERRORS as error:
        text = " ".join(CODES.sub("", str(error)).split())
        raise DataError(f"{directory}: transformers cannot load it: {type(error).__name__}: {text}; {AGAIN}") from error
    finally:
        log.removeFilter(_without_codes)


def _without_codes(record: logging.LogRecord) -> bool:
    record.msg, record.args = CODES.sub("", record.getMessage()), ()
    return True


def _check_report(directory: Path, kind: Any, report: Mapping[str, Any]) -> None:
    """Check that the files hold the whole model of a config.json. Raises DataError.

    kind: its model_type. report: what transformers found.
    """
    if missing := sorted(report["missing_keys"]):
        others = sorted(report["unexpected_keys"])
        remedy = f"is the checkpoint complete, and of the model_type {kind}?"
        if others:
            remedy = (
                f"they have {listed(others)} instead: the model_type {kind} of config.json is probably not theirs; "
                f"{AGAIN}"
            )
        raise DataError(
            f"{directory}: the files lack {listed(missing)}, which the model would initialise at random; {remedy}"
        )
    if different := sorted(report["mismatched_keys"]):
        shown = listed([f"{name} {list(stored)} (by config.json {list(made)})" for name, stored, made in different])
        raise DataError(f"{directory}: the files hold other sizes than the {kind} of config.json: {shown}; {AGAIN}")


def chosen_attention(family: Family) -> str | None:
    """The attention of a target: None for that of its class, which is not sdpa where it has sinks; eager where scores
    have a soft cap, which sdpa would silently leave out.
    """
    if not isinstance(family, AnyText):
        return "sdpa"
    return "eager" if family.text_config.get("attn_logit_softcapping") else None


def place_weights(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Move a model to the device, and cast its checkpoint tensors, one at a time.

    Tensors that the model computes, such as rotary frequencies, keep their dtype.
    """
    saved = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        moved = tensor.data.to(device)
        tensor.data = moved.to(dtype) if name in saved and moved.is_floating_point() else moved


def target_info(target: TargetModel) -> dict[str, Any]:
    """The content of target.json."""
    return read_json(target.path / "target.json")


def text_config(target: TargetModel) -> dict[str, Any]:
    """The part of model/config.json that describes the language model."""
    return dict(text_part(read_config(target.path / "model")))


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory, with what it leaves to its class. Raises DataError if it is missing or no
    JSON object.
    """
    try:
        return with_defaults(read_object(directory / "config.json"))
    except FileNotFoundError:
        raise DataError(
            f"{directory}: no config.json in this target directory; is it a Hugging Face checkpoint?"
        ) from None


def describe_target(
    directory: Path,
    mask_token_id: int | None,
    eos_token_ids: Sequence[int],
    embed_key: str | None = None,
    lm_head_key: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """The content of target.json for a checkpoint directory. Raises DataError for one that cannot be a target."""
    try:
        family = family_of(read_config(directory))
        family.check()
    except DataError as error:
        raise DataError(f"{directory}: {error}") from None
    text = family.text_config
    check_weights(directory)
    stored = stored_tensors(directory)
    ends = find_ends(directory, family.config, stored, embed_key, lm_head_key)
    head_bias(directory, stored, ends, head_settings(family.config).bias)
    if mask_token_id is None:
        raise DataError(
            f"{directory}: no mask token is known for this model; set mask_token_id to an id that no text produces"
        )
    if not 0 <= mask_token_id < text["vocab_size"]:
        raise DataError(
            f"mask_token_id {mask_token_id} is outside the vocabulary of {text['vocab_size']} in {directory}"
        )
    if wrong := mask_of_texts(mask_token_id, eos_token_ids, {text.get("pad_token_id")}):
        raise DataError(f"{directory}: {wrong}")
    return {
        "model_type": family.config["model_type"],
        "vision": family.has_vision,
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "num_layers": text["num_hidden_layers"],
        "mask_token_id": mask_token_id,
        "eos_token_ids": sorted(eos_token_ids),
        "embed_key": ends.embed_key,
        "lm_head_key": ends.lm_head_key,
        "tied": family.tied,
        "trust_remote_code": trust_remote_code,
    }


def check_samples_fit(readers: Iterable[TokenReader], target: TargetModel) -> None:
    """Check that the target can read samples, by `check_tokens_fit`, `check_images_fit` and `check_lengths_fit`.

    It is not loaded. Raises DataError.
    """
    info, family = target_info(target), family_of(read_config(target.path / "model"))
    for reader in readers:
        check_tokens_fit(reader.info, info)
        check_images_fit(reader, family)
        check_lengths_fit(reader, family.text_config)


def check_tokens_fit(tokens: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Check that tokens were made for the target's vocabulary. Raises DataError.

    tokens: content of tokens.json. target: content of target.json.
    """
    wrong = foreign_tokens(tokens["vocab_size"], tokens["eos_token_ids"], target["vocab_size"], target["eos_token_ids"])
    if wrong:
        raise DataError(wrong)


def check_images_fit(reader: TokenReader, family: Family) -> None:
    """Check that the target can read image samples: it must see, with the same patches. Raises DataError."""
    if any(record["category"] == "image" for record in reader.records):
        check_patches_fit(reader.info, family)


def check_lengths_fit(reader: TokenReader, text: Mapping[str, Any]) -> None:
    """Check that no sample is longer than the target's positions, if they are known (`is_bounded`). Raises DataError
    that names them. text: the target's config.
    """
    if is_bounded(text) and (wrong := long_samples(reader.records, text)):
        raise DataError(wrong)


def length_warnings(readers: Iterable[TokenReader], target: TargetModel) -> list[str]:
    """Texts on samples that may be longer than the target can read: where `check_lengths_fit` does not know it."""
    text = text_config(target)
    return [] if is_bounded(text) else [found for reader in readers if (found := long_samples(reader.records, text))]


def check_patches_fit(tokens: Mapping[str, Any], family: Family) -> None:
    """Check that images were made by a fitting processor. tokens: content of tokens.json. Raises DataError."""
    if isinstance(family, AnyVision):
        made_for = tokens.get("images_of", "Qwen's")
        if made_for != family.config["model_type"] or tokens["image_token_id"] != family.image_token_id:
            raise DataError(
                f"the images of the tokens do not fit the target: they are of a {made_for} processor; give "
                "tokenize_chat the target's checkpoint as processor"
            )
        return
    if not (isinstance(family, VisionFamily) and family.has_vision):
        raise DataError("the tokens have images, but the target is a text model: remove the image samples")
    wanted = {
        "patch_dim": family.patch_dim,
        "merge_size": family.merge_size,
        "image_token_id": family.image_token_id,
    }
    different = [
        f"{name} {tokens[name]}, and the target's is {value}" for name, value in wanted.items() if tokens[name] != value
    ]
    if different:
        raise DataError(
            f"the images of the tokens do not fit the target: they have {'; '.join(different)}; give tokenize_chat "
            "the target's checkpoint as processor"
        )


def write_target_json(out_dir: Path, info: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Write target.json, as `describe_target` returns it, and metrics.json."""
    write_json(out_dir / "target.json", dict(info))
    write_json(out_dir / "metrics.json", dict(metrics))


def complete_config(directory: Path, trust: bool = False) -> None:
    """Adds to config.json what serving engines read and transformers omits, and for a model that is not Qwen's what the
    file leaves to its class; a complete file stays as it is.
    """
    config = read_json(directory / "config.json")
    family = family_of(config)
    complete = _resolved(directory, config, trust) if isinstance(family, AnyText) else family.for_serving()
    if complete != config:
        write_json(directory / "config.json", complete)


def _resolved(directory: Path, config: Mapping[str, Any], trust: bool) -> dict[str, Any]:
    """The content of a config.json with the fields of LEFT_OUT and the rope that transformers' class gives it."""
    text = _loaded(directory, AutoConfig.from_pretrained, trust_remote_code=trust).get_text_config()
    written = text_part(config)
    # A class of layers of several sizes refuses to name one, where the file has it.
    values = {name: getattr(text, name, None) for name in LEFT_OUT if name not in written}
    added = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    rope = getattr(text, "rope_parameters", None)
    if rope and not written.keys() & {"rope_parameters", "rope_theta"}:
        added["rope_parameters"] = rope
    part = {**written, **added}
    whole = {TIED: is_tied(with_defaults(config)), **config}
    return whole | ({"text_config": part} if config.get("text_config") else part)


def check_served(directory: Path) -> None:
    """Check that SGLang loads a checkpoint as transformers does. Raises DataError."""
    family = family_of(read_config(directory))
    try:
        family.check()
        family.check_serving()
    except DataError as error:
        raise DataError(f"{directory}: {error}") from None
    if isinstance(family, Qwen3Vl):
        _check_experts(directory, family.text_config["hidden_size"])


def _check_experts(directory: Path, hidden_size: int) -> None:
    """Check that down projections are [experts, intermediate, hidden], as in the family's checkpoints. Raises
    DataError.
    """
    files = tensor_files(directory)
    name = next((name for name in sorted(files) if is_expert(name) and name.endswith("down_proj")), None)
    if name is None:
        return
    with safe_open(files[name], framework="pt") as tensors:
        shape = tensors.get_slice(name).get_shape()
    if shape[2] != hidden_size:
        raise DataError(
            f"{files[name]}: {name} is {shape}, but SGLang expects {[shape[0], shape[2], shape[1]]}, as the published "
            "checkpoints have it: transformers' save_pretrained transposes experts; save them transposed back"
        )
