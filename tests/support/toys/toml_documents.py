"""TOML documents of every kind, and the keys in them."""

import string
from typing import Any

from hypothesis import strategies as st

from dsl.toml import KeyPath

DOCUMENT = '''# [not.a.table]
title = "a # b = [c]"   # key = 1
"quoted.key" = 'it "is"'
a.b . "c d" = { x = 1, y = { z = [1, { w = "}" }] } }
text = """
[no.table]
no_key = 1 \\""" still ""text""" # over
lines = [
  "]",  # ]
  [ 1, 2 ],
  { deep = true },
]
when = 1979-05-27 07:32:00Z

[ node . "my node" ]
  op = 'x'
[[array]]
k = 1
[array.sub]
l = 2
[[array]]
k = 3
[[array.inner]]
m = 4
'''


def key_paths(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    """The paths of all keys in a document that tomli has read."""
    if isinstance(value, dict):
        below = [key_paths(member, (*path, key)) for key, member in value.items()]
        return {(*path, key) for key in value}.union(*below)
    if isinstance(value, list):
        return set().union(*[key_paths(member, (*path, index)) for index, member in enumerate(value)])
    return set()


names = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=3)


odd_names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=3)


blanks = st.sampled_from(["", " ", "\t "])


gaps = st.sampled_from(["", " ", "\n", " # ] } \" ' = x\n", "\n\n"])


def basic(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def written_key(draw: Any) -> tuple[str, str]:
    """A strategy for a key and one way to write it."""
    if draw(st.booleans()):
        name = draw(names)
        return name, draw(st.sampled_from([name, basic(name), f"'{name}'"]))
    name = draw(odd_names)
    return name, basic(name)


def written_value(draw: Any, depth: int) -> str:
    kinds = ["scalar", "string", "block", "literal"] + (["array", "inline"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "string":
        return basic(draw(odd_names))
    if kind == "block":
        return draw(st.sampled_from(['"""a\n[x]\ny = 1"""', '""""q" \\""" b"""""', "'''it's\n# no\n''''", '""""""']))
    if kind == "literal":
        return draw(st.sampled_from(["'a # b'", "'\\'", "''", "'[x]'"]))
    if kind == "array":
        members = [written_value(draw, depth - 1) for _ in range(draw(st.integers(0, 3)))]
        return "[" + ",".join(draw(gaps) + member + draw(gaps) for member in members) + draw(gaps) + "]"
    if kind == "inline":
        return "{ " + ", ".join(written_pairs(draw, depth - 1, most=3)) + " }"
    return draw(st.sampled_from(["1", "-2.5e3", "true", "1979-05-27 07:32:00", "inf", "0xff"]))


def written_pairs(draw: Any, depth: int, most: int) -> list[str]:
    pairs = {}
    for _ in range(draw(st.integers(0, most))):
        parts = [written_key(draw) for _ in range(draw(st.integers(1, 2)))]
        if parts[0][0] not in pairs:
            dotted = (draw(blanks) + "." + draw(blanks)).join(raw for _, raw in parts)
            pairs[parts[0][0]] = f"{dotted}{draw(blanks)}={draw(blanks)}{written_value(draw, depth)}"
    return list(pairs.values())


@st.composite
def documents(draw: Any) -> str:
    lines = [draw(blanks) + pair for pair in written_pairs(draw, 2, most=3)]
    headers = []
    for index in range(draw(st.integers(0, 3))):
        parts = [f"t{index % 2}", *(written_key(draw)[1] for _ in range(draw(st.integers(0, 2))))]
        inside = (draw(blanks) + "." + draw(blanks)).join(parts)
        headers.append(draw(st.sampled_from([f"[{inside}]", f"[[{inside}]]", f"[ {inside} ]  # [c]"])))
        lines += [headers[-1], *written_pairs(draw, 2, most=3)]
    return "".join(line + draw(st.sampled_from(["\n", "\n\n# c = 1\n", " # [x]\n", "\r\n"])) for line in lines)
