"""What runs when a module is imported, and what it puts into the project's tables, is code of what uses them."""

from pathlib import Path

import pytest
from source_trees import changed, changed_in_main, symbols, write


def test_side_effects_of_every_module_imported_on_the_way_count(tmp_path: Path) -> None:
    files = {
        "main.py": "from pkg.a import f\ndef run(): return f()\n",
        "pkg/__init__.py": "import setup_things\n",
        "pkg/a.py": "TABLE = {}\ndef f(): return TABLE\n",
        "setup_things.py": "import random\n\nrandom.seed(size())\ndef size(): return 1\ndef unused(): return 2\n",
    }
    write(tmp_path, files)
    assert symbols(tmp_path) == {"main:run", "pkg.a:f", "pkg.a:TABLE", "setup_things:<module>", "setup_things:size"}
    edited = {"setup_things.py": files["setup_things.py"].replace("return 2", "return 3")}
    assert changed(tmp_path, files, edited) == set()
    edited = {"setup_things.py": files["setup_things.py"].replace("return 1", "return 3")}
    assert changed(tmp_path, files, edited) == {"setup_things:size"}


def test_what_is_put_into_a_table_counts(tmp_path: Path) -> None:
    text = (
        "TABLE = {}\n"
        "def run(name): return TABLE[name]()\n"
        "def register(f):\n    TABLE[f.__name__] = f\n    return f\n"
        "@register\ndef one(): return 1\n"
        "def two(): return 2\n"
        "TABLE['two'] = two\n"
        "def three(): return 3\n"
        "TABLE.update(three=three)\n"
        "def four(): return 4\n"
    )
    write(tmp_path, {"main.py": text})
    names = ("run", "TABLE", "register", "one", "two", "three", "<module>")
    assert symbols(tmp_path) == {f"main:{name}" for name in names}


HEAD = "TABLE = []\nWORDS = ('a', 'b')\nclass Other: pass\n\ndef run(): return TABLE\n"


@pytest.mark.parametrize(
    "line",
    [
        "_ = TABLE.append(1)",
        "_: None = TABLE.append(1)",
        "def f(a=TABLE.append(1)): pass",
        "def f(*, a=TABLE.append(1)): pass",
        "f = lambda a=TABLE.append(1): a",
        "class X(TABLE.append(1)): pass",
        "class X:\n    TABLE.append(1)",
        "class X:\n    TABLE[0] = 1",
        "class X:\n    def f(self, a=TABLE.append(1)): pass",
        "OTHER = TABLE\nOTHER[0] = 1",
        "OTHER = TABLE\nOTHER += [1]",
        "OTHER = TABLE\nX = OTHER.append(1)",
        "OTHER = THIRD = TABLE\nX = THIRD.append(1)",
    ],
)
def test_a_statement_that_changes_a_table_is_code_of_what_uses_the_table(tmp_path: Path, line: str) -> None:
    last = line.rpartition("\n")[2]
    more = line.replace(last, last.replace("1", "2"))
    assert "main:TABLE" in changed_in_main(tmp_path, f"{HEAD}{line}\n", f"{HEAD}{more}\n")
    unused = HEAD.replace("return TABLE", "return 1")
    assert changed_in_main(tmp_path, f"{unused}{line}\n", f"{unused}{more}\n") == set()


