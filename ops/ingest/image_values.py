"""An image as a row names it: a path, a data: URL, base64, bytes, or the {"bytes", "path"} of Hugging Face.

A sample is dropped for one of these reasons:

    image missing               no such file, or not a regular one
    image outside the folder    a path that leads out of the folder of images, by "..", a link or an absolute path
    image behind a URL          http(s): nothing is downloaded, since a key cannot name a URL's content
    image undecodable           invalid base64
    videos are not supported    a data: URL of a video; likewise for audio
    image unreadable            the file exists, but cannot be read
    image file too large        more than MAX_IMAGE_BYTES
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from attrs import frozen

from dsl.errors import DataError
from ops.lib.data.image_packs import MAX_IMAGE_BYTES
from ops.lib.data.sample_account import Unusable

MISSING, OUTSIDE = "image missing", "image outside the folder"
REMOTE, UNDECODABLE = "image behind a URL", "image undecodable"
UNREADABLE, FILE_TOO_LARGE = "image unreadable", "image file too large"
VIDEO, AUDIO = "videos are not supported", "audio is not supported"

IMAGE_NAMES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
DATA_URL = re.compile(r"data:(?P<type>[\w.+-]*)[^,]*?(?P<base64>;base64)?,", re.IGNORECASE)
# The beginning of base64 of a PNG, JPEG, GIF, WebP, BMP and TIFF: 60 characters of this alphabet are not a file name.
BASE64 = re.compile(r"(?=iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk|SUkqA|TU0AK)[A-Za-z0-9+/]{60}")
SHOWN = 120


@frozen
class ImageFinder:
    """Finds the images that rows name.

    root            the folder of relative paths, which no path leaves without allow_outside
    image_root      the field's value, if it set the root
    remedy          what to do about a path that leaves the root
    """

    root: Path
    allow_outside: bool = False
    image_root: str | None = None
    remedy: str = "set image_root, or allow_outside = true"

    def image(self, value: Any) -> Path | bytes:
        """The image behind a value: a file with links resolved, or the encoded image itself. Raises Unusable.

        value: see `is_image_value`.
        """
        name = path_named(value)
        if name is not None:
            return self.file(name)
        if isinstance(value, dict):
            values = [value[key] for key in ("bytes", "base64", "path", "url") if value.get(key)]
            value = values[0] if values else b""
        return value if isinstance(value, bytes) else _decoded(value)

    def file(self, name: str) -> Path:
        """The file at a path. Raises Unusable if it is missing or outside, and DataError if the folder image_root is
        missing.
        """
        shown = name if len(name) <= SHOWN else f"{name[:SHOWN]}..."
        try:
            path = (self.root / name).resolve()
            if not (self.allow_outside or path.is_relative_to(self.root.resolve())):
                raise Unusable(OUTSIDE, f"{shown}: {self.remedy}")
            if path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):  # too long a name, a NUL in it, a loop of links
            pass
        if self.image_root is not None and not self.root.is_dir() and not Path(name).is_absolute():
            raise DataError(
                f'image_root = "{self.image_root}": there is no folder {self.root}, where {shown} was looked for; '
                "image_root is relative to the folder of the data file"
            )
        raise Unusable(MISSING, shown)


def encoded_image(image: Path | bytes, most: int = MAX_IMAGE_BYTES) -> bytes:
    """The bytes of an image that `ImageFinder` found.

    Raises Unusable, before anything is read, for more than `most` bytes, and for a file that cannot be read.
    """
    try:
        size = len(image) if isinstance(image, bytes) else image.stat().st_size
        if size > most:
            name = "" if isinstance(image, bytes) else f"{image.name}: "
            together = "" if most == MAX_IMAGE_BYTES else ", with those before it"
            raise Unusable(FILE_TOO_LARGE, f"{name}{size} bytes, more than {MAX_IMAGE_BYTES}{together}")
        return image if isinstance(image, bytes) else image.read_bytes()
    except OSError as error:
        raise Unusable(UNREADABLE, f"{Path(error.filename or '').name}: {error.strerror}") from error


def is_image_value(value: Any) -> bool:
    """Whether a value has the form of an image: str, bytes, or an object with "bytes", "path", "base64" or "url"."""
    if isinstance(value, dict):
        members = [value.get(key) for key in ("bytes", "base64", "path", "url")]
        given = [member for member in members if member is not None]
        return bool(given) and all(isinstance(member, (str, bytes)) for member in given)
    return isinstance(value, (str, bytes))


def path_named(value: Any) -> str | None:
    """The path in an image value; None for an image in the row itself, or behind a URL."""
    if isinstance(value, dict):
        if value.get("bytes") or value.get("base64"):
            return None
        named = value.get("path") or value.get("url")
        return path_named(named) if isinstance(named, str) else None
    if not isinstance(value, str) or value[:5].lower() == "data:" or _is_remote(value) or BASE64.match(value):
        return None
    if value.startswith("file://"):
        return unquote(urlsplit(value).path)
    return value


def _is_remote(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


def _place(address: str) -> str:
    """An address without the parts that hold keys: a user's name, a password, a query."""
    scheme, _, rest = address.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _decoded(text: str) -> bytes:
    """The bytes of base64 text, bare or in a data: URL."""
    if _is_remote(text):
        raise Unusable(REMOTE, f"{_place(text)[:SHOWN]}: download it and name the file")
    if text[:5].lower() == "data:":
        head = DATA_URL.match(text[:SHOWN])
        if head is None or not head["base64"]:
            raise Unusable(UNDECODABLE, "a data: URL without base64")
        for kind, reason in (("video/", VIDEO), ("audio/", AUDIO)):
            if text[5:].lower().startswith(kind):
                raise Unusable(reason)
        text = text[head.end() :]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unusable(UNDECODABLE, f"broken base64: {error}") from error
