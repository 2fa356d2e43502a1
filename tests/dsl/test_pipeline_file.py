"""What is named as a pipeline file and is none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsl.errors import PipelineError
from dsl.read_toml import op_files_of, read_graph


@pytest.mark.parametrize("read", [read_graph, op_files_of])
def test_a_folder_names_the_pipelines_in_it(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(PipelineError) as caught:
        read(tmp_path)
    assert f"{tmp_path} is a folder, not a pipeline file (there is no *.toml in it)" == str(caught.value)
    for name in ("b.toml", "a.toml", "c.txt"):
        (tmp_path / name).touch()
    with pytest.raises(PipelineError) as caught:
        read(tmp_path)
    inside = f"{tmp_path / 'a.toml'}, {tmp_path / 'b.toml'}"
    assert f"{tmp_path} is a folder, not a pipeline file (in it: {inside})" == str(caught.value)


@pytest.mark.parametrize("read", [read_graph, op_files_of])
def test_a_file_that_is_not_there_is_said_to_be_none(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(PipelineError) as caught:
        read(tmp_path / "p.toml")
    assert f"there is no pipeline file {tmp_path / 'p.toml'}" == str(caught.value)
