"""Which edits change the code that enters a key: small source trees, edited."""

import ast
import shutil
from pathlib import Path

import pytest
from dsl.fingerprint import code_fingerprints, read_code
from dsl.syntax import encode_tree
from source_trees import changed, changed_in_main, symbols, write

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


def stranger():
    return OTHER
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""The module."""', '"""Another text."""'),
        ('    """Runs."""\n', ""),
        ("  # why", "  # because"),
        ("x + 1", "(x\n            + 1)"),
        ("LIMIT = 3\n", "LIMIT = 0x3\n\n\n"),
        ("OTHER = 4", "OTHER = 5"),
        ("return OTHER", "return OTHER + 1"),
        ("def stranger", "def new():\n    return LIMIT\n\n\ndef stranger"),
    ],
)
def test_docstrings_comments_formatting_and_edits_elsewhere_change_nothing(tmp_path: Path, old: str, new: str) -> None:
    assert changed_in_main(tmp_path, MAIN, MAIN.replace(old, new)) == set()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("LIMIT = 3", "LIMIT = 4", {"main:LIMIT"}),
        ("LIMIT = 3", "LIMIT = 3.0", {"main:LIMIT"}),
        ("LIMIT = 3", "LIMIT = 3\nLIMIT = LIMIT + 0", {"main:LIMIT"}),
        ("LIMIT = 3", "LIMIT = 3\nLIMIT += 1", {"main:LIMIT"}),
        ("LIMIT = 3", "LIMIT = 3\nLIMIT.x = 1", {"main:LIMIT"}),
        ("LIMIT = 3", "LIMIT = 3\nLIMIT[0], y = 1, 2", {"main:LIMIT"}),
        ("LIMIT = 3", "LIMIT, b = 3, 4", {"main:LIMIT"}),
        ("LIMIT = 3", "LIMIT: int = 3", {"main:LIMIT"}),
        ("x + 1", "x + 2", {"main:helper"}),
        ("def helper(x)", "def helper(x, y=OTHER)", {"main:helper", "main:OTHER"}),
        ("def helper", "@decorate\ndef helper", {"main:helper"}),
        ("def helper", "@stranger\ndef helper", {"main:helper", "main:stranger", "main:OTHER"}),
        ("return helper(LIMIT)", "return helper(OTHER)", {"main:run", "main:LIMIT", "main:OTHER"}),
        ("return helper(LIMIT)", "return helper(lambda LIMIT: LIMIT)", {"main:run", "main:LIMIT"}),
        ("return helper(LIMIT)", "return [helper(OTHER) for LIMIT in LIMIT]", {"main:run", "main:OTHER"}),
        ("return helper(LIMIT)", "LIMIT = 1; return helper(LIMIT)", {"main:run", "main:LIMIT"}),
        ("return helper(LIMIT)", "global OTHER; OTHER = helper(LIMIT)", {"main:run", "main:OTHER"}),
        ("OTHER = 4", "OTHER = 4\nprint(OTHER)", {"main:<module>", "main:OTHER"}),
        ("OTHER = 4", "for k in range(3):\n    OTHER = k", {"main:<module>"}),
        ("OTHER = 4", "if 1:\n    OTHER = helper(4)", {"main:<module>"}),
        ("OTHER = 4", "try:\n    OTHER = 4\nexcept ValueError:\n    OTHER = 5", {"main:<module>"}),
        ("OTHER = 4", "with x:\n    OTHER = 4", {"main:<module>"}),
        ("LIMIT = 3", "if 1:\n    LIMIT = 3", {"main:<module>", "main:LIMIT"}),
        ("OTHER = 4", "import os\nos.environ['X'] = '1'", {"main:<module>"}),
        ("OTHER = 4", "if __name__ == '__main__':\n    stranger()", set()),
    ],
)
def test_an_edit_changes_the_symbol_it_is_in(tmp_path: Path, old: str, new: str, expected: set[str]) -> None:
    assert changed_in_main(tmp_path, MAIN, MAIN.replace(old, new)) == expected


def test_a_parameter_or_local_variable_is_not_the_global_of_the_same_name(tmp_path: Path) -> None:
    text = (
        "a = b = c = d = e = f = g = h = 1\n"
        "def run(a, *b, c=0, **d):\n"
        "    for e in a: pass\n"
        "    with b as f: pass\n"
        "    def inner(): return e, f, [g for g in c], g\n"
        "    try: pass\n"
        "    except ValueError as h: return h\n"
    )
    write(tmp_path, {"main.py": text})
    assert symbols(tmp_path) == {"main:run", "main:g"}


def test_classes_are_followed_with_bases_and_decorators(tmp_path: Path) -> None:
    text = (
        "def mark(cls): return cls\n"
        "class Base:\n    size = 1\n"
        "@mark\nclass Model(Base):\n    def forward(self): return layer()\n"
        "def layer(): return 1\n"
        "def run(): return Model().forward()\n"
    )
    write(tmp_path, {"main.py": text})
    assert symbols(tmp_path) == {"main:run", "main:Model", "main:Base", "main:mark", "main:layer"}
    assert changed_in_main(tmp_path, text, text.replace("size = 1", "size = 2")) == {"main:Base"}


IMPORTS = {
    "main.py": "",
    "other.py": "X = 1\ndef f(): return X\ndef g(): return 2\n",
    "pkg/__init__.py": "from .impl import f as shown\nfrom . import sub\n",
    "pkg/impl.py": "def f(): return 1\ndef unused(): return 2\n",
    "pkg/sub/__init__.py": "",
    "pkg/sub/deep.py": "from ..impl import f\nfrom ...pkg import impl\ndef h(): return f() + impl.unused()\n",
    "space/inner.py": "def k(): return 1\n",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from other import f\ndef run(): return f()", {"other:f", "other:X"}),
        ("from other import f as z\ndef run(): return z()", {"other:f", "other:X"}),
        ("import other\ndef run(): return other.g()", {"other:g"}),
        ("import other as o\ndef run(): return o.g()", {"other:g"}),
        ("import other\ndef run(): return other", {"other:f", "other:g", "other:X"}),
        ("from other import *\ndef run(): return g()", {"other:g"}),
        ("def run():\n    from other import g\n    return g()", {"other:g"}),
        ("def run():\n    import pkg.impl\n    return pkg.impl.f()", {"pkg.impl:f"}),
        ("import pkg\ndef run(): return pkg.shown()", {"pkg.impl:f"}),
        ("from pkg import shown\ndef run(): return shown()", {"pkg.impl:f"}),
        (
            "import pkg.sub.deep\ndef run(): return pkg.sub.deep.h()",
            {"pkg.sub.deep:h", "pkg.impl:f", "pkg.impl:unused"},
        ),
        ("from pkg.sub import deep as d\ndef run(): return d.h.x", {"pkg.sub.deep:h", "pkg.impl:f", "pkg.impl:unused"}),
        ("from space import inner\ndef run(): return inner.k()", {"space.inner:k"}),
        (
            "try:\n    from other import g\nexcept ImportError:\n    g = None\ndef run(): return g()",
            {"other:g", "main:<module>"},
        ),
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
    assert symbols(tmp_path) == expected | {"main:run"}


def test_a_run_function_may_be_imported_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, {**IMPORTS, "main.py": "from pkg import shown as run"})
    assert symbols(tmp_path) == {"pkg.impl:f"}


def test_another_meaning_of_an_imported_name_changes_what_uses_it(tmp_path: Path) -> None:
    one = "from other import f as a, g as b\ndef run(): return a() - b()\n"
    two = "from other import g as a, f as b\ndef run(): return a() - b()\n"
    assert changed(tmp_path, {**IMPORTS, "main.py": one}, {"main.py": two}) == {"main:run"}
    torch, numpy = (
        "from torch import sum\ndef run(): return sum()\n",
        "from numpy import sum\ndef run(): return sum()\n",
    )
    assert changed_in_main(tmp_path, torch, numpy) == {"main:run"}


def test_modules_that_import_each_other_and_long_chains_of_calls_are_no_problem(tmp_path: Path) -> None:
    chain = "".join(f"def f{k}(): return f{k + 1}()\n" for k in range(3000))
    deep = "def f3000(): return " + " + ".join(["1"] * 900) + "\n"
    write(
        tmp_path,
        {
            "main.py": "import pair\nfrom pair import again\ndef run(): return pair.back(), f0(), again\n"
            + chain
            + deep,
            "pair.py": "import main\nfrom main import again\ndef back(): return main.run()\n",
        },
    )
    assert symbols(tmp_path) == {"main:run", "pair:back", *(f"main:f{k}" for k in range(3001))}


def test_of_installed_packages_only_the_projects_own_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "site-packages"
    write(root, {"ops/a.py": "import torch\ndef run(): return torch.f()\n", "torch.py": "def f(): return 1\n"})
    assert set(code_fingerprints("ops.a:run", [root])) == {"ops.a:run"}


def test_the_first_root_wins(tmp_path: Path) -> None:
    write(tmp_path, {"one/main.py": "def run(): return f\nf = 1\n", "two/main.py": "def run(): return g\ng = 1\n"})
    assert set(code_fingerprints("main:run", [tmp_path / "two", tmp_path / "one"])) == {"main:run", "main:g"}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("gone:run", 'run = "gone:run": there is no module gone under {root}'),
        ("main:go", 'run = "main:go": the module main has no function go'),
        ("broken:run", "{root}/broken.py is not Python: invalid syntax (<unknown>, line 2)"),
    ],
)
def test_a_run_function_that_is_not_there_is_reported(tmp_path: Path, run: str, expected: str) -> None:
    write(tmp_path, {"main.py": MAIN, "broken.py": "x = 1\ndef run(:\n"})
    with pytest.raises(ConfigError) as caught:
        code_fingerprints(run, [tmp_path])
    assert str(caught.value) == expected.format(root=tmp_path)


def test_the_fingerprint_of_fixed_code_never_changes_between_versions_of_python(tmp_path: Path) -> None:
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
    assert code_fingerprints("main:run", [tmp_path]) == {
        "main:LIMITS": "4e6b2e3b2d7d29780a37a3044a6ab2edb5c753dab4145d1bbd669f6c766d46cd",
        "main:Model": "67fca96d9f82a6e410f8dce1188a3993484fbd557b7f5390006ef40d7a345960",
        "main:run": "adb70be7bf7332d62a3c692b34b7e79bc3f7c2501c5948f1a4709d2d13f7a451",
    }


def test_the_code_of_all_built_in_ops_is_found_and_every_file_is_parsed_once(monkeypatch) -> None:
    parsed: list[bytes] = []
    parse = ast.parse
    monkeypatch.setattr("dsl.source.ast.parse", lambda source: (parsed.append(source), parse(source))[1])
    found = {name: code_fingerprints(op.run, [ROOT]) for name, op in all_ops().items()}
    assert {name for name, op in all_ops().items() if op.run not in found[name]} == set()
    not_empty = [source for source in parsed if source]
    assert len(not_empty) == len(set(not_empty))


RUN = """
import constants
from bases import Base

