"""A processor composed by hand: tokenizer and image processor of a checkpoint directory or a model id.

transformers' AutoProcessor and its Qwen VL processor classes require a video processor, which needs torchvision.
Here the two parts for images and text are loaded separately, by default with the Pillow image processors. Qwen's
patches are placed in a text here (`pixels`, chunks.py); of other targets their own processor does it (`own`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dsl.errors import ConfigError, DataError
from ops.lib.data.checkpoint_code import check_places, check_reads, read_settings
from ops.lib.data.files import check_json_files, write_json
from ops.lib.vision.any_images import AnyImages
from ops.lib.vision.families import AnyText, find_family
from ops.lib.vision.family_config import MASK_TOKENS, sees_by_name, text_part
from ops.lib.vision.processor_files import (
    DEFAULT,
    EDGES,
    IMAGE_PROCESSOR_FILES,
    NO_TEMPLATE,
    NO_TOKENIZER,
    check_image_sizes,
    chosen_limits,
    has_tokenizer,
    image_settings,
    no_default_template,
)

IMAGE_TOKEN = "<|image_pad|>"
PROCESSOR_CONFIG = IMAGE_PROCESSOR_FILES[0]
# What transformers raises for values in a checkpoint's JSON that it did not expect, and where a class needs a library
# that is not installed.
LOADING_ERRORS = (
    *(ValueError, LookupError, TypeError, AttributeError, ImportError, ArithmeticError),
    StrictDataclassError,
)

ImageBackend = Literal["pillow", "torchvision"]


@frozen
class Processor:
    """A tokenizer, an image processor (None for a text-only model) and the ids that dflow needs.

    image_token: the placeholder of an image in a text. own: of a target that is not Qwen's, what reads images; blind:
    why nothing does, though the target sees. image_backend: the library that resizes images, None without an image
    processor. vocab_size: the model's if its config is present, else the tokenizer's; one more than the largest id, if
    that is larger.
    """

    source: str
    tokenizer: PreTrainedTokenizerBase
    image_processor: Any
    image_backend: ImageBackend | None
    image_token: str
    image_token_id: int | None
    mask_token_id: int | None
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    special_tokens: tuple[str, ...]
    vocab_size: int
    own: AnyImages | None = None
    blind: str = ""

    @property
    def sees(self) -> bool:
        """Whether the processor accepts images."""
        return self.image_processor is not None and self.image_token_id is not None

    @property
    def pixel_limits(self) -> dict[str, int] | None:
        """The limits min_pixels and max_pixels of an image; None without an image processor, or if it has none."""
        if self.image_processor is None or self.own:
            return None
        size = self.image_processor.size
        return {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}

    @property
    def patch_dim(self) -> int:
        """The length of a row of pixel values; 0 without images, and for other processors than Qwen's."""
        images = None if self.own else self.image_processor
        return 3 * images.temporal_patch_size * images.patch_size**2 if images else 0

    @property
    def merge_size(self) -> int:
        return self.image_processor.merge_size if self.image_processor and not self.own else 1

    @property
    def placeholder_id(self) -> int | None:
        """The id of an image's placeholder; its image tokens have another one in some families."""
        return self.tokenizer.get_vocab().get(self.image_token)

    @property
    def images_of(self) -> str | None:
        """The model type by whose processor images are read; None for Qwen's, and without images."""
        return str(self.own.config["model_type"]) if self.own else None

    def image_tokens(self, width: int, height: int) -> int:
        """The number of tokens of an image of this size. Raises ValueError as `pixels` does."""
        patches: int = self.image_processor.get_number_of_image_patches(height, width, {})
        return patches // self.merge_size**2

    def pixels(self, image: Image.Image) -> dict[str, Any]:
        """The pixels of an RGB image: pixel_values float32 [t*h*w, patch_dim] and image_grid_thw int64 [1, 3].

        Raises ValueError for an image that the processor rejects (sides that differ by a factor above 200).
        """
        return self.image_processor(images=[image], return_tensors="pt")

    def picture(self, pixel_values: Tensor, grid_thw: Sequence[int]) -> Image.Image:
        """The resized RGB image from which `pixels` made the rows [t*h*w, patch_dim], up to rounding."""
        images = self.image_processor
        _, rows, columns = grid_thw
        merge, side = images.merge_size, images.patch_size
        patches = pixel_values[: rows * columns].reshape(
            rows // merge, columns // merge, merge, merge, 3, images.temporal_patch_size, side, side
        )[..., 0, :, :]
        rgb = patches.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3)
        if images.do_normalize:
            rgb = rgb * rgb.new_tensor(images.image_std) + rgb.new_tensor(images.image_mean)
        if images.do_rescale:
            rgb = rgb / images.rescale_factor
        return Image.fromarray(rgb.round().clamp(0, 255).byte().numpy())

    def save(self, folder: Path) -> None:
        """Write the files from which `load_processor` (and transformers) load the same processor."""
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)
        if self.own is not None:
            write_json(folder / PROCESSOR_CONFIG, dict(self.own.settings))
            write_json(folder / "config.json", dict(self.own.config))


