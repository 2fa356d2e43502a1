"""Pipelines that are broken in thousands of ways: a real pipeline file, changed by a few random mutations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen
from hypothesis import strategies as st

from dsl.errors import PipelineError
from dsl.finding import Finding
from dsl.read_toml import read_graph

ENVIRONMENT = {"FUZZ_NAME": "name", "FUZZ_KEY": "value of the key"}
PIPELINES = Path(__file__).resolve().parents[3] / "pipelines"
OPS = """
from attrs import frozen, validators
from dsl.op import field, op
from ops.artifacts import Samples

@op(version=1, run="fuzz_ops:join")
@frozen(kw_only=True)
class Join:
    parts: tuple[Samples, ...]
    weights: dict[str, float] = field(default={})
    layers: tuple[int, ...] = ()
    share: float = field(default=0.5, validator=validators.gt(0))
    most: int | None = None
    file: str = field(default="builtin", external=True)
    exact: bool = False
    output = Samples
"""
EXTRAS = """
extends = "base.toml"
[pipeline]
name = "extras"
seed = 3
ops = ["fuzz_ops.py"]
[mlflow]
notes = "${pipeline.name}"
tags = { team = "vision", "a b" = "${env:FUZZ_NAME}" }
[machine]
cpus = 4
memory = "8 GiB"
[for_each.draft.small]
join.most = 1
join.launch = { retries = 1 }
[for_each.draft.large]
join.most = "${ingest.max_samples}"
[sweep]
join.share = [0.1, 0.2]
[node.join]
op = "join"
parts = ["@ingest", "@inject"]
weights = { a = 1.0, "b" = 2 }
layers = [1, 2,
  3]
file = "base.toml"
launch = { kind = "ranks", nproc = 2, timeout = 3.0, memory = "1 GiB" }
[node.both]
op = "join"
parts = ["@join", "@ingest"]
exact = true
"""
BASE = """
[pipeline]
name = "base"
[node.ingest]
op = "ingest"
source = "builtin:digits"
max_samples = 4
[node.inject]
op = "inject_images"
samples = "@ingest"
launch.threads = 2
"""
TWO_DRAFTS = """extends = "tiny.toml"

[pipeline]
name = "compare-drafts"

[mlflow]
notes = "One layer against two, blocks of ${train.block_size}"

[for_each.draft.small]
train.num_layers = 1

