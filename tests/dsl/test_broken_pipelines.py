"""Thousands of broken pipeline files: each compiles, or is refused with mistakes that stand where they can be found."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli
from broken_pipelines import ENVIRONMENT, Broken, broken_pipelines, wrong_place
from hypothesis import HealthCheck, Phase, given, settings
from toml_documents import key_paths

from dsl.toml import key_positions

MOST_CHARACTERS = 2000  # of one mistake, its place and its hint
THOROUGH = settings(suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken")


@pytest.fixture(autouse=True, scope="module")
def _environment() -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def check(broken: Broken, folder: Path) -> None:
    for mistake in broken.outcome(folder):
        assert "" == wrong_place(mistake, folder), str(mistake)
        assert len(str(mistake)) < MOST_CHARACTERS
        assert all(line.isprintable() for line in str(mistake).split("\n"))


@settings(THOROUGH, max_examples=1500)
@given(broken=broken_pipelines())
def test_a_broken_pipeline_ends_in_mistakes_with_their_places(broken: Broken, folder: Path) -> None:
    check(broken, folder)


@pytest.mark.slow
@settings(THOROUGH, max_examples=20_000)
@given(broken=broken_pipelines())
def test_twenty_thousand_broken_pipelines_end_in_mistakes_with_their_places(broken: Broken, folder: Path) -> None:
    check(broken, folder)


@settings(THOROUGH, max_examples=400)
@given(broken=broken_pipelines())
def test_every_key_that_is_left_in_a_changed_file_has_its_place(broken: Broken) -> None:
    try:
        values = tomli.loads(broken.text)
    except (ValueError, RecursionError):
        return
    assert set(key_positions(broken.text, "f")) == key_paths(values)
