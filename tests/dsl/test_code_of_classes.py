"""The classes of an op, its config and its artifacts, are code of its run function, however that is annotated."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dsl.fingerprint import read_code
from executor.keys.code_archive import keep_texts, kept_text, texts_now
from source_trees import changed_in_main, write

from dsl.graph import Graph
from dsl.read_toml import read_graph
from executor.keys.node_key import Sources, class_symbols, node_parts

OPS = """
from typing import ClassVar
import typing as t
from attrs import frozen
from dsl.op import Artifact, field, op

@frozen
class Text(Artifact):
    '''text.txt'''
    def rows(self): return len(self.digest) + 1

@frozen
class Pages(Artifact):
    '''pages.txt'''
    required_files = ("pages.txt",)
    def count(self): return 10

def half(x): return x / 2

def marked(cls):
    cls.mark = 11
    return cls

@op(version=1, run="classes_ops:make")
@marked
@frozen(kw_only=True)
class Make:
    '''Makes a text.'''
    source: Pages
    others: tuple[Pages, ...] = ()
    text: str = field(default="a", help="what to write")
    steps: "int" = field(default=20, help="how many")
    FACTOR: ClassVar[int] = 12
    SCALE: t.ClassVar = 13
    WIDTH: "ClassVar[int]" = 14
    LIMIT = 15
    output = Text
    judged_by = "eval/tau"

    @staticmethod
    def report(folder): return [half(len(folder.name))]

    def unmet(self): return {"text": "missing"}

    def scaled(self): return half(self.steps) * 16

    @property
    def size(self): return 17

    @staticmethod
    def start(at=18): return at


def make(config, stage): return 19
"""


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    text = '[pipeline]\nname = "classes"\nops = ["classes_ops.py"]\n'
    text += '[node.pages]\nop = "scan"\n[node.a]\nop = "make"\nsource = "@pages"\n'
    scan = '@op(version=1, run="classes_ops:make")\n@frozen(kw_only=True)\nclass Scan:\n    output = Pages\n'
    write(tmp_path, {"classes_ops.py": OPS + scan, "pipeline.toml": text})
    yield read_graph(tmp_path / "pipeline.toml")
    sys.modules.pop("classes_ops", None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("+ 1\n", "+ 2\n", {"Text"}),
        ("return 10", "return 0", {"Pages"}),
        ("cls.mark = 11", "cls.mark = 0", {"marked"}),
        ("= 12", "= 0", {"Make"}),
        ("= 13", "= 0", {"Make"}),
        ("= 14", "= 0", {"Make"}),
        ("= 15", "= 0", {"Make"}),
        ("* 16", "* 0", {"Make"}),
        ("return 17", "return 0", {"Make"}),
        ("at=18", "at=0", {"Make"}),
        ("return 19", "return 0", {"make"}),
        ("x / 2", "x // 2", {"half"}),
        ("@marked\n", "", {"Make", "marked"}),
        ("default=20", "default=21", set()),
        ("how many", "how many of them", set()),
        ('help="what', 'validator=print, help="what', set()),
        ("Makes a text.", "Makes one.", set()),
        ("pages.txt", "other.txt", set()),
        ('("pages.txt",)', '("pages.txt", "more.txt")', set()),
        ('    required_files = ("pages.txt",)\n', "", set()),
        ("@op(version=1", "@op(resumable=True, version=1", set()),
        ("eval/tau", "eval/speedup", set()),
        ("len(folder.name)", "3", set()),
        ('"missing"', '"missing, install it"', set()),
    ],
)
def test_the_code_of_a_node_has_the_classes_of_its_op(
    tmp_path: Path, graph: Graph, old: str, new: str, expected: set[str]
) -> None:
    before = node_parts(graph, "a", Sources.now(None)).code
    write(tmp_path, {"classes_ops.py": (tmp_path / "classes_ops.py").read_text().replace(old, new, 1)})
    after = node_parts(graph, "a", Sources.now(None)).code
    differ = {place for place in before.keys() | after.keys() if before.get(place) != after.get(place)}
    assert differ == {f"classes_ops:{name}" for name in expected}
    assert dict(after) == {place: hash for place, (hash, _text) in texts_now(graph, "a").items()}


def test_an_op_that_does_not_use_a_class_keeps_its_code(tmp_path: Path, graph: Graph) -> None:
    text = (tmp_path / "classes_ops.py").read_text().replace("@marked\n", "")
    write(tmp_path, {"classes_ops.py": text})
    before = node_parts(graph, "pages", Sources.now(None)).code
    write(tmp_path, {"classes_ops.py": text.replace("+ 1", "+ 2").replace("* 16", "* 0").replace("x / 2", "x")})
    assert before == node_parts(graph, "pages", Sources.now(None)).code


def test_of_the_config_of_an_op_the_fields_alone_do_not_count_however_op_is_imported(tmp_path: Path) -> None:
    for head, mark in (
        ("from dsl.op import field, op", "op"),
        ("import dsl.op", "dsl.op.op"),
        ("from dsl.op import op as o", "o"),
    ):
        text = (
            f"{head}\n"
            "def limit(): return 3\n"
            f"@{mark}(version=1, run='main:run')\nclass Work:\n"
            "    steps: int = field(default=1, help='steps')\n"
            "    def total(self): return self.steps * limit()\n"
            "def run(config: Work, stage): return config.total()\n"
        )
        assert changed_in_main(tmp_path, text, text.replace("'steps'", "'number of steps'")) == set()
        assert changed_in_main(tmp_path, text, text.replace("self.steps *", "2 *")) == {"main:Work"}
        assert changed_in_main(tmp_path, text, text.replace("return 3", "return 4")) == {"main:limit"}


def test_a_class_from_elsewhere_is_left_out_and_one_of_another_name_is_its_whole_module(
    tmp_path: Path, graph: Graph
) -> None:
    assert {"classes_ops:Make", "classes_ops:Text", "classes_ops:Pages"} == set(class_symbols(graph.nodes["a"]))
    write(tmp_path, {"main.py": "def run(): pass\n", "texts.py": "def rows(self): pass\nT = type('Text', (), {})\n"})
    assert {"main:run"} == set(read_code(["main:run"], [tmp_path], ["elsewhere:Text", "dsl.op:Artifact"]).hashes)
    assert {"main:run", "texts:rows", "texts:T"} == set(read_code(["main:run"], [tmp_path], ["texts:Text"]).hashes)


def test_no_text_is_kept_for_code_that_was_edited_since_its_key_was_made(tmp_path: Path, graph: Graph) -> None:
    code = node_parts(graph, "a", Sources.now(None)).code
    text = (tmp_path / "classes_ops.py").read_text()
    write(tmp_path, {"classes_ops.py": text.replace("x / 2", "x // 2")})
    keep_texts(tmp_path / "store", graph, "a", code)
    assert kept_text(tmp_path / "store", code["classes_ops:half"]) is None
    assert "def make(config, stage): return 19\n" == kept_text(tmp_path / "store", code["classes_ops:make"])
    kept = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert sorted(set(code.values()) - {code["classes_ops:half"]}) == sorted(kept)
    write(tmp_path, {"classes_ops.py": text})
    keep_texts(tmp_path / "store", graph, "a", code)
    assert "def half(x): return x / 2\n" == kept_text(tmp_path / "store", code["classes_ops:half"])
