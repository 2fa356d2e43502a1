"""Decoding images with Pillow, which raises many kinds of errors on broken data."""

from __future__ import annotations

import io
import struct
import warnings

from PIL import Image, ImageOps

UNDECODABLE, TOO_LARGE, TOO_SMALL = "image undecodable", "image too large", "image too small"

# What Pillow's decoders raise on broken data, beside their own UnidentifiedImageError (an OSError).
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    struct.error,
)


def decode(encoded: bytes) -> Image.Image:
    """The image as RGB, turned upright as its EXIF data says. Raises one of DECODE_ERRORS."""
    image = Image.open(io.BytesIO(encoded))
    image.load()
    upright = ImageOps.exif_transpose(image)
    return upright.convert("RGB")


def reason_to_drop(encoded: bytes, max_pixels: int, min_side: int) -> str:
    """Why an image cannot be used, or an empty string; the size is checked from the header, before decoding.

    Pillow refuses images of more than 89 million pixels by itself (decompression bombs): too large as well.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            width, height = Image.open(io.BytesIO(encoded)).size
            if width * height > max_pixels:
                return TOO_LARGE
            if min(width, height) < min_side:
                return TOO_SMALL
            decode(encoded)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            return TOO_LARGE
        except DECODE_ERRORS:
            return UNDECODABLE
    return ""
