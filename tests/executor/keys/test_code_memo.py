"""What is remembered of source files says what reading them anew says, whatever is done to them."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_trees import digests

from dsl.errors import ConfigError
from executor.keys import code_memo
from executor.keys.code_memo import CodeMemo
from executor.keys.node_key import KeyParts

GRAIN_S = 0.02  # more than the kernel's
FILES = {
    "main.py": "from pkgutil import get_data\nfrom package import size\nfrom package.inner import scale\nimport late\n"
    'def run(config, stage):\n    return size + scale(1) + late.extra + len(get_data("package", "table.csv"))\n',
    "package/table.csv": "1,2\n",
    "package/__init__.py": "size = 1\n",
    "package/inner.py": "def scale(x):\n    return x\n",
}


def later() -> float:
    """A clock by which everything on disk has settled."""
    return time.time() + 100


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def remembered(root: Path) -> dict[str, str]:
    return dict(CodeMemo(root / "modules.jsonl", later).of(["main:run"], [root]))


SPOILT = "from the memo"


def spoil(root: Path) -> None:
    """Other digests in the memo, so that what is taken from it can be told."""
    lines = [json.loads(line) for line in (root / "modules.jsonl").read_text().splitlines()]
    spoilt = [{**line, "source": {**line["source"], "digest": SPOILT}} for line in lines]
    (root / "modules.jsonl").write_text("".join(json.dumps(line) + "\n" for line in spoilt))


def is_remembered(root: Path) -> bool:
    """Whether every module is taken from a spoilt memo."""
    return {SPOILT} == {digest for file, digest in remembered(root).items() if file.endswith(".py")}


def edit_same_size(root: Path) -> None:
    (root / "package/__init__.py").write_text("size = 2\n")


def edit_with_its_time_put_back(root: Path) -> None:
    path = root / "package/inner.py"
    before = path.stat()
    path.write_text("def scale(y):\n    return y\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def add_the_missing_module(root: Path) -> None:
    (root / "late.py").write_text("extra = 1\n")


def shadow_the_file_by_a_folder(root: Path) -> None:
    write(root, {"package/inner/__init__.py": "def scale(x):\n    return 2 * x\n"})


def shadow_the_name_by_a_submodule(root: Path) -> None:
    write(root, {"package/scale.py": "", "package/inner.py": "from package import scale\n"})


def delete_a_module(root: Path) -> None:
    (root / "package/inner.py").unlink()


def edit_a_data_file(root: Path) -> None:
    (root / "package/table.csv").write_text("1,3\n")


def rename_over(root: Path) -> None:
    (root / "fresh.py").write_text("size = 3\n")
    (root / "fresh.py").rename(root / "package/__init__.py")


@pytest.mark.parametrize(
    "change",
    [
        edit_same_size,
        edit_with_its_time_put_back,
        add_the_missing_module,
        shadow_the_file_by_a_folder,
        shadow_the_name_by_a_submodule,
        delete_a_module,
        edit_a_data_file,
        rename_over,
    ],
)
def test_what_can_change_the_code_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    write(tmp_path, FILES)
    before = remembered(tmp_path)
    time.sleep(GRAIN_S)
    change(tmp_path)
    after = remembered(tmp_path)
    assert digests(tmp_path) == after
    assert before != after


def test_an_edited_file_alone_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    remembered(tmp_path)
    spoil(tmp_path)
    assert is_remembered(tmp_path)
    time.sleep(GRAIN_S)
    edit_same_size(tmp_path)
    after = remembered(tmp_path)
    assert (digests(tmp_path)["package/__init__.py"], SPOILT) == (after["package/__init__.py"], after["main.py"])


def test_what_another_dflow_remembered_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FILES)
    (tmp_path / "reader.py").write_text("one")
    monkeypatch.setattr(code_memo, "READERS", (tmp_path / "reader.py",))
    remembered(tmp_path)
    spoil(tmp_path)
    assert is_remembered(tmp_path)
    (tmp_path / "reader.py").write_text("another")
    assert digests(tmp_path) == remembered(tmp_path)


def test_code_edited_within_the_grain_of_the_clock_is_not_remembered(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    CodeMemo(tmp_path / "modules.jsonl", lambda: (tmp_path / "main.py").stat().st_mtime).of(["main:run"], [tmp_path])
    assert not (tmp_path / "modules.jsonl").exists()


def test_files_of_one_name_under_two_roots_are_remembered_apart(tmp_path: Path) -> None:
    for name, size in (("one", 1), ("two", 2)):
        write(tmp_path / name, {**FILES, "package/__init__.py": f"size = {size}\n"})
    memo = tmp_path / "modules.jsonl"
    both = [CodeMemo(memo, later).of(["main:run"], [tmp_path / name]) for name in ("one", "two", "one")]
    assert both[0] == both[2] != both[1]
    with pytest.raises(ConfigError, match="has no function stop"):
        CodeMemo(memo, later).of(["main:stop"], [tmp_path / "one"])


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 6))
def test_after_any_edits_the_memo_says_what_reading_anew_says(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int
) -> None:
    random_source = random.Random(seed)
    root = tmp_path_factory.mktemp("project")
    write(root, FILES)
    texts = [*FILES.values(), "size = 2\n", "def scale(x):\n    return x + 1\n", "extra = 0\n", ""]
    names = [
        "package/__init__.py",
        "package/inner.py",
        "package/table.csv",
        "package/size.py",
        "late.py",
        "late/__init__.py",
    ]
    for _ in range(steps):
        time.sleep(GRAIN_S)
        path = root / random_source.choice(names)
        if random_source.random() < 0.3:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(random_source.choice(texts))
        assert digests(root) == remembered(root)


def test_nodes_of_one_op_share_the_encoded_code_and_their_keys_are_those_of_a_plain_mapping(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    memo = CodeMemo(None)
    code = memo.of(["main:run"], [tmp_path])
    assert code is memo.of(["main:run"], [tmp_path])
    shared = KeyParts("op", 1, code, {"x": 1}, {}, {})
    plain = KeyParts("op", 1, dict(code), {"x": 1}, {}, {})
    assert plain.key({"a": "d"}) == shared.key({"a": "d"})
    assert plain.key_without_code({"a": "d"}) == shared.key_without_code({"a": "d"})


def test_folders_in_another_order_are_another_question(tmp_path: Path) -> None:
    write(tmp_path, {"one/main.py": "def run(): return 1\n", "two/main.py": "def run(): return 2\n"})
    roots = [tmp_path / "one", tmp_path / "two"]
    memo = tmp_path / "modules.jsonl"
    first = dict(CodeMemo(memo, later).of(["main:run"], roots))
    assert first == dict(CodeMemo(memo, later).of(["main:run"], roots))
    assert first != dict(CodeMemo(memo, later).of(["main:run"], roots[::-1]))


def test_an_installed_module_that_comes_later_is_noticed(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    write(tmp_path, {"own/main.py": "import part\ndef run(): return part.x\n", "own/part.py": "x = 1\n"})
    roots = [installed, tmp_path / "own"]
    memo = tmp_path / "modules.jsonl"
    assert "part.py" in CodeMemo(memo, later).of(["main:run"], roots)
    (installed / "part.py").write_text("x = 2\n")
    assert "part.py" not in CodeMemo(memo, later).of(["main:run"], roots)
