"""Small source trees, and which symbols an edit of them changes."""

from __future__ import annotations

from pathlib import Path

from dsl.fingerprint import code_fingerprints


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def symbols(root: Path, run: str = "main:run") -> set[str]:
    return set(code_fingerprints(run, [root]))


def changed(root: Path, files: dict[str, str], edited: dict[str, str]) -> set[str]:
    """Symbols of main:run that an edit changes, adds or takes away."""
    write(root, files)
    before = code_fingerprints("main:run", [root])
    write(root, edited)
    after = code_fingerprints("main:run", [root])
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def changed_in_main(root: Path, before: str, after: str) -> set[str]:
    return changed(root, {"main.py": before}, {"main.py": after})
