"""Runs whose reports have a bit of everything: ops that count samples, and show or fail in every way."""

from __future__ import annotations

import base64
from pathlib import Path

from report_page import Page
from toy_ops import Toy

EVIL = "<script>alert(1)</script> & \"quoted\" 'too' ]]> </td>"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

# Ops in a second file: each shows something else, or fails in another way.
SHOWS = """
import json, os, subprocess, sys, time
from pathlib import Path
from attrs import frozen
from dsl.op import Artifact, field, op
from ops.lib.report_sections import Account, Html, Picture, Section, Table, variants


@frozen
class Counted(Artifact):
    '''kept.txt'''


@op(version=1, run="shows:keep")
@frozen(kw_only=True)
class Keep:
    '''Keeps some samples.'''
    samples: Counted | None = None
    came_in: int = field(default=10, help="samples")
    kept: int = field(default=10, help="of them")
    lost: int = field(default=0, help="counted by nobody")
    text: str = field(default="", help="a text of unknown origin")
    fails: str = field(default="", help="how the report of it fails")
    output = Counted

    @staticmethod
    def report(folder):
        return kept(folder)

    @staticmethod
    def compare(artifacts):
        counts = [(one.folder / "kept.txt").read_text().split()[1] for one in artifacts]
        if "13" in counts:
            raise ValueError("an unlucky number")
        names = [variant.name for variant in variants(artifacts)]
        rows = [(json.dumps(dict(one.values)), count) for one, count in zip(artifacts, counts)]
        yield Section("kept by each", Table(("values", "kept"), rows), "variants: " + " | ".join(names))


def keep(config, stage):
    counts = f"{config.came_in} {config.kept} {config.lost}"
    (stage.out_dir / "kept.txt").write_text("\\n".join([counts, config.fails, config.text]))
    (stage.out_dir / "pixel.png").write_bytes(bytes.fromhex(PIXEL))
    stage.warn(config.text or "careful")
    for step in range(1, 4):
        bounds = {"val/tau_low": step - 1, "val/tau_high": step + 1}
        stage.log({"train/loss": 1.0 / step, "val/tau": step} | bounds, step=step)
    slots = {f"eval/slot_{slot:02d}": 1 / slot for slot in range(1, 4)} | {"eval/kept": config.kept}
    stage.log(slots | {"eval/tau": 2.0, "eval/tau_low": 1.5, "eval/tau_high": 2.5}, step=3)


def kept(folder):
    counts, fails, text = (folder / "kept.txt").read_text().split("\\n")
    came_in, kept, lost = map(int, counts.split())
    print("noise on standard output")
    if fails == "raises":
        raise KeyError("no such thing as " + text)
    if fails == "exits":
        sys.exit(3)
    if fails == "kills":
        os.kill(os.getpid(), 9)
    if fails == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder.parents[1] / "child").write_text(str(child.pid))
        time.sleep(600)
    return {"number": [Section("odd", 12)], "list": ["no section"]}.get(fails) or shown(came_in, kept, lost, text)


def shown(came_in, kept, lost, text):
    dropped = {"too long" + text: came_in - kept - lost}
    yield Section("samples", Account(came_in=came_in, kept={"train": kept}, dropped=dropped))
    yield Section("a table" + text, Table(("name" + text, "value"), [(text, 0.000123456), ("none", None)]), note=text)
    yield Section("facts", Table(("", ""), [("kept", kept), ("of", came_in)]))
    yield Section("a page", Html("<p>page of " + str(kept) + "</p>" + "x" * PAD))
    yield Section("a picture", Picture(Path("pixel.png"), "a pixel" + text))
"""

PIPELINE = """
[pipeline]
name = "counts"
ops = ["shows.py"]

[node.source]
op = "keep"
came_in = 12
kept = 10

[node.filter]
op = "keep"
samples = "@source"
kept = 7
"""


def report(toy: Toy, *arguments: str) -> Page:
    """Run `dflow report`, and read the page that it writes."""
    result = toy.dflow("report", *arguments)
    assert 0 == result.returncode, result.stderr
    return Page.read(Path(result.stdout.strip()))


def counting(folder: Path, pipeline: str = PIPELINE, pad: int = 0) -> Toy:
    (folder / "shows.py").write_text(f'PAD = {pad}\nPIXEL = "{PIXEL.hex()}"\n{SHOWS}')
    return Toy(folder, pipeline)


def run(toy: Toy, *overrides: str, expected: int = 0) -> str:
    result = toy.dflow("run", str(toy.file), *overrides)
    assert expected == result.returncode, result.stderr
    name: str = toy.state()["run"]
    return name


def runs_of(toy: Toy) -> list[str]:
    return sorted(folder.name for folder in (toy.store / "records").iterdir())
