"""The tokens that `dflow init` counts for an image are those of the target's processor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from ops.tools.init.survey import PixelRules


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([28, 32]), st.sampled_from([4096, 1_048_576]))
def test_image_tokens_are_those_of_transformers(width: int, height: int, factor: int, most: int) -> None:
    rules = PixelRules(factor, 3136, most)
    if max(width, height) > 200 * min(width, height):
        assert 0 == rules.tokens((width, height))
    else:
        rows, columns = smart_resize(height, width, factor, 3136, most)
        assert rows * columns // factor**2 == rules.tokens((width, height))
