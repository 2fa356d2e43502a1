"""The files of a processor that must not be missing: tokenizer and chat template. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from ops.lib.data.checkpoint_code import read_settings

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
TEMPLATE_SETTINGS = ("chat_template.json", "tokenizer_config.json", "processor_config.json")  # as "chat_template"
NO_TOKENIZER = f"no tokenizer can be loaded: it has none of {', '.join(TOKENIZER_FILES)}"
NO_TEMPLATE = "it has no chat template (chat_template.jinja); copy that of the instruct version of the model"


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def processor_mistakes(directory: Path) -> list[str]:
    """What a processor in the directory lacks, a sentence each. Raises DataError for a JSON file that is none."""
    mistakes = [] if has_tokenizer(directory) else [NO_TOKENIZER]
    if not _has_template(directory):
        mistakes.append(NO_TEMPLATE)
    return [f"processor {directory}: {mistake}" for mistake in mistakes]


def _has_template(directory: Path) -> bool:
    return any(file.stat().st_size for pattern in TEMPLATE_FILES for file in directory.glob(pattern)) or any(
        read_settings(directory / name).get("chat_template") for name in TEMPLATE_SETTINGS
    )