@pytest.mark.parametrize(
    "line",
    [
        "X = len(TABLE) + 1",
        "X = frozenset({1})",
        "X = WORDS.index('a', 1)",
        "X = Other.make(1)",
        "X = [1 for TABLE in ()]",
        "def f(): return TABLE.append(1)",
        "f = lambda: TABLE.append(1)",
        "class X:\n    TABLE = {}\n    TABLE['a'] = 1",
        "class X:\n    def f(self): TABLE.append(1)",
        "import numpy\nX = numpy.zeros(1)",
    ],
)
def test_a_statement_that_changes_nothing_of_the_project_is_no_code_of_others(tmp_path: Path, line: str) -> None:
    last = line.rpartition("\n")[2]
    more = line.replace(last, last.replace("1", "2"))
    text = HEAD.replace("return TABLE", "return TABLE, WORDS, Other")
    assert changed_in_main(tmp_path, f"{text}{line}\n", f"{text}{more}\n") == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from tables import TABLE\n_ = TABLE.append(1)\n", {"filler:_"}),
        ("import tables\n_ = tables.TABLE.append(1)\n", {"filler:_"}),
        ("from tables import TABLE\nclass X:\n    TABLE.append(1)\n", {"filler:X"}),
        ("from tables import TABLE as T\nOTHER = T\nOTHER[0] = 1\n", {"filler:<module>", "filler:OTHER"}),
        ("from tables import SIZES\nX = SIZES.index(1)\n", set()),
        ("from tables import Other\nX = Other.make(1)\n", set()),
        ("import tables\nX = tables.make(1)\n", set()),
    ],
)
def test_a_table_may_be_filled_by_another_module_that_is_imported(
    tmp_path: Path, text: str, expected: set[str]
) -> None:
    files = {
        "main.py": "import filler, tables\ndef run(): return tables.TABLE\n",
        "tables.py": "TABLE = []\nSIZES = (1, 2)\nclass Other: pass\ndef make(size): return size\n",
        "filler.py": text,
    }
    assert changed(tmp_path, files, {"filler.py": text.replace("1", "2")}) == expected


def test_a_name_that_the_body_of_a_class_declares_global_is_made_there(tmp_path: Path) -> None:
    text = "class Maker:\n    global LIMIT\n    LIMIT = 1\ndef run(): return LIMIT\n"
    write(tmp_path, {"main.py": text})
    assert symbols(tmp_path) == {"main:run", "main:LIMIT"}
    assert changed_in_main(tmp_path, text, text.replace("= 1", "= 2")) == {"main:LIMIT"}


KINDS = """
KINDS = []
class Told(type):
    def __new__(cls, *given):
        KINDS.append(made := super().__new__(cls, *given))
        return made
class Base:
    def __init_subclass__(cls): KINDS.append(cls)
class Between(Base): pass
"""


@pytest.mark.parametrize("base", ["kinds.Base", "kinds.Between", "metaclass=kinds.Told"])
def test_a_class_that_its_base_or_metaclass_is_told_of_counts(tmp_path: Path, base: str) -> None:
    files = {
        "main.py": "import kinds, small\ndef run(): return kinds.KINDS[0].size\n",
        "kinds.py": KINDS,
        "small.py": f"import kinds\nclass Small({base}):\n    size = 1\nclass Stranger:\n    size = 1\n",
    }
    edited = files["small.py"].replace("size = 1", "size = 2")
    assert changed(tmp_path, files, {"small.py": edited}) == {"small:Small"}


