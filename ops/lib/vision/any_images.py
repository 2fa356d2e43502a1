"""Images of targets that are not Qwen's, by the checkpoint's own processor: its text for each image, and its tensors.

A processor of transformers takes a text with a placeholder for each image. It replaces each by what stands for the
image in the text, such as a run of image tokens between marks, and makes tensors of names and shapes of its own. Both
are taken from its real output. The processor is put together without its part for videos, which needs torchvision.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from attrs import frozen
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from dsl.errors import DataError
from ops.lib.data.token_shards import IMAGE_TOKENS
from ops.lib.vision.family_config import image_token_of

BETWEEN = "\x1e"  # stands between the placeholders of a text that is only read to see what they become
# What the tokenizer makes, or what follows from the ids.
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
# transformers says at its top level that these need torchvision; their files do not.
WITHOUT_TORCHVISION: Mapping[str, Any] = {
    each.__name__: each
    for each in (Idefics3ImageProcessorPil, Idefics3Processor, SmolVLMImageProcessorPil, SmolVLMProcessor)
}
BACKENDS = {"pillow": "pil", "torchvision": "torchvision"}
TRIED = (64, 64)  # the image by which the placeholder is found


@frozen(eq=False)
class Seen:
    """The images of a sample. texts: what stands in the text for each; image_tokens: how many of its tokens are image
    tokens; tensors: by name, as the model takes them for a batch of this sample.
    """

    texts: tuple[str, ...]
    image_tokens: tuple[int, ...]
    tensors: Mapping[str, Tensor]

    @property
    def stored(self) -> dict[str, Tensor]:
        """The tensors of the sample in shards, with the number of tokens of each image."""
        return {IMAGE_TOKENS: torch.tensor(self.image_tokens), **self.tensors}


@frozen(eq=False)
class AnyImages:
    """The part of a checkpoint's processor that reads images.

    config: the content of config.json. placeholder: of an image, in a text. settings: of the processor itself.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    processor: ProcessorMixin
    placeholder: str
    image_token_id: int

    @classmethod
    def load(
        cls,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        image_settings: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        image_backend: str,
    ) -> AnyImages:
        """Put the processor of a model type together and find its placeholder.

        settings, image_settings: of the processor and its image processor. Raises DataError where it cannot be.
        """
        kind = str(config["model_type"])
        names = IMAGE_PROCESSOR_MAPPING_NAMES[kind]
        name = names.get(BACKENDS[image_backend])
        if name is None:
            others = " or ".join(f'"{each}"' for each, backend in BACKENDS.items() if backend in names)
            raise DataError(f"images of {kind} are not resized by {image_backend}: set image_backend = {others}")
        token = image_token_of(config)
        if token is None:
            raise DataError(f"config.json of {kind} names no image_token_id")
        try:
            images = _class(name).from_dict(dict(image_settings))
            processor = _composed(kind, settings, images, tokenizer)
        except ImportError as error:
            cause = error.__cause__
            named = cause.name if isinstance(cause, ImportError) else None
            needed = f"install {named}" if named else " ".join(str(error).split())
            raise DataError(f"the processor of {kind} needs another library: {needed}") from error
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise DataError(f"the processor of {kind} cannot be made: {' '.join(str(error).split())}") from error
        return cls(config, settings, processor, _placeholder(processor, token), token)

    @property
    def image_processor(self) -> Any:
        return self.processor.image_processor

    def see(self, images: Sequence[Image.Image]) -> Seen:
        """The RGB images of one sample, in their order; some processors treat several of them otherwise than one.

        Raises ValueError for an image that the processor rejects.
        """
        return _seen(self.processor, self.placeholder, self.image_token_id, images)


class _Texts:
    """A tokenizer that keeps the texts which it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: list[str], **options: Any) -> Any:
        self.texts = text
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def _class(name: str) -> Any:
    """A class of transformers. Raises ImportError where it gives another one, since this one needs torchvision."""
    found = WITHOUT_TORCHVISION.get(name) or getattr(transformers, name)
    if found.__name__ != name:
        raise ImportError(f"install torchvision for {name}")
    return found


def _composed(kind: str, settings: Mapping[str, Any], images: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The processor of a model type with a tokenizer and an image processor, and no other part."""
    base = _class(PROCESSOR_MAPPING_NAMES[kind])
    own = settings.get("processor_class", base.__name__)
    if own != base.__name__:
        raise ValueError(f"processor_class is {own}, and that of the type is {base.__name__}")

    class Composed(base):  # type: ignore[misc, valid-type]  # known when it runs
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

    parts = {"tokenizer": tokenizer, "image_processor": images}
    return Composed.from_args_and_dict([parts.get(name) for name in Composed.get_attributes()], dict(settings))


def _placeholder(processor: Any, image_token_id: int) -> str:
    """The token for an image in a text: that which the processor replaces by image tokens. Raises DataError."""
    tokenizer, image = processor.tokenizer, Image.new("RGB", TRIED, (90, 120, 150))
    named = (
        getattr(tokenizer, "image_token", None),
        vars(processor).get("image_token"),
        tokenizer.decode(image_token_id),
    )
    reasons = []
    for token in dict.fromkeys(each for each in (*named, getattr(tokenizer, "boi_token", None)) if each):
        try:
            if _seen(processor, token, image_token_id, [image]).image_tokens[0]:
                return str(token)
            reasons.append(f"{token} becomes no image tokens")
        except (ValueError, IndexError, StopIteration, RuntimeError) as error:
            reasons.append(f"{token}: {' '.join(str(error).split())}")
    raise DataError(f"no token of this processor becomes the tokens of an image ({'; '.join(reasons)})")


def _seen(processor: Any, placeholder: str, image_token_id: int, images: Sequence[Image.Image]) -> Seen:
    noted = copy.copy(processor)
    noted.tokenizer = texts = _Texts(processor.tokenizer)
    made = noted(text=[BETWEEN.join([placeholder] * len(images))], images=[list(images)], return_tensors="pt")
    replaced = texts.texts[0].split(BETWEEN)
    if len(replaced) != len(images):
        raise ValueError(f"the processor makes {len(replaced)} images of {len(images)}")
    tensors = {name: value for name, value in made.items() if name not in OF_TOKENS}
    if others := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"the processor makes {', '.join(others)}, which are no tensors")
    ids = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in replaced]
    return Seen(tuple(replaced), tuple(each.count(image_token_id) for each in ids), tensors)
