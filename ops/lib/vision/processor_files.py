"""The files of a checkpoint's processor: tokenizer, chat template, and the settings and limits of its images. Loads no
torch.

Everything that counts or makes the tokens of an image reads the limits, min_pixels and max_pixels, here:
`load_processor`, `dflow init`, and the command of a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl.errors import DataError, on_one_line
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import shown_json
from ops.lib.vision.family_config import is_qwen, sees_by_name, vision_part

# Of image_processor_type: three names of one, which differ in the library that resizes.
IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# Of the types of SEEING, without the endings by which those names differ; they take no limits of pixels.
OTHER_IMAGE_PROCESSORS = (
    *("Gemma3ImageProcessor", "Gemma4ImageProcessor", "Idefics3ImageProcessor", "Lfm2VlImageProcessor"),
    *("LlavaOnevisionImageProcessor", "SmolVLMImageProcessor"),
)
IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
DEFAULTS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}  # of transformers' Qwen2VLImageProcessor
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # in `size`


def ordered_pixels(instance: Any, _attribute: object, most: int | None) -> None:
    """A validator of max_pixels. Raises ValueError if it is below min_pixels."""
    least = getattr(instance, "min_pixels", None)
    if least is not None and most is not None and least > most:
        raise ValueError(f"'max_pixels': {most} is less than min_pixels = {least}")


def image_settings(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The file and the settings of the image processor, where transformers looks for them: in processor_config.json as
    version 5 saves them, else in preprocessor_config.json. Empty without one, and beside a model that is read as its
    language model. Raises DataError for an unreadable file.
    """
    whole, own = (directory / name for name in IMAGE_PROCESSOR_FILES)
    config = read_settings(directory / "config.json")
    if not (is_qwen(config) or sees_by_name(config)):
        return own, {}
    nested = read_settings(whole).get("image_processor")
    return (whole, nested) if isinstance(nested, dict) else (own, read_settings(own))


def pixel_limits(place: Path | str, settings: Mapping[str, Any]) -> dict[str, int]:
    """The limits min_pixels and max_pixels of an image processor's settings; empty for empty settings, or without any.

    As in transformers, min_pixels and max_pixels come before `size`, and each limit is read by itself. Raises
    DataError, which begins with the place.
    """
    if not settings or has_no_limits(settings):
        return {}
    size = settings.get("size")
    size = size if isinstance(size, dict) else {}
    found = {
        name: settings.get(name) or size.get(edge) or size.get(name) or DEFAULTS[name] for name, edge in EDGES.items()
    }
    least, most = found.values()
    if not all(type(limit) is int and limit > 0 for limit in found.values()) or least > most:
        raise DataError(f"{place}: {least!r} and {most!r} are no least and most number of pixels of an image")
    return found


def has_no_limits(settings: Mapping[str, Any]) -> bool:
    """Whether an image processor is one of another family than Qwen's, which has sizes of its own."""
    kind = str(settings.get("image_processor_type", ""))
    return kind.removesuffix("Fast").removesuffix("Pil") in OTHER_IMAGE_PROCESSORS


