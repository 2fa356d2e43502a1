"""How a change of code is worded: the files in which it is, and what cannot be compared."""

from executor.keys.differences import difference_text, differences, distance, reasons
from executor.keys.node_key import KeyParts


def parts(code: dict[str, str], algorithm: str = "dflash") -> KeyParts:
    return KeyParts("train", 1, code, {"algorithm": algorithm}, {}, {})


def texts(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return [difference_text("train", each) for each in differences(parts(old), parts(new))]


def test_every_file_that_differs_is_named_once_and_no_other() -> None:
    old = {"ops/a.py": "1", "ops/b.py": "2", "ops/c.py": "3"}
    new = {"ops/a.py": "1", "ops/b.py": "9", "ops/d.py": "4"}
    assert [
        "code changed: ops/b.py",
        "code changed: ops/c.py (no longer imported)",
        "code changed: ops/d.py (imported now)",
    ] == texts(old, new)
    assert [] == texts(old, dict(reversed(old.items())))


def test_a_reason_names_few_files_and_counts_the_rest() -> None:
    old = {f"ops/{name}.py": "1" for name in "abcde"}
    found = differences(parts(old), parts(dict.fromkeys(old, "2")))
    assert ["code changed: ops/a.py, ops/b.py, ops/c.py, and 2 more"] == reasons("train", found)
    assert 1 == distance(found)


def test_code_of_the_earlier_rule_is_not_compared_with_that_of_this_one() -> None:
    old, new = {"ops.a:f": "1", "ops.a:g": "2"}, {"ops/a.py": "3"}
    assert ["code rule changed: recorded by an earlier dflow"] == texts(old, new) == texts(new, old)
    assert ["code changed: ops.a:g"] == texts(old, {**old, "ops.a:g": "4"})


def test_code_that_another_value_chose_is_no_changed_code() -> None:
    old = {"run.py": "1", "dflash.py": "2"}
    chosen = 'config changed: train.algorithm from "dflash" to "dspark"'
    other = parts({"run.py": "1", "dspark.py": "3"}, "dspark")
    assert [chosen] == reasons("train", differences(parts(old), other))
    edited = parts({"run.py": "4", "dspark.py": "3"}, "dspark")
    assert [chosen, "code changed: run.py"] == reasons("train", differences(parts(old), edited))
