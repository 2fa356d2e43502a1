"""Paths with blanks, quotes, letters of all alphabets and symbolic links, through the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_ops import ONE_NODE, Toy

KEYS = "text, note, source, seconds"
NAMES = ["with  blanks and 'quotes\"", "größe 数据 😀", "percent %20 [x] {y} $HOME ; #", "-dash"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_runs_and_is_cached_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    data = folder / f"{name}.txt"
    data.write_text("from a file")
    toy = Toy(folder, ONE_NODE + f"source = '''{data.name}'''\n")
    toy.store = folder / f"store {name}"
    toy.file = toy.file.rename(folder / f"{name} é.toml")
    ran = toy.dflow("run", str(toy.file))
    assert 0 == ran.returncode, ran.stderr
    assert "from a file" == toy.text("a")
    again = toy.dflow("run", f"./{toy.file.name}")
    assert 0 == again.returncode, again.stderr
    assert {"a": ("done", "hit")} == toy.caches()
    refused = toy.dflow("plan", str(toy.file), "-s", "a.nothing=1")
    assert (2, f"-s a.nothing=1: unknown key (keys: {KEYS})\n") == (
        refused.returncode,
        refused.stderr,
    )


def test_a_mistake_names_a_file_in_an_odd_folder_as_it_was_given(tmp_path: Path) -> None:
    folder = tmp_path / "größe 数据"
    folder.mkdir()
    toy = Toy(folder, ONE_NODE + "nothing = 1\n")
    refused = toy.dflow("run", f"../{folder.name}/pipeline.toml")
    assert (2, f"../{folder.name}/pipeline.toml:9:1: node.a.nothing: unknown key (keys: {KEYS})\n") == (
        refused.returncode,
        refused.stderr,
    )


def test_what_is_reached_by_links_is_what_it_is_by_its_own_path(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "data.txt").write_text("data")
    toy = Toy(real, ONE_NODE + 'source = "data.txt"\n')
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    (tmp_path / "linked").symlink_to(real)
    (tmp_path / "store").symlink_to(toy.store)
    toy.store = tmp_path / "store"
    through = toy.dflow("run", str(tmp_path / "linked" / "pipeline.toml"))
    assert 0 == through.returncode, through.stderr
    assert {"a": ("done", "hit")} == toy.caches()


def test_files_that_are_links_are_read_where_they_stand(tmp_path: Path) -> None:
    kept, used = tmp_path / "kept", tmp_path / "used"
    kept.mkdir()
    used.mkdir()
    toy = Toy(used, ONE_NODE + 'source = "data.txt"\n')
    (kept / "text").write_text("behind a link")
    for name, other in (("toy.py", "ops.py"), ("pipeline.toml", "file.toml")):
        (used / name).rename(kept / other)
        (used / name).symlink_to(kept / other)
    (used / "data.txt").symlink_to(kept / "text")
    ran = toy.dflow("run", "pipeline.toml")
    assert 0 == ran.returncode, ran.stderr
    assert "behind a link" == toy.text("a")


@pytest.mark.parametrize("kind", ["loop", "dead", "folder"])
def test_a_link_to_no_file_is_no_pipeline_file(tmp_path: Path, kind: str) -> None:
    toy = Toy(tmp_path)
    link = tmp_path / "link.toml"
    link.symlink_to({"loop": "link.toml", "dead": "nowhere.toml", "folder": str(tmp_path)}[kind])
    refused = toy.dflow("plan", "link.toml")
    said = "link.toml is a folder, not a pipeline file (in it: link.toml/link.toml, link.toml/pipeline.toml)"
    expected = said if kind == "folder" else "there is no pipeline file link.toml"
    assert (2, f"dflow: {expected}\n") == (refused.returncode, refused.stderr)


def test_a_name_that_no_file_system_takes_is_told(tmp_path: Path) -> None:
    refused = Toy(tmp_path).dflow("plan", "x" * 300 + ".toml")
    assert 2 == refused.returncode
    assert refused.stderr.startswith("dflow: there is no pipeline file xxx")
