"""Which edits change the code that enters a key: small source trees, edited."""

import ast
import shutil
from pathlib import Path

import pytest
from source_trees import changed, changed_in_main, digests, modules, write

from dsl.closure import Project, encode_tree
from dsl.errors import ConfigError
from dsl.op_table import all_ops

ROOT = Path(__file__).parents[2]


MAIN = '''"""The module."""

LIMIT = 3
OTHER = 4


def run(config, stage):
    """Runs."""
    return helper(LIMIT)  # why


def helper(x):
    return x + 1
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""The module."""', '"""Another text."""'),
        ('    """Runs."""\n', ""),
        ("  # why", "  # because"),
        ("x + 1", "(x\n            + 1)"),
        ("LIMIT = 3\n", "LIMIT = 0x3\n\n\n"),
        ("LIMIT = 3\n", "LIMIT = 3\n'''The most.'''\n"),
    ],
)
def test_docstrings_comments_and_formatting_change_nothing(tmp_path: Path, old: str, new: str) -> None:
    assert not changed_in_main(tmp_path, MAIN, MAIN.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3.0"),
        ("LIMIT = 3", "LIMIT = 3\nLIMIT += 1"),
        ("LIMIT = 3", "LIMIT: int = 3"),
        ("OTHER = 4", "OTHER = 5"),
        ("OTHER = 4", "import os\nos.environ['X'] = '1'"),
        ("x + 1", "x + 2"),
        ("def helper", "@staticmethod\ndef helper"),
        ("helper(LIMIT)", "helper(lambda LIMIT: LIMIT)"),
        ("helper(LIMIT)", "[helper(LIMIT) for LIMIT in LIMIT]"),
        ("helper(LIMIT)", "helper('LIMIT')"),
    ],
)
def test_any_other_edit_of_a_module_counts(tmp_path: Path, old: str, new: str) -> None:
    assert changed_in_main(tmp_path, MAIN, MAIN.replace(old, new))


IMPORTS = {
    "main.py": "",
    "other.py": "X = 1\ndef f(): return X\ndef g(): return 2\n",
    "pkg/__init__.py": "from .impl import f as shown\nfrom . import sub\n",
    "pkg/impl.py": "def f(): return 1\n",
    "pkg/sub/__init__.py": "",
    "pkg/sub/deep.py": "from ..impl import f\nfrom ...pkg import late\ndef h(): return f() + late.x\n",
    "pkg/late.py": "x = 1\n",
    "space/inner.py": "def k(): return 1\n",
    "stranger.py": "",
}
PKG = {"pkg/__init__.py", "pkg/impl.py", "pkg/sub/__init__.py"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from other import f\ndef run(): return f()", {"other.py"}),
        ("import other as o\ndef run(): return 1", {"other.py"}),
        ("from other import *\ndef run(): return g()", {"other.py"}),
        ("def run():\n    from other import g\n    return g()", {"other.py"}),
        ("def run():\n    import pkg.impl\n    return pkg.impl.f()", PKG),
        ("import pkg\ndef run(): return pkg.shown()", PKG),
        ("from pkg import shown\ndef run(): return shown()", PKG),
        ("import pkg.sub.deep\ndef run(): return pkg.sub.deep.h()", {*PKG, "pkg/sub/deep.py", "pkg/late.py"}),
        ("from pkg.sub import deep as d\ndef run(): return d.h.x", {*PKG, "pkg/sub/deep.py", "pkg/late.py"}),
        ("from space import inner\ndef run(): return inner.k()", {"space/inner.py"}),
        ("try:\n    from other import g\nexcept ImportError:\n    g = None\ndef run(): return g()", {"other.py"}),
        ("from importlib import import_module\ndef run(): return import_module('pkg.late').x", {*PKG, "pkg/late.py"}),
        ("import importlib\ndef run(): return importlib.import_module('other', None)", {"other.py"}),
        ("NAME = 'other'\ndef run(): return import_module(NAME)", set()),
        ("import torch.nn.functional as F\ndef run(): return F.relu(numpy.x)", set()),
        (
            "from dsl.errors import ConfigError\nimport executor.scheduler.run_loop\n"
            "def run(): raise ConfigError(executor.scheduler.run_loop.x)",
            set(),
        ),
    ],
)
def test_imports_are_followed(tmp_path: Path, text: str, expected: set[str]) -> None:
    write(tmp_path, {**IMPORTS, "main.py": text})
    assert modules(tmp_path) == expected | {"main.py"}


@pytest.mark.parametrize(
    "text", ["from pkg import shown as run", "from pkg import *", "run = lambda: 1", "run: int = 1"]
)
def test_a_run_function_may_be_made_in_any_way(tmp_path: Path, text: str) -> None:
    write(tmp_path, {**IMPORTS, "main.py": text})
    assert "main.py" in modules(tmp_path)


def test_modules_that_import_each_other_and_long_expressions_are_no_problem(tmp_path: Path) -> None:
    deep = "import pair\ndef run(): return " + " + ".join(["1"] * 900) + "\n"
    write(tmp_path, {"main.py": deep, "pair.py": "import main\nfrom main import again\n"})
    assert modules(tmp_path) == {"main.py", "pair.py"}


def test_of_installed_packages_only_the_projects_own_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "site-packages"
    write(root, {"ops/a.py": "import torch\ndef run(): return torch.f()\n", "torch.py": "def f(): return 1\n"})
    assert modules(root, "ops.a:run") == {"ops/a.py"}


def test_the_first_root_wins(tmp_path: Path) -> None:
    write(tmp_path, {"one/main.py": "def run(): return 1\n", "two/main.py": "def run(): return 2\n"})
    one, two = tmp_path / "one", tmp_path / "two"
    assert Project([two, one]).closure(["main:run"]).read.keys() == {two / "main.py"}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("gone:run", 'run = "gone:run": there is no module gone under {root}'),
        ("main:go", 'run = "main:go": the module main has no function go'),
        ("main:x", 'run = "main:x": the module main has no function x'),
        ("broken:run", "{root}/broken.py is not Python: invalid syntax (<unknown>, line 2)"),
    ],
)
def test_a_run_function_that_is_not_there_is_reported(tmp_path: Path, run: str, expected: str) -> None:
    write(tmp_path, {"main.py": MAIN, "broken.py": "x = 1\ndef run(:\n"})
    with pytest.raises(ConfigError) as caught:
        digests(tmp_path, run)
    assert str(caught.value) == expected.format(root=tmp_path)


def test_the_digest_of_fixed_code_never_changes_between_versions_of_python(tmp_path: Path) -> None:
    text = '''