@pytest.mark.parametrize(
    "asked", ["kinds.Base.__subclasses__()", "kinds.Base.all()", "[*type.__subclasses__(kinds.Base)]"]
)
def test_where_subclasses_are_asked_for_those_of_imported_modules_count(tmp_path: Path, asked: str) -> None:
    files = {
        "main.py": f"import kinds, small\ndef run(): return {asked}[0].size\n",
        "kinds.py": "class Base:\n    @classmethod\n    def all(cls): return cls.__subclasses__()\n",
        "small.py": "import kinds\nclass Small(kinds.Base): pass\nclass Smaller(Small):\n    size = 1\n"
        "class Stranger:\n    size = 1\n",
    }
    edited = files["small.py"].replace("size = 1", "size = 2")
    assert changed(tmp_path, files, {"small.py": edited}) == {"small:Smaller"}
    not_asked = {**files, "main.py": "import kinds, small\ndef run(): return kinds.Base\n"}
    not_asked["kinds.py"] = "class Base: pass\n"
    assert changed(tmp_path, not_asked, {"small.py": edited}) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if TYPE_CHECKING:\n    SCALE = 0\nelse:\n    SCALE = 1\n", {"main:SCALE"}),
        ("if TYPE_CHECKING:\n    SCALE = 1\nelse:\n    SCALE = 0\n", set()),
        ("if TYPE_CHECKING:\n    pass\nelif SMALL:\n    SCALE = 1\n", {"main:<module>"}),
        ("if not TYPE_CHECKING:\n    SCALE = 1\n", {"main:<module>"}),
        ("SCALE = 0\nif __name__ != '__main__':\n    SCALE = 1\n", {"main:<module>"}),
        ("SCALE = 0\nif __name__ == '__main__':\n    pass\nelse:\n    SCALE = 1\n", {"main:SCALE"}),
        ("SCALE = 0\nif '__main__' == __name__:\n    SCALE = 1\n", set()),
        ("SCALE = 0\nif __name__ == '__main__':\n    SCALE = 1\n", set()),
        ("SCALE = 0\nif __name__ == 'main':\n    SCALE = 1\n", {"main:<module>"}),
    ],
)
def test_of_conditions_on_how_the_module_is_read_what_an_import_runs_counts(
    tmp_path: Path, text: str, expected: set[str]
) -> None:
    text = f"from typing import TYPE_CHECKING\n{text}def run(): return SCALE\n"
    assert changed_in_main(tmp_path, text, text.replace("SCALE = 1", "SCALE = 2")) == expected


@pytest.mark.parametrize(
    "body",
    [
        "    try:\n        import fast as impl\n    except ImportError:\n        impl = None\n    return impl.go()",
        "    impl = None\n    if True:\n        from fast import go as impl\n    return impl()",
        "    impl = None\n    def inner():\n        import fast as impl\n        return impl.go()\n    return inner()",
        "    import fast as impl\n    impl = impl.go\n    return (lambda: impl())()",
        "    import importlib\n    return importlib.import_module('fast').go()",
        "    from importlib import import_module\n    impl = import_module('fast')\n    return impl.go()",
    ],
)
def test_a_module_that_a_function_imports_is_followed(tmp_path: Path, body: str) -> None:
    files = {"main.py": f"def run():\n{body}\n", "fast.py": "def go(): return 1\n"}
    assert changed(tmp_path, files, {"fast.py": "def go(): return 2\n"}) == {"fast:go"}


def test_a_module_imported_by_a_name_that_is_written_out_is_followed(tmp_path: Path) -> None:
    files = {
        "main.py": "import importlib\nfast = importlib.import_module('pkg.fast')\ndef run(): return fast.go()\n",
        "pkg/__init__.py": "print(1)\n",
        "pkg/fast.py": "def go(): return 1\n",
    }
    edited = {"pkg/fast.py": "def go(): return 2\n", "pkg/__init__.py": "print(2)\n"}
    assert changed(tmp_path, files, edited) == {"pkg.fast:go", "pkg:<module>"}
    constant = files["main.py"].replace("import_module('pkg.fast')", "import_module(NAME)") + "NAME = 'pkg.fast'\n"
    assert changed(tmp_path, {**files, "main.py": constant}, edited) == set()


def test_annotations_that_become_text_change_what_has_annotations(tmp_path: Path) -> None:
    text = (
        "LIMIT = 3\n"
        "class Sizes:\n    width: int = LIMIT\n"
        "def returns() -> int: return 1\n"
        "def takes(x: int): return 1\n"
        "def plain(x): return 1\n"
        "def run(): return Sizes(), returns(), takes(1), plain(1)\n"
    )
    after = f"from __future__ import annotations\n{text}"
    assert changed_in_main(tmp_path, text, after) == {"main:Sizes", "main:returns", "main:takes"}
    other = f"from __future__ import division\n{text}"
    assert changed_in_main(tmp_path, text, other) == set()
