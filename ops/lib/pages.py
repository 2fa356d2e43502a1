"""HTML pages from jinja2 templates: every value is escaped, and a name that a template lacks is an error.

A template is a file beside the code that fills it, read by `pkgutil.get_data`; page.css holds the colours of all pages.
"""

from __future__ import annotations

import base64
import io
from pkgutil import get_data
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from PIL import Image


def environment(**options: Any) -> Environment:
    """Create a Jinja environment for the templates of pages. options: further ones of `jinja2.Environment`."""
    from jinja2 import Environment, StrictUndefined

    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)


def page_style() -> Markup:
    """The style sheet that all pages share."""
    from markupsafe import Markup

    return Markup(_text(get_data("ops.lib", "page.css")))


def page_text(template: bytes | None, **values: object) -> str:
    """Render a template, as `get_data` returns it, with the values and with `style`, see `page_style`.

    Templates use the filter `visible` for texts of unknown origin.
    """
    found = environment()
    found.filters["visible"] = visible
    return found.from_string(_text(template)).render(style=page_style(), **values)


def visible(text: str) -> Markup:
    """Escape a text of unknown origin: line ends are marked, and characters that change the text's
    direction replaced.
    """
    from markupsafe import Markup, escape

    plain = "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)
    return Markup(str(escape(plain)).replace("\n", "&#8629;\n"))


def thumbnail(image: Image.Image, pixels: int) -> str:
    """A data: URL of the image, scaled down so that its longer side is at most `pixels`. The image is changed."""
    from PIL import Image

    image.thumbnail((pixels, pixels), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _text(data: bytes | None) -> str:
    assert data is not None, "the loader of this package reads no files"
    return data.decode("utf-8")
