"""The classes of an op, its config and its artifacts, are code of its run function, however that is annotated."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_trees import changed_in_main, write

from dsl.closure import Project
from dsl.graph import Graph
from dsl.read_toml import read_graph
from executor.keys.node_key import Sources, code_classes, node_parts

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

    def missing_here(self): return {"text": "missing"}

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
    ("old", "new", "counts"),
    [
        ("+ 1\n", "+ 2\n", True),
        ("return 10", "return 0", True),
        ("cls.mark = 11", "cls.mark = 0", True),
        ("= 12", "= 0", True),
        ("= 13", "= 0", True),
        ("= 14", "= 0", True),
        ("= 15", "= 0", True),
        ("* 16", "* 0", True),
        ("return 17", "return 0", True),
        ("at=18", "at=0", True),
        ("return 19", "return 0", True),
        ("x / 2", "x // 2", True),
        ("@marked\n", "", True),
        ("default=20", "default=21", False),
        ("how many", "how many of them", False),
        ('help="what', 'validator=print, help="what', False),
        ("Makes a text.", "Makes one.", False),
        ("text.txt", "other.txt", False),
        ('("pages.txt",)', '("pages.txt", "more.txt")', True),
        ("@op(version=1", "@op(resumable=True, version=1", False),
        ("eval/tau", "eval/speedup", False),
        ("len(folder.name)", "3", False),
        ('"missing"', '"missing, install it"', False),
    ],
)
def test_the_code_of_a_node_has_the_classes_of_its_op(
    tmp_path: Path, graph: Graph, old: str, new: str, counts: bool
) -> None:
    before = node_parts(graph, "a", Sources.now(None)).code
    write(tmp_path, {"classes_ops.py": (tmp_path / "classes_ops.py").read_text().replace(old, new, 1)})
    after = node_parts(graph, "a", Sources.now(None)).code
    differ = {place for place in before.keys() | after.keys() if before.get(place) != after.get(place)}
    assert differ == ({"classes_ops.py"} if counts else set())


def test_the_file_of_a_class_is_code_of_a_run_function_that_does_not_import_it(tmp_path: Path, graph: Graph) -> None:
    (tmp_path / "elsewhere.py").write_text("def make(config, stage): return 19\n")
    ops = (tmp_path / "classes_ops.py").read_text().replace("classes_ops:make", "elsewhere:make")
    write(tmp_path, {"classes_ops.py": ops})
    sys.modules.pop("classes_ops", None)
    code = node_parts(read_graph(tmp_path / "pipeline.toml"), "a", Sources.now(None)).code
    assert {"classes_ops.py", "elsewhere.py"} == set(code)


def test_of_the_config_of_an_op_the_fields_alone_do_not_count_however_op_is_imported(tmp_path: Path) -> None:
    for head, mark in (("from dsl.op import field, op", "op"), ("import dsl.op", "dsl.op.op")):
        text = (
            f"{head}\n"
            f"@{mark}(version=1, run='main:run')\nclass Work:\n"
            "    steps: int = field(default=1, help='steps')\n"
            "    def total(self): return self.steps * 3\n"
            "def run(config: Work, stage): return config.total()\n"
        )
        assert not changed_in_main(tmp_path, text, text.replace("'steps'", "'number of steps'"))
        assert not changed_in_main(tmp_path, text, text.replace("default=1", "default=2"))
        assert changed_in_main(tmp_path, text, text.replace("self.steps *", "2 *"))


def test_what_another_op_decorates_counts_whole(tmp_path: Path) -> None:
    text = "from mine import op\n@op(1)\nclass Work:\n    steps: int = 1\ndef run(config, stage): return Work.steps\n"
    assert changed_in_main(tmp_path, text, text.replace("= 1", "= 2"))


def test_of_a_table_the_help_of_fields_does_not_count_and_defaults_do(tmp_path: Path) -> None:
    text = "from dsl.op import field\nclass Table:\n    size: int = field(default=1, help='size')\ndef run(): Table()\n"
    assert not changed_in_main(tmp_path, text, text.replace("'size'", "'its size'"))
    assert changed_in_main(tmp_path, text, text.replace("default=1", "default=2"))


def test_a_class_from_elsewhere_is_left_out(tmp_path: Path, graph: Graph) -> None:
    assert {"classes_ops:Make", "classes_ops:Text", "classes_ops:Pages"} == set(code_classes(graph.nodes["a"]))
    write(tmp_path, {"main.py": "def run(): pass\n", "texts.py": "T = type('Text', (), {})\n"})
    project = Project([tmp_path])
    assert {"main.py"} == set(project.closure(["main:run"], ["elsewhere:Text", "dsl.op:Artifact"]).digests)
    assert {"main.py", "texts.py"} == set(project.closure(["main:run"], ["texts:Text"]).digests)
