"""The versions of installed libraries; the only module that loads importlib.metadata, which is slow."""

from __future__ import annotations

NOT_INSTALLED = "not installed"


class LibraryVersions(dict[str, str]):
    """Distribution -> version at one moment, looked up when it is asked for."""

    def __missing__(self, name: str) -> str:
        from importlib import metadata

        try:
            self[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            self[name] = NOT_INSTALLED
        return self[name]