def load_processor(
    source: str,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    trust_remote_code: bool = False,
    image_backend: ImageBackend = "pillow",
    chat_template: str | None = None,
) -> Processor:
    """Load the processor of a checkpoint directory or model id. min_pixels, max_pixels: override the image sizes.

    chat_template: replaces the checkpoint's; a vision-language model's is the processor's, if it has one, as in
    transformers. trust_remote_code: whether a tokenizer's own code may run; code of another repository never does.
    image_backend: the library that resizes images; the two differ by up to two grey levels, and engines may use either.
    Raises DataError if the tokenizer cannot be loaded, or has no character offsets, chat template, EOS or padding
    token, and for an unknown image processor; ConfigError if torchvision is missing.
    """
    if Path(source).is_dir() and not has_tokenizer(Path(source)):
        # transformers would silently make an empty tokenizer of the model's family.
        raise DataError(f"processor {source}: {NO_TOKENIZER}")
    if Path(source).is_dir():
        check_reads(Path(source))
        check_json_files(Path(source))
        check_image_sizes(Path(source))
    config = model_config(source)
    if trust_remote_code:
        check_places(Path(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, RecursionError, *LOADING_ERRORS) as error:
        raise DataError(f"processor {source}: no tokenizer can be loaded: {type(error).__name__}: {error}") from error
    if not tokenizer.is_fast:
        raise DataError(f"processor {source}: a tokenizer with character offsets (tokenizer.json) is required")
    own, blind = None, ""
    if sees_by_name(config):
        own, blind = _own_images(source, config, tokenizer, min_pixels, max_pixels, image_backend)
    sees = not isinstance(find_family(config), AnyText)
    image_processor = _image_processor(source, min_pixels, max_pixels, image_backend) if sees else None
    image_processor = own.image_processor if own else image_processor
    template = chat_template or (_processor_settings(source).get("chat_template") if image_processor or blind else None)
    if template:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        raise DataError(f"processor {source}: {NO_TEMPLATE}")
    if isinstance(tokenizer.chat_template, Mapping) and DEFAULT not in tokenizer.chat_template:
        raise DataError(f"processor {source}: {no_default_template(tokenizer.chat_template)}")
    if tokenizer.eos_token_id is None:
        raise DataError(f"processor {source}: the tokenizer has no EOS token")
    text_config = text_part(config)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else text_config.get("pad_token_id")
    vocab_size = max([*tokenizer.get_vocab().values(), text_config.get("vocab_size", 0) - 1]) + 1
    image_token = own.placeholder if own else getattr(tokenizer, "image_token", None) or IMAGE_TOKEN
    return Processor(
        source=source,
        tokenizer=tokenizer,
        image_processor=image_processor,
        image_backend=image_backend if image_processor else None,
        image_token=image_token,
        image_token_id=own.image_token_id if own else tokenizer.get_vocab().get(image_token),
        mask_token_id=mask_token_id(tokenizer, config, vocab_size),
        pad_token_id=tokenizer.eos_token_id if pad is None else pad,
        eos_token_ids=_eos_token_ids(source, tokenizer.eos_token_id),
        special_tokens=tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special),
        vocab_size=vocab_size,
        own=own,
        blind=blind,
    )