FACTOR = 2

def twice(function):
    return function

class Model(Base):
    def scale(self, x, by=3):
        return x * by * FACTOR * constants.STEP

@twice
def run(config, stage):
    size = 1  # a size
    return Model().scale(size)
"""
PROJECT = {
    "main.py": RUN,
    "constants.py": "STEP = 0.5\nOTHER = 1\n",
    "bases.py": "class Base:\n    def start(self):\n        return 0\n",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        ("main.py", "FACTOR = 2", "FACTOR = 3", True),
        ("main.py", "by=3", "by=4", True),
        ("main.py", "@twice\n", "", True),
        ("main.py", "return function", "return lambda *given: function(*given)", True),
        ("constants.py", "STEP = 0.5", "STEP = 0.25", True),
        ("bases.py", "return 0", "return 1", True),
        ("constants.py", "OTHER = 1", "OTHER = 2", False),
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
        ("main.py", "x * by * FACTOR", "((x * by)\n            * FACTOR)", False),
        ("main.py", "\n", "\r\n", False),
    ],
)
def test_what_the_code_means_counts_not_how_it_is_written(
    tmp_path: Path, file: str, old: str, new: str, counts: bool
) -> None:
    edited = {**PROJECT, file: PROJECT[file].replace(old, new)}
    assert edited != PROJECT
    assert counts == bool(changed(tmp_path, PROJECT, edited))


def test_a_data_file_counts_where_it_is_read_and_its_content_is_part_of_the_text(tmp_path: Path) -> None:
    files = {
        "main.py": "from package.kernel import compiled\ndef run(config, stage):\n    return compiled()\n",
        "package/__init__.py": "",
        "package/kernel.py": "from pkgutil import get_data\n\n\n"
        'def compiled():\n    return get_data("package", "kernel.c")\n',
        "package/kernel.c": "int one(void) { return 1; }\n",
        "package/other.c": "int two(void) { return 2; }\n",
    }
    edited = {"package/kernel.c": "int one(void) { return 3; }\n"}
    assert {"package.kernel:compiled"} == changed(tmp_path, files, edited)
    code = read_code(["main:run"], [tmp_path])
    assert code.text("package.kernel:compiled").endswith('"kernel.c")\nint one(void) { return 3; }\n')
    assert tmp_path / "package/kernel.c" in code.read
    (tmp_path / "package/other.c").write_text("")
    assert code.hashes == read_code(["main:run"], [tmp_path]).hashes
    (tmp_path / "package/kernel.c").unlink()
    assert code.hashes != read_code(["main:run"], [tmp_path]).hashes


TRAIN = "ops.train_dflash.run:train_dflash"


@pytest.mark.parametrize(
    ("file", "reader", "begin"),
    [
        ("ops/lib/kernels/sweep.c", "ops.lib.kernels.c_library:_sweeps", TRAIN),
        ("ops/lib/kernels/lanes.c", "ops.lib.kernels.c_library:_sweeps", TRAIN),
        (
            "ops/lib/kernels/comparison.c",
            "ops.lib.kernels.c_library:compiled_comparison",
            "ops.lib.drafts.dspark.loss:block_losses",
        ),
        (
            "ops/lib/drafts/attention/cpu_attention.c",
            "ops.lib.drafts.attention.cpu_attention:compiled_attention",
            TRAIN,
        ),
    ],
)
def test_an_edited_c_file_changes_the_code_of_what_runs_it_only(
    tmp_path: Path, file: str, reader: str, begin: str
) -> None:
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    other = "ops.ingest.run:ingest"
    before = {function: code_fingerprints(function, [tmp_path]) for function in (begin, other)}
    (tmp_path / file).write_text((tmp_path / file).read_text() + "\n/* edited */\n")
    after = {function: code_fingerprints(function, [tmp_path]) for function in before}
    differing = {
        function: {name for name in codes if codes[name] != after[function][name]} for function, codes in before.items()
    }
    assert {begin: {reader}, other: set()} == differing


@pytest.mark.parametrize("folder", ["ops", "dsl", "executor"])
def test_every_file_of_the_project_may_be_formatted_anew(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.ClassDef)):
                assert encode_tree(function) == encode_tree(ast.parse(ast.unparse(function)).body[0])


def test_the_text_of_a_symbol_is_its_lines_with_decorators_and_all_its_statements(tmp_path: Path) -> None:
    write(tmp_path, {**PROJECT, "main.py": RUN + "\nFACTOR += 1\n"})
    code = read_code(["main:run"], [tmp_path])
    expected = "@twice\ndef run(config, stage):\n    size = 1  # a size\n    return Model().scale(size)\n"
    assert expected == code.text("main:run")
    assert "FACTOR = 2\nFACTOR += 1\n" == code.text("main:FACTOR")
    assert "STEP = 0.5\n" == code.text("constants:STEP")