import torch.nn.functional as F
from math import *
LIMITS: dict[str, int] = {"a": 1, **{}}
@F.cached(1)
class Model(F.Module, metaclass=type):
    """Doc."""
    size: int = -2
    async def go(self, a, /, b=1.5, *args, c, d=None, **rest) -> str:
        """Doc."""
        async with a as x, b: pass
        return f"{x!r:>{c}} {d=} and {rest:%Y}" "tail"
def run(config, stage):
    """Doc."""
    try:
        first, *others = [y := 3j, ..., b"x", u"x", None, True]
    except (ValueError, OSError) as error:
        raise SystemExit from error
    else:
        del others[::2]
    match config:
        case {"a": [1, *_], **more} if more: return lambda q, *, r=1: (yield)
        case Model(size=-2) | None: assert LIMITS, "no"
    return {k: v for k, v in LIMITS.items() if not k < "b" <= v} if stage else {*()}
'''
    write(tmp_path, {"main.py": text})
    assert digests(tmp_path) == {"main.py": "b53d29a5791606f82323c092a933395b81f8d72a0527a7602f135b606c0da141"}


def test_the_code_of_all_built_in_ops_is_found_and_every_file_is_parsed_once(monkeypatch) -> None:
    parsed: list[bytes] = []
    parse = ast.parse
    monkeypatch.setattr("dsl.closure.ast.parse", lambda source: (parsed.append(source), parse(source))[1])
    project = Project([ROOT])
    found = {name: project.closure([op.run]).digests for name, op in all_ops().items()}
    assert {name for name in found if f"ops/{name}/run.py" not in found[name]} == set()
    not_empty = [source for source in parsed if source]
    assert len(not_empty) == len(set(not_empty))
    assert {name.partition("/")[0] for code in found.values() for name in code} == {"ops"}


RUN = """
import constants
from bases import Base

def run(config, stage):
    size = 1  # a size
    return Base().scale(size) * constants.STEP
"""
PROJECT = {
    "main.py": RUN,
    "constants.py": "STEP = 0.5\nOTHER = 1\n",
    "bases.py": "class Base:\n    def scale(self, x):\n        return 0\n",
    "stranger.py": "import main\nX = 1\n",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        ("main.py", "size = 1", "size = 2", True),
        ("constants.py", "STEP = 0.5", "STEP = 0.25", True),
        ("constants.py", "OTHER = 1", "OTHER = 2", True),
        ("bases.py", "return 0", "return 1", True),
        ("stranger.py", "X = 1", "X = 2", False),
        ("main.py", "size = 1  # a size", "size = 1  # type: int", False),
        (
            "main.py",
            "def run(config, stage):\n",
            "def run(config, stage):\n    # type: (object, object) -> int\n",
            False,
        ),
        ("main.py", "def run(config, stage):\n", 'def run(config, stage):\n    """It runs."""\n', False),
        ("bases.py", "class Base:\n", 'class Base:\n    """The base."""\n\n', False),
        ("constants.py", "STEP = 0.5", "STEP = 5e-1", False),
        ("main.py", "\n", "\r\n", False),
    ],
)
def test_what_the_code_means_counts_not_how_it_is_written(
    tmp_path: Path, file: str, old: str, new: str, counts: bool
) -> None:
    edited = {**PROJECT, file: PROJECT[file].replace(old, new)}
    assert edited != PROJECT
    assert ({file} if counts else set()) == changed(tmp_path, PROJECT, edited)


def test_a_data_file_counts_where_it_is_read(tmp_path: Path) -> None:
    files = {
        "main.py": "from package.kernel import compiled\ndef run(config, stage):\n    return compiled()\n",
        "package/__init__.py": "",
        "package/kernel.py": "from pkgutil import get_data\n\n\n"
        'def compiled():\n    return get_data("package", "kernel.c")\n',
        "package/kernel.c": "int one(void) { return 1; }\n",
        "package/other.c": "int two(void) { return 2; }\n",
    }
    assert {"package/kernel.c"} == changed(tmp_path, files, {"package/kernel.c": "int one(void) { return 3; }\n"})
    code = Project([tmp_path]).closure(["main:run"])
    assert tmp_path / "package/kernel.c" in code.read
    (tmp_path / "package/other.c").write_text("")
    assert code.digests == digests(tmp_path)
    (tmp_path / "package/kernel.c").unlink()
    assert code.digests != digests(tmp_path)


TRAIN = "ops.train_dflash.run:train_dflash"


@pytest.mark.parametrize(
    ("file", "begin"),
    [
        ("ops/lib/kernels/sweep.c", TRAIN),
        ("ops/lib/kernels/lanes.c", TRAIN),
        ("ops/lib/kernels/comparison.c", "ops.lib.drafts.dspark.loss:block_losses"),
        ("ops/lib/drafts/attention/cpu_attention.c", TRAIN),
    ],
)
def test_an_edited_c_file_changes_the_code_of_what_runs_it_only(tmp_path: Path, file: str, begin: str) -> None:
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    other = "ops.ingest.run:ingest"
    before = {function: digests(tmp_path, function) for function in (begin, other)}
    (tmp_path / file).write_text((tmp_path / file).read_text() + "\n/* edited */\n")
    after = {function: digests(tmp_path, function) for function in before}
    differing = {
        function: {name for name in codes if codes[name] != after[function][name]} for function, codes in before.items()
    }
    assert {begin: {file}, other: set()} == differing


@pytest.mark.parametrize("folder", ["ops", "dsl", "executor"])
def test_every_file_of_the_project_may_be_formatted_anew(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        assert encode_tree(tree) == encode_tree(ast.parse(ast.unparse(tree))), path
