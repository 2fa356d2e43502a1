"""A shared directory or bucket of artifacts and index lines, at any URL that fsspec supports.

    <url>/format                     version of the layout, that of a store
    <url>/objects/<digest>/          an artifact's files; its manifest.json comes last, so it is complete or absent
    <url>/index/<key>/<digest>       one index line: concurrent pushes do not conflict

A store can be read the same way, but not pushed to. In a directory no link is followed out of it: a stranger's would
lead to private files. The only module that imports fsspec.
"""

from __future__ import annotations

import math
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import fsspec.core
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from dsl.artifact_digest import MANIFEST
from dsl.convert import structure
from dsl.errors import StoreError, StructureError
from dsl.files import known_fields, parse_json, parsed_object
from dsl.secrets import redact
from dsl.shown import shown_value
from executor.store.artifact_store import FORMAT
from executor.store.manifest import IndexLine, Manifest
from executor.store.names import DIGEST, KEY, RUN
from executor.system.output import shown_digest

# Errors of the libraries below fsspec that are no OSError: no credentials, no such host, access denied.
FOREIGN_ERRORS = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "aiohttp": ("ClientError",),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "azure.core.exceptions": ("AzureError",),
    "paramiko": ("SSHException",),
}
# Puts are atomic there; elsewhere a file is written under another name and renamed when it is complete.
WHOLE_PUTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "memory"})
# A server may send more than it was asked for, so these are read as streams.
HTTP = frozenset({"http", "https"})
MOST_BYTES = 32 << 20  # of a file that is read whole, and of all index lines of a key: dflow writes none so large
NAME_BYTES = 255
T = TypeVar("T")


