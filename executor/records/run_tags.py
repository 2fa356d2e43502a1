"""Tags of runs: `dflow gc` keeps what tagged runs use, and a tag is accepted wherever a command takes a run.

<store>/records/<run>/tags.json     a list of names; a name belongs to one run of the store
"""

from __future__ import annotations

import re
from pathlib import Path

from dsl.errors import StoreError, UnknownName
from dsl.files import read_json_or_none, write_json
from executor.system.symlinks import links_in, refuse_links

TAGS = "tags.json"
_NAME = re.compile(r"[^\W\d][\w.+-]*")


def tags_of(folder: Path) -> list[str]:
    """The tags of the run with this record folder."""
    try:
        tags = read_json_or_none(folder / TAGS) or []
    except ValueError:
        tags = None
    if not (isinstance(tags, list) and all(isinstance(tag, str) and _NAME.fullmatch(tag) for tag in tags)):
        raise StoreError(f"{folder / TAGS}: is no list of tags; remove it, and tag the run again")
    return tags


def tagged_folder(records: Path, name: str) -> Path | None:
    """The record folder of the run with this tag; None without one."""
    folders = sorted(records.iterdir()) if records.is_dir() else []
    return next((folder for folder in folders if name in tags_of(folder)), None)


def add_tag(folder: Path, name: str) -> None:
    """Add a tag to a run; call it under the store's lock. Raises StoreError if it is in use, or looks like
    a run's id.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(f'"{name}" cannot be a tag: a letter first, then letters, digits and . _ + -')
    holder = tagged_folder(folder.parent, name)
    if holder is not None and holder != folder:
        raise StoreError(f'run {holder.name} has the tag "{name}"; remove it first: dflow runs --untag {name}')
    refuse_links(links_in(folder))
    alike = [other.name for other in folder.parent.iterdir() if other.name.endswith(name)]
    if alike:
        raise StoreError(f'"{name}" cannot be a tag: it is the end of the id of run {alike[0]}; choose another name')
    write_json(folder / TAGS, sorted({*tags_of(folder), name}))


def remove_tag(folder: Path, name: str) -> None:
    """Remove a tag from a run; call it under the store's lock. Raises UnknownName where the run has no such tag."""
    tags = tags_of(folder)
    if name not in tags:
        raise UnknownName(f'run {folder.name} has no tag "{name}"; its tags: {", ".join(tags) or "none"}')
    refuse_links(links_in(folder))
    tags.remove(name)
    if tags:
        write_json(folder / TAGS, tags)
    else:
        (folder / TAGS).unlink()