[for_each.draft.large]
train.num_layers = 2
"""
FOLDER_FILES = {"base.toml": BASE, "fuzz_ops.py": OPS, "tiny.toml": (PIPELINES / "tiny.toml").read_text()}
STARTS = [
    EXTRAS,
    EXTRAS,
    BASE,
    (PIPELINES / "tiny.toml").read_text(),
    TWO_DRAFTS,
    (PIPELINES / "qwen3_vl_8b_8gpu.toml").read_text(),
]

VALUES = [
    '["' + "x" * 300 + '.py"]',
    '["base.toml", "a\\u0000.py", ""]',
    *("0", "1", "-1", "8.7", "true", '"false"', '""', "[]", "{}", "nan", "-inf", "1e400", "-0.0", "0x10", "1_000"),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[1, 'a', [true]]", "{ a = { b = 1 } }", "[{ a = 1 }]"),
    *('"@ingest"', '"@"', '"@join"', '["@join"]', '["@ingest", 1]', '"@@x"', '[["@ingest"]]', '{ a = "@ingest" }'),
    *('"${env:FUZZ_NAME}"', '"${env:FUZZ_MISSING}"', '"${secret:FUZZ_KEY}"', '"${env:FUZZ_NO_TOKEN}"', '"$${x}"'),
    *('"${ingest.seed}"', '"${join.share}"', '"${join.most}"', '"${"', '"${}"', '"${a.b.c}"', '"${pipeline.seed}"'),
    *('"x ${join.launch.nproc} y"', '"${ingest.source}"', '"${join.parts}"', '["${join.layers}"]', '"${mlflow.notes}"'),
    *('"${join.weights}"', '"a ${join.layers}"', '"${both.exact}"', '{ k = "${ingest.max_samples}" }'),
    *('"ranks"', '"ray"', '"24 GiB"', '"24 XB"', '"host:99999"', '"host:29500"', '"cpu"', '"auto"', '"1.5 TB"'),
    *('"base.toml"', '"p.toml"', '"missing.toml"', '"fuzz_ops.py"', '["fuzz_ops.py", "p.toml"]', '"/"', '"../.."'),
    *('"join"', '"ingest"', '"inject_images"', '"train_dflash"', '"dflash"', '"capture_targets"', '"owner/name"'),
    *(
        "0x" + "f" * 4000,
        "1" * 400,
        "-" + "9" * 30,
        '"' + "x" * 5000 + '"',
        '"' + "a/" * 3000 + '"',
        "[" * 90 + "]" * 90,
    ),
    *(
        '"\\u0000"',
        '"a\\u0000b"',
        '"\\ud800"',
        '"\\n"',
        '"é/\U0001f600"',
        "'''\nx\n'''",
        '"""\n"""',
        "1 2",
        "= 1",
        "",
        '"open',
    ),
    *('"' + "@ingest" * 400 + '"', '"' + "${" * 300 + '"', "[" + "1," * 3000 + "]", "{ nproc = 2 }", "{ nproc = '2' }"),
]
KEYS = [
    *("op", "source", "samples", "parts", "launch", "launch.nproc", "launch.kind", "launch.sp_degree", "seed", "name"),
    *(
        "launch.memory",
        "launch.timeout",
        "launch.cpus",
        "launch.hosts",
        "launch.shard_workers",
        "launch.retry_wait",
        "ops",
    ),
    *("extends", "for_each", "sweep", "node", "pipeline", "mlflow", "machine", "tags", "notes", "experiment", "cpus"),
    *(
        "memory",
        "gpus",
        "most",
        "share",
        "layers",
        "weights",
        "weights.a",
        "file",
        "exact",
        "max_samples",
        "lr",
        "target",
    ),
    *(
        "join.share",
        "join.launch",
        "join.op",
        "join.parts",
        "ingest.seed",
        "ingest.source",
        "inject.samples",
        "small.join",
    ),
    *(
        "node.join.op",
        "node.x.op",
        "a.b.c.d",
        '""',
        '"a b"',
        '"é"',
        "'1'",
        "1",
        "node.ingest",
        "sweep.join.share",
        "both.parts",
    ),
    *(
        "join.launch.nproc",
        "join.weights",
        "join.weights.a",
        "join.nothing",
        "nobody.share",
        "join",
        "draft.small",
        "x" * 3000,
    ),
    *(
        "tracking_uri",
        "checkpoint",
        "revision",
        "device",
        "tokens",
        "features",
        "text",
        "block_size",
        "mask_token_id",
        "threads",
    ),
]
HEADERS = [
    *(
        "[pipeline]",
        "[mlflow]",
        "[machine]",
        "[node]",
        "[node.new]",
        "[[node.new]]",
        "[[node]]",
        "[sweep]",
        "[for_each]",
    ),
    *(
        "[node.join]",
        "[node.ingest]",
        "[node.join.launch]",
        "[node.join.weights]",
        "[[node.join.parts]]",
        "[node.pipeline]",
    ),
    *("[for_each.draft]", "[for_each.draft.third]", "[for_each.draft.third.join]", "[for_each.draft.third.ingest]"),
    *(
        "[for_each.other.a]",
        "[[for_each]]",
        "[[for_each.draft.third]]",
        "[for_each.'x y'.z]",
        "[sweep.ingest]",
        "[mlflow.tags]",
    ),
    *(
        '[node."a b"]',
        "[node.'']",
        '[node."é"]',
        "[node.both.launch.deep]",
        "[x]",
        "[",
        "[]",
        "[node.join",
        "[[machine]]",
    ),
    "[" + ".".join("abc"[k % 3] for k in range(3000)) + "]",
    "[node.join.weights." + ".".join("k" * 1500) + "]",
    "[sweep.join." + ".".join("k" * 1500) + "]\nz = [1]",
]
ODD = [
    *"\"'[]{}=.,#\\\n\r\t @$-_0aé\u2028\ufeff\U0001f600",
    "\x00",
    "\x07",
    "\x7f",
    "\udcff",
    "\udc80",
    "'''",
    '"""',
    "\r\n",
]

Mutation = Callable[[str, int, int], str]
ASSIGNMENT = re.compile(r"^(\s*)([^=\n\[\]#]+?)(\s*=\s*)(.*)$", re.MULTILINE)


def _lines(text: str) -> list[str]:
    return text.split("\n")


def _drop(text: str, a: int, b: int) -> str:
    lines = _lines(text)
    start = a % len(lines)
    return "\n".join(lines[:start] + lines[start + 1 + b % 3 :])


def _double(text: str, a: int, b: int) -> str:
    lines = _lines(text)
    here, there = a % len(lines), b % (len(lines) + 1)
    return "\n".join([*lines[:there], lines[here], *lines[there:]])


def _swap(text: str, a: int, b: int) -> str:
    lines = _lines(text)
    here, there = a % len(lines), b % len(lines)
    lines[here], lines[there] = lines[there], lines[here]
    return "\n".join(lines)


def _cut(text: str, a: int, b: int) -> str:
    return text[: a % (len(text) + 1)] if b % 4 == 0 else text


