"""Decoding images with Pillow, which may raise anything on broken data: `decode` and `size_of` raise only Unusable.

Colours are those of a serving engine: transformers' `load_image` rotates an image upright and calls `convert("RGB")`,
SGLang's loader calls the latter. So alpha is dropped, not composed onto a background: a transparent pixel has the
colour stored with it. An animation is its first frame. One difference: Pillow's conversion of 16-bit grey clips
everything above 255 to white, here 0..65535 becomes 0..255. 32-bit integers and floats have no known range; they are
undecodable, while Pillow would clip them.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from dsl.errors import DataError
from ops.artifacts import ImageSamples, Samples
from ops.lib.data.files import read_jsonl, shown_json
from ops.lib.data.image_packs import read_packed
from ops.lib.data.sample_account import Unusable

UNDECODABLE, TOO_LARGE, TOO_SMALL = "image undecodable", "image too large", "image too small"

# No EPS, which Pillow passes to Ghostscript, and no rare formats. Pillow itself registers the first four when it opens
# an image; the other two are registered when their modules are imported.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", TiffImagePlugin.TiffImageFile.format, WebPImagePlugin.WebPImageFile.format)

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, in some messages: reasons must be the same in every run

SCAN, MOST_SCANS = b"\xff\xda", 1000  # of a JPEG; each is a pass over all its pixels, encoders make about ten

# What turns an image upright, by the orientation in its EXIF data; others are upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(encoded: bytes) -> Image.Image:
    """The image as RGB, rotated upright according to its EXIF data. Raises Unusable if it cannot be decoded."""
    with _only_unusable(encoded):
        if encoded.count(SCAN) > MOST_SCANS and encoded.startswith(b"\xff\xd8"):
            raise ValueError(f"a JPEG of more than {MOST_SCANS} scans")
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        image.load()
        turn = TURNS.get(orientation(image))
        upright = image if turn is None else image.transpose(turn)
        if upright.mode.startswith("I;16"):
            return Image.fromarray(eight_bits(np.asarray(upright))).convert("RGB")
        if upright.mode in ("I", "F"):
            raise ValueError(f"pixels of mode {upright.mode}: 32 bits without a range")
        if upright.mode == "P" and "transparency" in upright.info:
            upright = upright.convert("RGBA")  # the same colours, without Pillow's warning
        return upright.convert("RGB")


def size_of(encoded: bytes) -> tuple[int, int]:
    """Width and height, from the image's header. Raises Unusable if they cannot be read."""
    with _only_unusable(encoded):
        return Image.open(io.BytesIO(encoded), formats=FORMATS).size


def orientation(image: Image.Image) -> int:
    """The orientation in an image's EXIF data, 1 if upright. Other tags, of any type in cameras, are not
    interpreted.
    """
    return image.getexif().get(ExifTags.Base.Orientation, 1)


@contextmanager
def _only_unusable(encoded: bytes) -> Iterator[None]:
    """Open a context that turns every error into Unusable, except a lack of memory, which is not the image's fault."""
    try:
        yield
    except MemoryError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise Unusable(TOO_LARGE, str(error)) from error
    except UnidentifiedImageError as error:
        raise Unusable(UNDECODABLE, f"{len(encoded)} bytes that are not {', '.join(FORMATS)}") from error
    except Exception as error:
        shown = ADDRESS.sub("", str(error)) or type(error).__name__
        raise Unusable(UNDECODABLE, f"{len(encoded)} bytes: {shown}") from error


def read_images(samples: Samples | ImageSamples) -> Iterator[tuple[dict[str, Any], list[Image.Image]]]:
    """Each row of an artifact's samples.jsonl with its decoded images; one sample is in memory at a time.

    Raises DataError, naming the sample, for an image that cannot be decoded; `inject_images` drops such samples.
    """
    for row in read_jsonl(samples.path / "samples.jsonl"):
        yield row, [_image_of(row, place, samples.path) for place in range(len(row["images"]))]


def _image_of(row: Mapping[str, Any], place: int, folder: Path) -> Image.Image:
    encoded = read_packed(folder, row["images"][place])
    try:
        with strict_pillow():
            return decode(encoded)
    except Unusable as fault:
        raise DataError(
            f"sample {shown_json(row['id'])}, image {place + 1}: {UNDECODABLE}: {fault.detail}; read the samples of "
            "inject_images, which drops those"
        ) from fault


def eight_bits(grey: np.ndarray) -> np.ndarray:
    """Convert grey values from uint16, 0..65535, to uint8, 0..255, rounded to the nearest."""
    return ((grey.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


@contextmanager
def strict_pillow() -> Iterator[None]:
    """Opens a context in which Pillow's warning of a decompression bomb is an error.

    Its other warnings are ignored. Warning filters are per process, not per thread: enter it once, around all threads
    that check images.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def fault_of(encoded: bytes, max_pixels: int, min_side: int) -> tuple[str, str]:
    """The reason why an image cannot be used, and a detail; two empty strings if it can. Call it inside
    `strict_pillow`.

    The size is read from the header, before decoding. Images of more than 89 million pixels, which Pillow refuses as
    decompression bombs, are too large as well.
    """
    try:
        width, height = size_of(encoded)
        if width * height > max_pixels:
            return TOO_LARGE, f"{width} x {height}: more than {max_pixels} pixels"
        if min(width, height) < min_side:
            return TOO_SMALL, f"{width} x {height}: a side below {min_side}"
        decode(encoded)
    except Unusable as fault:
        return fault.reason, fault.detail
    return "", ""
