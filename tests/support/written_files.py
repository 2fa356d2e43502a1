"""Pipeline files as a test writes them, and what reading says of them."""

from pathlib import Path

import pytest

from dsl.errors import PipelineError
from dsl.read_toml import read_graph

HEAD = '[pipeline]\nname = "p"\n'
INGEST = '[node.ingest]\nop = "ingest"\nsource = "builtin:digits"\n'
INJECT = '[node.inject]\nop = "inject_images"\nsamples = "@ingest"\n'


def write(folder: Path, text: str, name: str = "p.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def mistakes(folder: Path, text: str, *overrides: str, name: str = "p.toml") -> list[str]:
    """The mistakes that reading a pipeline text reports, without the file's folder."""
    with pytest.raises(PipelineError) as caught:
        read_graph(write(folder, text, name), overrides)
    return str(caught.value).replace(f"{folder}/", "").split("\n")
