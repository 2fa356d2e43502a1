"""`dflow plan --graph` and `dflow ops --schema`, as they are called."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from toy_ops import PIPELINE, Toy

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path, PIPELINE.replace('op = "steps"\ntext = "@c"', 'op = "join"\ntexts = ["@c"]\nextra = "@a"'))


def test_a_graph_is_drawn_with_what_would_run(toy: Toy) -> None:
    told = toy.dflow("plan", "pipeline.toml", "--graph", "-s", "a.text=other")
    assert (0, "") == (told.returncode, told.stderr)
    assert told.stdout.splitlines() == [
        "●    a  make   runs",
        "├─●  b  upper  runs  <- a",
        "├─●  c  join   runs  <- a, b",
        "●─┘  d  join   runs  <- c, a",
    ]


def test_what_is_in_the_store_is_cached(toy: Toy) -> None:
    assert 0 == toy.dflow("run", "pipeline.toml").returncode
    told = json.loads(toy.dflow("plan", "pipeline.toml", "--graph", "-s", "d.between=+", "--json").stdout)
    assert [("a", 0, "cached"), ("b", 1, "cached"), ("c", 2, "cached"), ("d", 3, "runs")] == [
        (node["id"], node["level"], node["state"]) for node in told["nodes"]
    ]
    assert {"texts": ["c"], "extra": ["a"]} == told["nodes"][3]["inputs"]


def test_graphviz_gets_every_node_and_every_edge_by_its_name(toy: Toy) -> None:
    lines = toy.dflow("plan", "pipeline.toml", "--dot").stdout.splitlines()
    assert ['digraph "toy" {', "}"] == [lines[0], lines[-1]]
    assert '  "a" [label="a\\nmake\\nruns"];' in lines
    assert 5 == sum(" -> " in line for line in lines)
    assert '  "a" -> "d" [label="extra"];' in lines


@pytest.mark.parametrize(("name", "start"), [("g.png", b"\x89PNG"), ("g.svg", b"<?xml"), ("G.SVG", b"<?xml")])
def test_a_picture_is_written(toy: Toy, name: str, start: bytes) -> None:
    told = toy.dflow("plan", "pipeline.toml", "--picture", name)
    assert (0, "") == (told.returncode, told.stdout), told.stderr
    assert (toy.folder / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/g.svg", "none/g.svg: cannot be written: there is no folder none; create it, or give another file"),
        ("toy.py/g.png", "toy.py/g.png: cannot be written: Not a directory"),
        ("folder.pdf", "folder.pdf: is a folder; give a file"),
    ],
)
def test_a_picture_that_cannot_be_written_is_one_line(toy: Toy, name: str, why: str) -> None:
    (toy.folder / "folder.pdf").mkdir()
    told = toy.dflow("plan", "pipeline.toml", "--picture", name)
    assert (1, f"dflow: {why}\n") == (told.returncode, told.stderr)


def test_a_picture_shows_each_copy_by_its_values_and_who_reads_whom(toy: Toy) -> None:
    told = toy.dflow("plan", "pipeline.toml", "--picture", "g.svg", "--sweep", 'c.between=["+","-"]')
    assert (0, "") == (told.returncode, told.stdout), told.stderr
    drawing = ElementTree.fromstring((toy.folder / "g.svg").read_text())
    texts = [text.text for text in drawing.iter(f"{SVG}text")]
    assert [1, 1, 2, 2] == [texts.count(name) for name in "abcd"], "the names as they were written"
    assert (2, 2) == (texts.count('between="+"'), texts.count('between="-"'))
    assert 6 == texts.count("runs")
    arrows = {name for group in drawing.iter(f"{SVG}g") if " -> " in (name := group.get("id", ""))}
    json_nodes = json.loads(
        toy.dflow("plan", "pipeline.toml", "--graph", "--json", "--sweep", 'c.between=["+","-"]').stdout
    )
    read = {f"{up} -> {node['id']}" for node in json_nodes["nodes"] for ids in node["inputs"].values() for up in ids}
    assert read == arrows


def test_a_picture_of_a_long_chain_is_no_larger_than_can_be_drawn(tmp_path: Path) -> None:
    nodes = [f'[node.n{k}]\nop = "upper"\ntext = "@n{k - 1}"\n' for k in range(1, 1100)]
    toy = Toy(tmp_path, '[pipeline]\nname = "long"\nops = ["toy.py"]\n[node.n0]\nop = "make"\n' + "".join(nodes))
    told = toy.dflow("plan", "pipeline.toml", "--picture", "g.png")
    assert (0, "") == (told.returncode, told.stdout), told.stderr
    width, height = struct.unpack(">II", (toy.folder / "g.png").read_bytes()[16:24])
    assert 0 < width < height < 1 << 16


def test_a_picture_of_another_kind_is_refused(toy: Toy) -> None:
    told = toy.dflow("plan", "pipeline.toml", "--picture", "g.gif")
    assert (1, "dflow: g.gif: the name of a picture must end in .png, .svg, .pdf\n") == (told.returncode, told.stderr)


def test_a_graph_in_text_loads_no_library_that_draws() -> None:
    program = (
        "import sys, executor.report.graph_text, executor.commands.plan\n"
        "print({'networkx', 'matplotlib', 'torch'} & set(sys.modules))"
    )
    assert (
        "set()\n" == subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    )


def test_the_schema_holds_the_built_in_ops_and_those_of_a_file(toy: Toy) -> None:
    program = [sys.executable, "-m", "executor.cli", "ops", "--schema"]
    for arguments, is_there in (([], False), ([str(toy.file)], True)):
        told = subprocess.run([*program, *arguments], capture_output=True, text=True, check=True)
        definitions = json.loads(told.stdout)["definitions"]
        assert ("op.train_dflash" in definitions, "op.upper" in definitions) == (True, is_there)
