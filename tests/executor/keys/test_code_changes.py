"""What became of each definition between two keys, each accounted for once, on one line where they are many."""

from executor.keys.code_diff import CodeChange, code_changes, code_text, summary
from hypothesis import given
from hypothesis import strategies as st

from executor.keys.differences import differences, reasons
from executor.keys.node_key import KeyParts

places = st.sampled_from([f"m{module}:f{name}" for module in range(3) for name in range(4)])
codes = st.dictionaries(places, st.sampled_from(["h0", "h1", "h2", "h3", "h4", "h5"]))


def text_of(place: str, hash: str) -> str:
    return f"def {place.partition(':')[2]}():\n    return '{hash}'\n"


@given(codes, codes)
def test_every_definition_that_differs_is_told_once_and_no_other(old: dict[str, str], new: dict[str, str]) -> None:
    changes = code_changes(old, new, text_of)
    now = [change.place for change in changes if change.kind != "removed"]
    before = [change.before for change in changes if change.before]
    before += [change.place for change in changes if change.kind == "removed"]
    assert sorted(place for place in new if old.get(place) != new[place]) == sorted(now)
    assert sorted(place for place in old if place not in new) == sorted(before)
    assert all(change.diff for change in changes if change.kind == "changed")


@given(codes)
def test_the_same_code_has_no_changes(code: dict[str, str]) -> None:
    assert [] == code_changes(code, dict(reversed(code.items())), text_of)


def test_few_are_named_and_many_are_counted_by_file() -> None:
    assert "m:a, m:b, n:c" == summary(["m:a", "m:b", "n:c"])
    many = [f"m{module}:f{name}" for module in range(5) for name in range(module + 1)]
    expected = "5 definitions in m4.py, 4 definitions in m3.py, 3 definitions in m2.py, and in 2 more files"
    assert expected == summary(many, lambda module: f"{module}.py")


def test_what_is_not_known_of_the_text_is_said() -> None:
    unknown = code_changes({"m:f": "h0"}, {"m:f": "h1"}, lambda place, hash: None)
    assert "    m:f: its earlier text was not kept" in code_text(unknown, str)
    same = code_changes({"m:f": "h0"}, {"m:f": "h1"}, lambda place, hash: "def f(): return g()\n")
    assert "    m:f: its text is the same; something that it imports changed" in code_text(same, str)


def test_very_long_differences_are_cut_on_the_screen_alone() -> None:
    change = CodeChange("changed", "m:f", diff=tuple(f"+line {number}" for number in range(1000)))
    lines = code_text([change], str)
    assert "... 600 more lines of differences: --json" == lines[-1]
    assert 1000 == len(change.to_json()["diff"])


def test_code_that_another_value_chose_is_no_changed_code() -> None:
    def parts(algorithm: str, code: dict[str, str]) -> KeyParts:
        return KeyParts("train", 1, code, {"algorithm": algorithm}, {}, {})

    old = parts("dflash", {"run:train": "1", "dflash:loss": "2"})
    chosen = 'config changed: train.algorithm from "dflash" to "dspark"'
    other = parts("dspark", {"run:train": "1", "dspark:loss": "3"})
    assert [chosen] == reasons("train", differences(old, other))
    edited = parts("dspark", {"run:train": "4", "dspark:loss": "3"})
    assert [chosen, "code changed: run:train"] == reasons("train", differences(old, edited))
    same = parts("dflash", {"run:train": "1", "dspark:loss": "3"})
    assert ["code changed: dflash:loss, dspark:loss"] == reasons("train", differences(old, same))
