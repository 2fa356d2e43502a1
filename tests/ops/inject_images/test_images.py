"""Every kind of image against colours computed by hand, and against what transformers hands to a processor."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile
from transformers.image_utils import load_image

from dsl.errors import DataError
from ops.artifacts import Samples
from ops.lib.data.files import write_jsonl
from ops.lib.data.image_packs import PackWriter
from ops.lib.vision.images import decode, eight_bits, fault_of, read_images, strict_pillow

RED, GREEN, BLUE = (250, 20, 30), (10, 240, 60), (5, 70, 245)


def as_file(image: Image.Image, file_format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format=file_format, **options)
    return file.getvalue()


def pixels(encoded: bytes) -> list:
    return np.asarray(decode(encoded)).tolist()


def row_of(*colours: tuple[int, ...], mode: str = "RGB") -> Image.Image:
    """An image of one row."""
    image = Image.new(mode, (len(colours), 1))
    image.putdata(colours)
    return image


def palette_image(transparency: bytes | int | None) -> bytes:
    """Three pixels of the colours 0, 1, 2 of a palette."""
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    image.putdata([0, 1, 2])
    options = {} if transparency is None else {"transparency": transparency}
    return as_file(image, "PNG", **options)


KINDS = {
    "RGB PNG": (as_file(row_of(RED, GREEN, BLUE), "PNG"), [RED, GREEN, BLUE]),
    "lossless WebP": (as_file(row_of(RED, GREEN, BLUE), "WEBP", lossless=True), [RED, GREEN, BLUE]),
    "BMP": (as_file(row_of(RED, GREEN), "BMP"), [RED, GREEN]),
    "TIFF": (as_file(row_of(RED, GREEN), "TIFF"), [RED, GREEN]),
    "grey": (as_file(row_of(7, 200, mode="L"), "PNG"), [(7, 7, 7), (200, 200, 200)]),
    "black and white": (as_file(row_of(0, 255, mode="1"), "PNG"), [(0, 0, 0), (255, 255, 255)]),
    "palette": (palette_image(None), [RED, GREEN, BLUE]),
    "palette, one colour transparent": (palette_image(1), [RED, GREEN, BLUE]),
    "palette, an alpha for each colour": (palette_image(bytes([0, 128, 255])), [RED, GREEN, BLUE]),
    "alpha": (as_file(row_of((*RED, 0), (*GREEN, 128), (*BLUE, 255), mode="RGBA"), "PNG"), [RED, GREEN, BLUE]),
    "grey with alpha": (as_file(row_of((9, 0), (90, 255), mode="LA"), "PNG"), [(9, 9, 9), (90, 90, 90)]),
    "CMYK": (
        as_file(row_of((0, 0, 0, 0), (255, 0, 0, 0), (0, 0, 0, 255), mode="CMYK"), "TIFF"),
        [(255, 255, 255), (0, 255, 255), (0, 0, 0)],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_colours_of_every_kind_of_image_are_those_that_a_serving_engine_sees(kind):
    encoded, colours = KINDS[kind]
    assert pixels(encoded) == [[list(colour) for colour in colours]]
    with strict_pillow():
        assert fault_of(encoded, max_pixels=100, min_side=1) == ("", "")
        theirs = load_image(Image.open(io.BytesIO(encoded)))
    assert np.array_equal(np.asarray(theirs), np.asarray(decode(encoded)))


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_16_bits_are_scaled_not_clipped(file_format):
    values = np.array([[0, 100, 257 * 100, 40000, 65535]], dtype=np.uint16)
    expected = [[[round(value / 257)] * 3 for value in values[0].tolist()]]
    assert expected == pixels(as_file(Image.fromarray(values), file_format))


@given(value=st.integers(0, 65535))
def test_eight_bits_are_the_nearest_to_sixteen(value):
    scaled = int(eight_bits(np.array([value], dtype=np.uint16))[0])
    assert abs(255 * value - 65535 * scaled) <= 65535 // 2


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bits_without_a_range_are_refused(mode):
    encoded = as_file(Image.new(mode, (4, 4), 300), "TIFF")
    with strict_pillow():
        reason, detail = fault_of(encoded, max_pixels=100, min_side=1)
    assert (reason, f"mode {mode}" in detail) == ("image undecodable", True)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(file_format):
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN, BLUE)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    encoded = as_file(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(encoded)).n_frames == 3
    assert pixels(encoded) == [[list(RED)] * 4] * 4


# What a viewer does with rows and columns of the stored image, by the value of EXIF's orientation.
TURNED = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].transpose(1, 0, 2),
    8: lambda stored: np.rot90(stored),
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF"])
def test_an_image_is_turned_upright_for_every_orientation(orientation, file_format):
    stored = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 13
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True, "exact": True} if file_format == "WEBP" else {}
    encoded = as_file(Image.fromarray(stored), file_format, exif=exif, **options)
    assert TURNED[orientation](stored).tolist() == pixels(encoded)


def test_a_jpeg_of_a_camera_on_its_side_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(as_file(Image.new("RGB", (8, 4), RED), "JPEG", exif=exif)).size == (4, 8)


def exif_on_its_side(tag: int, kind: int) -> bytes:
    """EXIF with orientation 6, and a tag of texts as a number of the TIFF type `kind`."""
    numbers = {
        5: struct.pack("<II", 3, 2),
        10: struct.pack("<ii", 3, 2),
        11: struct.pack("<f", 1.5),
        12: struct.pack("<d", 1.5),
    }
    value = numbers[kind] if len(numbers[kind]) == 4 else struct.pack("<I", 8 + 2 + 2 * 12 + 4)
    entries = [
        struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0),
        struct.pack("<HHI4s", tag, kind, 1, value),
    ]
    directory = struct.pack("<H", 2) + b"".join(sorted(entries)) + bytes(4)
    behind = b"" if value == numbers[kind] else numbers[kind]
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + directory + behind


@pytest.mark.parametrize("tag", [0x010F, 0x0131, 0x0132, 0x8298])  # maker, software, time, copyright
@pytest.mark.parametrize("kind", [5, 10, 11, 12])  # rational, signed rational, float, double
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_a_photo_whose_exif_holds_a_number_for_a_text_is_used_and_turned_upright(file_format, kind, tag):
    stored = np.arange(8 * 16 * 3, dtype=np.uint8).reshape(8, 16, 3)
    encoded = as_file(Image.fromarray(stored), file_format, exif=exif_on_its_side(tag, kind))
    plain = as_file(Image.fromarray(stored), file_format)
    with strict_pillow():
        assert ("", "") == fault_of(encoded, max_pixels=1000, min_side=1)
    assert np.rot90(np.asarray(decode(plain)), -1).tolist() == pixels(encoded)


@pytest.mark.parametrize("error", [AttributeError, AssertionError, RecursionError, KeyError, UnicodeError, Exception])
@pytest.mark.parametrize("place", [(ImageFile.ImageFile, "load"), (Image.Image, "getexif"), (Image.Image, "convert")])
def test_whatever_pillow_raises_an_image_is_undecodable_and_nothing_ends(monkeypatch, place, error):
    def broken(*_, **__):
        raise error("no attribute of <object at 0x7f12>")

    encoded = as_file(Image.new("RGB", (4, 4), RED), "JPEG")
    monkeypatch.setattr(*place, broken)
    with strict_pillow():
        reason, detail = fault_of(encoded, max_pixels=100, min_side=1)
    assert reason == "image undecodable"
    assert detail.startswith(f"{len(encoded)} bytes: ")
    assert "no attribute of <object>" in detail


def test_formats_that_start_other_programs_are_no_images():
    encoded = as_file(row_of(RED, GREEN), "EPS")
    with strict_pillow():
        reason, detail = fault_of(encoded, max_pixels=100, min_side=1)
    assert reason == "image undecodable"
    assert detail == f"{len(encoded)} bytes that are not PNG, JPEG, GIF, BMP, TIFF, WEBP"


def test_the_images_of_samples_are_read_with_their_rows_one_sample_after_the_other(tmp_path):
    files = [KINDS[name][0] for name in ("RGB PNG", "grey", "alpha")]
    packs = PackWriter(tmp_path, pack_bytes=1)
    references = [packs.add(each) for each in files]
    rows = [
        {"id": "two", "images": [references[2], references[0]]},
        {"id": "none", "images": []},
        {"id": "one", "images": [references[1]]},
    ]
    write_jsonl(tmp_path / "samples.jsonl", rows)
    found = list(read_images(Samples(tmp_path, "digest")))
    assert rows == [row for row, _ in found]
    expected = [[files[2], files[0]], [], [files[1]]]
    assert [[pixels(each) for each in group] for group in expected] == [
        [np.asarray(image).tolist() for image in images] for _, images in found
    ]


def bomb() -> bytes:
    """A header of 20,000 x 20,000 pixels."""
    image = bytearray(as_file(row_of(RED), "PNG"))
    image[16:24] = (20_000).to_bytes(4, "big") * 2
    image[29:33] = zlib.crc32(image[12:29]).to_bytes(4, "big")
    return bytes(image)


@pytest.mark.parametrize("encoded", [b"no image", bomb()], ids=["no image", "too many pixels"])
def test_a_sample_whose_image_cannot_be_decoded_is_named_with_what_to_do(tmp_path, encoded):
    packs = PackWriter(tmp_path)
    images = [packs.add(each) for each in (KINDS["grey"][0], encoded)]
    write_jsonl(tmp_path / "samples.jsonl", [{"id": "first", "images": images[:1]}, {"id": "second", "images": images}])
    read = read_images(Samples(tmp_path, "digest"))
    assert "first" == next(read)[0]["id"]
    with pytest.raises(DataError, match=r"sample 'second', image 2: image undecodable: .*read the samples of inject"):
        next(read)