def chosen_limits(
    source: Path | str,
    place: Path | str,
    settings: Mapping[str, Any],
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> dict[str, int]:
    """The pixel limits of a processor's settings, replaced by those of a node if given; empty for empty settings.

    source: the processor. place: the file of the settings. Raises DataError for an unknown image processor, for limits
    that exclude each other, and for any where it takes none.
    """
    if not settings:
        return {}
    kind = settings.get("image_processor_type", "")
    wanted = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    if has_no_limits(settings):
        if given := [name for name, each in wanted.items() if each]:
            named = " and ".join(given)
            raise DataError(
                f"processor {source}: {kind} takes no {named}: leave {named} out, and set the sizes of images in its "
                "preprocessor_config.json"
            )
        return {}
    if kind not in IMAGE_PROCESSORS:
        known = ", ".join((*IMAGE_PROCESSORS, *OTHER_IMAGE_PROCESSORS))
        raise DataError(f'processor {source}: unknown image_processor_type "{kind}"; supported: {known}')
    limits = pixel_limits(f"processor {place}", settings) | {name: each for name, each in wanted.items() if each}
    if limits["min_pixels"] > limits["max_pixels"]:
        raise DataError(f"processor {source}: min_pixels {limits['min_pixels']} > max_pixels {limits['max_pixels']}")
    return limits


def served_pixels(captured: Mapping[str, Any], model_dir: Path) -> dict[str, int]:
    """The pixel limits of the training's images if they differ from the target's own, else empty.

    captured: the entry of training.json. Raises DataError if the target's processor cannot be read.
    """
    used = captured.get("pixel_limits") or {}
    return dict(used) if used != pixel_limits(*image_settings(model_dir)) else {}


TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
DEFAULT, DEFAULT_FILE = "default", "chat_template.jinja"
TEMPLATE_FILES = (DEFAULT_FILE, "additional_chat_templates/*.jinja")
TEMPLATE_SETTINGS = ("chat_template.json", "tokenizer_config.json", "processor_config.json")  # as "chat_template"
NO_TOKENIZER = f"no tokenizer can be loaded: it has none of {', '.join(TOKENIZER_FILES)}"
NO_IMAGE_PROCESSOR = (
    "a vision-language model without an image processor (preprocessor_config.json); copy that file from the "
    "checkpoint's source"
)
NO_TEMPLATE = "it has no chat template (chat_template.jinja); copy that of the instruct version of the model"

# The most of each size that an image processor or a vision tower may have; published ones have up to 16, 2, 2 and 2,
# and images of up to 17 million pixels.
MOST_SIZES = {"patch_size": 64, "merge_size": 8, "spatial_merge_size": 8, "temporal_patch_size": 8}
MOST_PIXELS = dict.fromkeys(("min_pixels", "max_pixels", "shortest_edge", "longest_edge"), 1 << 26)


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def processor_mistakes(directory: Path) -> list[str]:
    """Sentences on what a processor in the directory lacks. Raises DataError for an invalid JSON file."""
    mistakes = [] if has_tokenizer(directory) else [NO_TOKENIZER]
    templates = list(_templates(directory))
    names = [name for _, name, _ in templates]
    if not templates:
        mistakes.append(NO_TEMPLATE)
    elif DEFAULT not in names:
        mistakes.append(no_default_template(names))
    return [
        *(f"processor {directory}: {mistake}" for mistake in mistakes),
        *_image_mistakes(directory),
        *_template_mistakes(templates),
    ]


def check_image_sizes(directory: Path) -> None:
    """Check that an image processor's sizes are possible for images and machines. Raises DataError."""
    for name in IMAGE_PROCESSOR_FILES:
        settings = read_settings(directory / name)
        for part in (settings, settings.get("image_processor")):
            if isinstance(part, Mapping):
                check_sizes(str(directory / name), part)
                check_sizes(str(directory / name), part.get("size"))


def check_sizes(place: str, settings: object) -> None:
    """Check that the sizes in a settings object are numbers within their limits. Raises DataError, which begins with
    the place.
    """
    found = settings if isinstance(settings, Mapping) else {}
    for name, most in (MOST_SIZES | MOST_PIXELS).items():
        size = found.get(name)
        if size is not None and not (type(size) is int and 1 <= size <= most):
            kind = "number of pixels" if name in MOST_PIXELS else "number"
            raise DataError(
                f"{place}: {name} is {shown_json(size)}, not a {kind} from 1 to {most}; copy the file again from the "
                "checkpoint's source"
            )


def _image_mistakes(directory: Path) -> list[str]:
    try:
        check_image_sizes(directory)
        chosen_limits(directory, *image_settings(directory))
    except DataError as error:
        return [str(error)]
    return []


def lacks_image_processor(directory: Path) -> bool:
    """Whether the model in a readable directory sees, and has no settings of an image processor."""
    config = read_settings(directory / "config.json")
    sees = vision_part(config) is not None or sees_by_name(config)
    return sees and not image_settings(directory)[1]


def template_texts(directory: Path) -> list[str]:
    """The chat templates of a readable directory."""
    return [text for *_, text in _templates(directory)]


def no_default_template(names: Iterable[str]) -> str:
    """The message that several named chat templates leave transformers and engines no choice."""
    listed = on_one_line(", ".join(sorted(set(names))))
    return (
        f"its chat templates are named {listed}, and none is the default; copy the one to use to {DEFAULT_FILE} in "
        "that directory"
    )


def _template_mistakes(templates: Sequence[tuple[str, str, str]]) -> list[str]:
    from ops.lib.vision.chat_template import check_template  # loads jinja2

    mistakes = []
    for place, _, text in templates:
        try:
            check_template(text, place)
        except DataError as error:
            mistakes.append(str(error))
    return mistakes


def _templates(directory: Path) -> Iterator[tuple[str, str, str]]:
    """The chat templates in a directory, as place, name and text. A JSON file has one, or several named ones."""
    for file in (file for pattern in TEMPLATE_FILES for file in sorted(directory.glob(pattern))):
        if file.stat().st_size:
            name = DEFAULT if file.parent == directory else file.stem
            yield str(file), name, file.read_text("utf-8", "replace")
    for name in TEMPLATE_SETTINGS:
        found = read_settings(directory / name).get("chat_template")
        for each in found if isinstance(found, list) else [found]:
            named = each if isinstance(each, Mapping) else {"name": DEFAULT, "template": each}
            if named.get("template"):
                yield f"{directory / name}, chat_template", str(named.get("name")), str(named["template"])