class Remote:
    """A remote store at a URL. Methods raise StoreError, with the URL, where it cannot be reached or refuses."""

    def __init__(self, url: str) -> None:
        self.url = _shown(url)
        self._hidden = [part for part in (urlsplit(url).query, urlsplit(url).fragment) if part and "://" in url]
        with self._clear():
            self._files, root = fsspec.core.url_to_fs(url if "://" in url else str(Path(url).expanduser().absolute()))
        self._root = str(root).rstrip("/")
        is_directory = isinstance(self._files, LocalFileSystem)
        self._folder = Path(os.path.realpath(self._root)) if is_directory else None
        protocols = self._files.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        self._puts_whole = bool(names & WHOLE_PUTS)
        self._reading = {"block_size": 0} if names & HTTP else {}

    def check_format(self, *, write: bool) -> None:
        """Check the remote's layout. Raises StoreError if it differs, or is empty. write: initialise an
        empty remote.
        """
        with self._clear():
            version = self._json("format")
            found = [] if version is not None else self._names("")
        if version not in (None, FORMAT):
            raise StoreError(
                f"{self.url}: has layout {version}, this version of dflow uses layout {FORMAT}; "
                "use another URL, or the version of dflow that pushed there"
            )
        if version is None and not write:
            raise StoreError(f"{self.url}: nothing was pushed there; check the URL, or start with `dflow push`")
        if found and version is None:
            raise StoreError(f"{self.url}: holds other files; push to a directory of its own")
        if write and version is not None and set(self._names("")) & {"records", "work"}:
            raise StoreError(f"{self.url}: is a store of runs; push to a directory of its own")
        if version is None:
            self.put_text("format", f"{FORMAT}\n")

    def index_keys(self) -> list[str]:
        """The keys of the index."""
        with self._clear():
            return [name for name in self._names("index") if KEY.fullmatch(name)]

    def lines(self, key: str) -> list[IndexLine]:
        """The index lines of a key, oldest first. Raises StoreError where one is invalid."""
        with self._clear():
            path = self._path(f"index/{key}")
            if self._files.isfile(path):  # a store keeps the lines of a key in one file
                texts = (self._bytes(f"index/{key}") or b"").splitlines()
            else:
                texts = []
                for name in self._names(f"index/{key}"):
                    left = MOST_BYTES - sum(map(len, texts))
                    texts.append(self._bytes(f"index/{key}/{name}", left) or b"")
        found = [line for text in texts if (line := parsed_object(text)) is not None]
        try:
            lines = [index_line(line) for line in found]
        except NotAsExpected as error:
            raise StoreError(
                f"{self.url}: its index of the key {shown_digest(key)} cannot be used: {error}; "
                f"remove index/{key} there and push again"
            ) from None
        return sorted(lines, key=lambda line: line.time)

    def manifest(self, digest: str) -> bytes | None:
        """The bytes of an artifact's manifest; None where the artifact was not pushed completely."""
        with self._clear():
            return self._bytes(f"objects/{digest}/{MANIFEST}")

    def sizes(self, digest: str) -> dict[str, int]:
        """The sizes of an artifact's files at the remote, complete or not, by relative name."""
        folder = self._path(f"objects/{digest}")
        with self._clear():
            self._files.invalidate_cache()
            try:
                found = self._files.find(folder, detail=True)
            except FileNotFoundError:
                return {}
        inside = {str(path).rpartition(f"/objects/{digest}/")[2]: entry for path, entry in found.items()}
        return {name: int(entry["size"]) for name, entry in inside.items()}

    def get(self, name: str, target: Path, size: int) -> None:
        """Fetch a file. name: relative to the URL. Raises StoreError, and stops, after more than `size` bytes."""
        with self._clear():
            self._files.get_file(self._path(name), str(target), callback=_limit(f"{self.url}: {name}", size))

    def put(self, source: Path, name: str) -> None:
        """Upload a file, atomically."""
        self._put(name, lambda target: self._files.put_file(str(source), target))

    def put_text(self, name: str, text: str) -> None:
        self._put(name, lambda target: self._files.pipe_file(target, text.encode()))

    def _put(self, name: str, upload: Callable[[str], object]) -> None:
        target = self._path(name)
        with self._clear():
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            part = target if self._puts_whole else f"{target}.{uuid.uuid4().hex}.part"
            upload(part)
            if part != target:
                self._files.mv(part, target)

    def has(self, name: str) -> bool:
        with self._clear():
            return bool(self._files.exists(self._path(name)))

    def _path(self, name: str) -> str:
        """The full path of a name at the remote.

        Raises StoreError in a local remote for a link that leads out of it, or for what is neither file nor folder.
        """
        path = f"{self._root}/{name}".rstrip("/")
        if self._folder is not None:
            leads_to = Path(os.path.realpath(path))
            if not leads_to.is_relative_to(self._folder):
                raise StoreError(f"{self.url}: {name} is behind a link out of it, to {leads_to}; remove that link")
            if leads_to.exists() and not (leads_to.is_file() or leads_to.is_dir()):
                raise StoreError(f"{self.url}: {name} is neither a file nor a folder; remove it")
        return path

    def _names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        names = (os.path.basename(str(path).rstrip("/")) for path in found)  # noqa: PTH119
        return sorted(name for name in names if not name.endswith(".part"))

    def _bytes(self, name: str, most: int = MOST_BYTES) -> bytes | None:
        """The content of a remote file, None if missing. Raises StoreError, and stops, after more than `most` bytes."""
        found = bytearray()
        try:
            with self._files.open(self._path(name), "rb", **self._reading) as file:
                while len(found) <= most and (piece := file.read(most + 1 - len(found))):
                    found += piece
        except FileNotFoundError:
            return None
        if len(found) > most:
            raise StoreError(f"{self.url}: {name} is larger than dflow writes it; use another URL, or remove it there")
        return bytes(found)

    def _json(self, name: str) -> Any:
        found = self._bytes(name)
        return None if found is None else parse_json(found)

    @contextmanager
    def _clear(self) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            raise StoreError(f"{self.url}: {redact(str(error), self._hidden)}{_to_install(self.url)}") from error
        except _errors() as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise StoreError(f"{self.url}: cannot be reached or used: {redact(reason, self._hidden)}") from error


