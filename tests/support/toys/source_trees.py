"""Small source trees, and which modules an edit of them changes."""

from __future__ import annotations

from pathlib import Path

from dsl.closure import Project


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def digests(root: Path, run: str = "main:run") -> dict[str, str]:
    """The digests of the code that a function can import, by file."""
    return Project([root]).closure([run]).digests


def modules(root: Path, run: str = "main:run") -> set[str]:
    return set(digests(root, run))


def changed(root: Path, files: dict[str, str], edited: dict[str, str]) -> set[str]:
    """The files of main:run whose digest an edit changes, adds or removes."""
    write(root, files)
    before = digests(root)
    write(root, edited)
    after = digests(root)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def changed_in_main(root: Path, before: str, after: str) -> bool:
    return changed(root, {"main.py": before}, {"main.py": after}) == {"main.py"}