def _odd(text: str, a: int, b: int) -> str:
    at = a % (len(text) + 1)
    return text[:at] + ODD[b % len(ODD)] + text[at + b % 2 :]


def _other_value(text: str, a: int, b: int) -> str:
    found = list(ASSIGNMENT.finditer(text))
    if not found:
        return text
    place = found[a % len(found)]
    return text[: place.start(4)] + VALUES[b % len(VALUES)] + text[place.end(4) :]


def _other_key(text: str, a: int, b: int) -> str:
    found = list(ASSIGNMENT.finditer(text))
    if not found:
        return text
    place = found[a % len(found)]
    return text[: place.start(2)] + KEYS[b % len(KEYS)] + text[place.end(2) :]


def _new_pair(text: str, a: int, b: int) -> str:
    lines = _lines(text)
    at = a % (len(lines) + 1)
    pair = f"{KEYS[b % len(KEYS)]} = {VALUES[b // len(KEYS) % len(VALUES)]}"
    return "\n".join([*lines[:at], pair, *lines[at:]])


def _new_header(text: str, a: int, b: int) -> str:
    lines = _lines(text)
    at = a % (len(lines) + 1)
    return "\n".join([*lines[:at], HEADERS[b % len(HEADERS)], *lines[at:]])


def _other_header(text: str, a: int, b: int) -> str:
    found = list(re.finditer(r"^\[.*$", text, re.MULTILINE))
    if not found:
        return text
    place = found[a % len(found)]
    return text[: place.start()] + HEADERS[b % len(HEADERS)] + text[place.end() :]


def _respelled(text: str, a: int, b: int) -> str:
    ways = [lambda: text.replace("\n", "\r\n"), lambda: "\ufeff" + text, lambda: text.replace(" = ", "\t=\t")]
    return ways[b % 3]() if a % 4 == 0 else text


MUTATIONS: Sequence[Mutation] = (
    *(_other_value, _other_value, _other_value, _new_pair, _new_pair, _other_key, _new_header, _other_header),
    *(_drop, _double, _swap, _cut, _odd, _respelled),
)


@frozen
class Broken:
    """A pipeline to read: the bytes of its file, a file that it may extend, and the command line."""

    text: str
    base: str
    overrides: tuple[str, ...]
    sweeps: tuple[str, ...]

    def outcome(self, folder: Path) -> tuple[Finding, ...]:
        """The mistakes that reading the pipeline reports; none if it compiles. Any other error is raised."""
        for name, text in {**FOLDER_FILES, "base.toml": self.base, "p.toml": self.text}.items():
            (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        try:
            read_graph(folder / "p.toml", self.overrides, self.sweeps)
        except PipelineError as error:
            assert error.mistakes
            return error.mistakes
        return ()


numbers = st.integers(0, 2**20)
steps = st.lists(st.tuples(st.sampled_from(range(len(MUTATIONS))), numbers, numbers), max_size=5)
bare = st.sampled_from(VALUES).map(lambda value: value.strip('"'))
arguments = st.one_of(
    st.builds("{}={}".format, st.sampled_from(KEYS).map(lambda key: key if "." in key else f"join.{key}"), bare),
    st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(VALUES)),
    st.lists(st.sampled_from([*ODD[:20], "join.", "=", "share", "[1]"]), max_size=8).map("".join),
)


@st.composite
def broken_pipelines(draw: Callable[[st.SearchStrategy], object]) -> Broken:
    start = STARTS[draw(st.sampled_from(range(len(STARTS))))]
    text = _mutated(start, draw(steps))
    base = _mutated(BASE, draw(steps)) if draw(st.integers(0, 4)) == 0 else BASE
    overrides = tuple(draw(st.lists(arguments, max_size=2)))
    sweeps = tuple(draw(st.lists(arguments, max_size=1))) if draw(st.integers(0, 3)) == 0 else ()
    return Broken(text, base, overrides, sweeps)


def _mutated(text: str, mutations: Sequence[tuple[int, int, int]]) -> str:
    for kind, a, b in mutations:
        text = MUTATIONS[kind](text, a, b)
    return text


def wrong_place(mistake: Finding, folder: Path) -> str:
    """A text on what is wrong with a mistake's place; "" if the place is found in a file or on the command line."""
    position = mistake.position
    if position is None:
        return "no place"
    if position.is_argument:
        return "" if position.file.startswith(("-s ", "--sweep ")) else "no argument"
    file = Path(position.file)
    if file.parent != folder or not file.exists():
        return "no such file"
    lines = re.split(rb"\r?\n", file.read_bytes())
    if position.line == 0:
        return "no line" if position.column == 0 and "not TOML" not in mistake.what else ""
    if position.line > len(lines) or position.column > len(lines[position.line - 1]) + 1 or position.column < 1:
        return "outside the file"
    return ""
