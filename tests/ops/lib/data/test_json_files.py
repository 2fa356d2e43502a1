"""How ops write JSON."""

from __future__ import annotations

import math

import pytest

from ops.lib.data.files import json_line, write_json


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_know_is_written_into_no_file(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "file.json", {"tau": number})
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_line([number])
    assert [] == list(tmp_path.iterdir())