def mask_token_id(tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any], vocab_size: int) -> int | None:
    """The id of the tokenizer's own mask token, else the family's if it is in the vocabulary, else None."""
    vocabulary = tokenizer.get_vocab()
    for token in MASK_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    family = find_family(config)
    known = family.mask_token_id if family else None
    return known if known is not None and known < vocab_size else None


def model_config(source: str) -> dict[str, Any]:
    """The config.json of a checkpoint; {} if a directory has only a processor."""
    if not Path(source).is_dir():
        return PreTrainedConfig.get_config_dict(source)[0]
    return read_settings(Path(source) / "config.json")


def _processor_settings(source: str) -> dict[str, Any]:
    """The settings of the processor itself, with its chat template in transformers' order, if it has one.

    The order is processor_config.json, chat_template.json, chat_template.jinja.
    """
    try:
        settings, _ = ProcessorMixin.get_processor_dict(source)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"processor {source}: its chat template cannot be read: {error}") from error
    return dict(settings)


def _own_images(
    source: str,
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    min_pixels: int | None,
    max_pixels: int | None,
    backend: ImageBackend,
) -> tuple[AnyImages | None, str]:
    """What reads the images of a target that is not Qwen's, or why nothing does: its texts can be read all the same.

    Raises DataError for limits of pixels, which those processors do not take.
    """
    place, images = _image_settings(source)
    chosen_limits(source, place, images, min_pixels, max_pixels)
    if not images:
        return None, ""
    parts = ("chat_template", "image_processor", "video_processor", "feature_extractor")
    settings = {name: each for name, each in _processor_settings(source).items() if name not in parts}
    try:
        return AnyImages.load(config, settings, images, tokenizer, backend), ""
    except DataError as error:
        return None, str(error)


def _eos_token_ids(source: str, eos_token_id: int) -> tuple[int, ...]:
    """The ids of EOS tokens: the tokenizer's first, then others at which generation stops."""
    try:
        others = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # no generation_config.json
        others = None
    except LOADING_ERRORS as error:
        raise DataError(f"processor {source}: generation_config.json cannot be read: {error}") from error
    others = others if isinstance(others, list) else [others]
    return tuple(dict.fromkeys([eos_token_id, *(token for token in others if token is not None)]))


def _image_processor(source: str, min_pixels: int | None, max_pixels: int | None, backend: ImageBackend) -> Any:
    place, settings = _image_settings(source)
    if not settings:
        return None  # a text-only model
    limits = chosen_limits(source, place, settings, min_pixels, max_pixels)
    image_processor = _torchvision_class() if backend == "torchvision" else Qwen2VLImageProcessorPil
    others = {name: value for name, value in settings.items() if name not in limits}
    return image_processor.from_dict({**others, "size": {EDGES[name]: limit for name, limit in limits.items()}})


def _image_settings(source: str) -> tuple[Path | str, dict[str, Any]]:
    """The image processor's file and settings, of a directory or a model id, which is downloaded; empty without one."""
    if Path(source).is_dir():
        return image_settings(Path(source))
    try:
        return source, Qwen2VLImageProcessorPil.get_image_processor_dict(source)[0]
    except OSError:
        return source, {}


def _torchvision_class() -> type[BaseImageProcessor]:
    """The torchvision counterpart of the Pillow image processor. Raises ConfigError without torchvision."""
    try:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

        return Qwen2VLImageProcessor
    except (ImportError, RuntimeError) as error:  # missing, or built for another torch
        raise ConfigError(
            f'image_backend = "torchvision": torchvision cannot be imported here ({error}); install the build '
            'that fits the installed torch, or set image_backend = "pillow"'
        ) from error


def main() -> None:
    """Print the most tokens of an image of two sides, either way, by a checkpoint's own processor.

    Arguments: the directory, "pillow" or "torchvision", and two numbers of pixels.
    """
    directory, backend, *sides = sys.argv[1:]
    processor = load_processor(directory, image_backend="torchvision" if backend == "torchvision" else "pillow")
    if processor.own is None:
        sys.exit(processor.blind or f"{directory} has no image processor (preprocessor_config.json)")
    width, height = map(int, sides)
    pictures = [Image.new("RGB", size, (90, 120, 150)) for size in ((width, height), (height, width), (width, width))]
    print(max(sum(processor.own.see([picture]).image_tokens) for picture in pictures))


if __name__ == "__main__":
    main()
