"""Chat templates of real models, out of what ships them: trl, and folders that an environment variable names."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path


def published_templates() -> dict[str, str]:
    """Chat templates by name; those with marks for a training are other ones than the checkpoints'."""
    folders = [Path(each) for each in os.environ.get("DFLOW_CHAT_TEMPLATES", "").split(os.pathsep) if each]
    spec = find_spec("trl")
    if spec is not None and spec.submodule_search_locations:
        folders.append(Path(spec.submodule_search_locations[0]) / "chat_templates")
    files = [file for folder in folders for file in sorted(folder.glob("*.jinja"))]
    return {file.stem: file.read_text("utf-8") for file in files if not file.stem.endswith("_training")}