def _limit(name: str, size: int) -> Callback:
    """A callback that ends the transfer of a file after more bytes than its size."""

    def check(_: int | None, transferred: int) -> None:
        if transferred > size:
            raise StoreError(f"{name} has more than its {size} bytes; push it again")

    return Callback(hooks={"size": check})


def _errors() -> tuple[type[Exception], ...]:
    """The error classes that a remote may raise, from the libraries that are loaded."""
    loaded = [(sys.modules[name], errors) for name, errors in FOREIGN_ERRORS.items() if name in sys.modules]
    foreign = [getattr(module, error) for module, errors in loaded for error in errors if hasattr(module, error)]
    return (OSError, ValueError, *foreign)


def _to_install(url: str) -> str:
    """The command that installs the package that fsspec needs for a URL."""
    implementation = known_implementations.get(urlsplit(url).scheme, {}).get("class", "")
    package = implementation.partition(".")[0]
    return f": pip install {package}" if package not in ("", "fsspec") else ""


def _shown(url: str) -> str:
    """The URL without user name, password and tokens, for messages and records."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class NotAsExpected(StoreError):
    """An error: data at a remote that no dflow writes."""


def index_line(line: Mapping[str, Any]) -> IndexLine:
    """The line of an index. Raises NotAsExpected."""
    made = _structured(lambda: structure(IndexLine, known_fields(IndexLine, line)))
    _require_names(made)
    if not math.isfinite(made.time):
        raise NotAsExpected(f"time: expected seconds, got {made.time}")
    return made


def pulled_manifest(data: bytes, op: str | None) -> Manifest:
    """Parse an artifact's manifest from a remote. op: the node's op, None if unknown. Raises NotAsExpected."""
    try:
        values = parse_json(data)
    except ValueError:
        raise NotAsExpected("it is not JSON") from None
    manifest = _structured(lambda: Manifest.checked(values))
    _require_names(manifest)
    _require("key", manifest.key, DIGEST)
    if not manifest.files:
        raise NotAsExpected("files: must not be empty")
    if op is not None and manifest.op != op:
        raise NotAsExpected(f'its op is "{manifest.op}", but the node uses "{op}"')
    for name, entry in manifest.files.items():
        wrong = _wrong_with_name(name)
        if wrong:
            raise NotAsExpected(f"the file name {name!r} {wrong}")
        _require(f"{name}: sha256", entry.sha256, DIGEST)
        if entry.size < 0:
            raise NotAsExpected(f"{name}: size: expected 0 or more, got {entry.size}")
    clash = next(_folders_that_are_files(manifest.files), None)
    if clash is not None:
        raise NotAsExpected(f"{clash} is both a file and a folder")
    return manifest


def _structured(make: Callable[[], T]) -> T:
    try:
        return make()
    except StructureError as error:
        raise NotAsExpected("; ".join(map(str, error.mistakes[:3]))) from None


def _require_names(record: IndexLine | Manifest) -> None:
    _require("digest", record.digest, DIGEST)
    _require("run", record.run, RUN)


def _require(name: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):
        raise NotAsExpected(f"{name}: {shown_value(value)} does not match {pattern.pattern}")


def _wrong_with_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or not name or any(part in ("", ".", "..") for part in name.split("/")):
        return "points outside the artifact, or is empty"
    if name == MANIFEST:
        return "is reserved for the store"
    try:
        is_long = any(len(part.encode()) > NAME_BYTES for part in path.parts)
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if is_long or "\0" in name:
        return "is not a valid file name"
    return ""


def _folders_that_are_files(files: Mapping[str, Any]) -> Iterator[str]:
    for name in files:
        yield from (str(folder) for folder in PurePosixPath(name).parents if str(folder) in files)
