"""The files of a processor that must not be missing, tokenizer and chat template, and the sizes in them that would need
all memory. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dsl.errors import DataError, on_one_line
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import shown_json
from ops.lib.vision.pixel_limits import IMAGE_PROCESSOR_FILES, chosen_limits, image_settings

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
    """What a processor in the directory lacks, a sentence each. Raises DataError for a JSON file that is none."""
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
    """Raises DataError for sizes of an image processor with which no image, or no machine, could be processed."""
    for name in IMAGE_PROCESSOR_FILES:
        settings = read_settings(directory / name)
        for part in (settings, settings.get("image_processor")):
            if isinstance(part, Mapping):
                check_sizes(str(directory / name), part)
                check_sizes(str(directory / name), part.get("size"))


def check_sizes(place: str, settings: object) -> None:
    """Raises DataError, which begins with the place, for a size in an object that is no number within its limits."""
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
    sees = read_settings(directory / "config.json").get("vision_config") is not None
    return sees and not image_settings(directory)[1]


def template_texts(directory: Path) -> list[str]:
    """The chat templates of a readable directory."""
    return [text for *_, text in _templates(directory)]


def no_default_template(names: Iterable[str]) -> str:
    """Of named chat templates, among which transformers and serving engines cannot choose."""
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
    """The chat templates: where each is, its name, and its text. A JSON file has one, or a list of named ones."""
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
