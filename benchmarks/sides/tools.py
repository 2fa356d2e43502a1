"""dflow, doit and DVC on the same chains: their files in a folder, and their commands.

A node of dflow and of DVC runs in a separate process. A node of doit's chains is a function call in doit's process, as
in its manual; its large file is written by a process. dflow's runs are tracked in MLflow, the others track nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.harness import ROOT

FILES = Path(__file__).parent / "chain"


@dataclass(frozen=True)
class Mistake:
    """A mistake in a file: a word that a message about it must contain, and its line."""

    word: str
    line: int


@dataclass(frozen=True)
class Tool:
    """A tool and the interpreter that has it."""

    python: Path
    name: ClassVar[str]
    run: ClassVar[tuple[str, ...]]
    dry: ClassVar[tuple[str, ...]]
    check: ClassVar[tuple[str, ...]]
    says: ClassVar[Mapping[str, str]]  # the states of the node {} in a dry run: word, pattern
    mistaken: ClassVar[tuple[str, str]]  # file, text with three mistakes
    mistakes: ClassVar[tuple[Mistake, ...]]

    def make(self, folder: Path) -> None:
        """A folder with the code of the nodes."""
        folder.mkdir(parents=True)
        for file in ("work.py", "helper.py"):
            shutil.copy(FILES / file, folder)

    def write_chain(self, folder: Path, values: Sequence[str], seconds: float = 0.0) -> None:
        """Nodes n0, n1, ..., each of which adds its value to the text of the one before."""
        raise NotImplementedError

    def write_large(self, folder: Path, megabytes: int) -> None:
        """A node that makes a large file from input.txt."""
        raise NotImplementedError

    def write_mistakes(self, folder: Path) -> None:
        (folder / self.mistaken[0]).write_text(self.mistaken[1])

    def predicted(self, output: str, *nodes: str) -> str:
        """The state of each node in the output of a dry run."""
        words = [
            [word for word, how in self.says.items() if re.search(how.format(node), output, re.M)] for node in nodes
        ]
        return ", ".join(" and ".join(found) or "nothing" for found in words)

    def large_file(self, folder: Path) -> Path:
        """The large file of the latest run."""
        return folder / "large.txt"


class Ours(Tool):
    """dflow."""

    name = "ours"
    run = ("-m", "executor.cli", "run", "pipeline.toml", "--store", "runs")
    dry = ("-m", "executor.cli", "plan", "pipeline.toml", "--store", "runs")
    check = dry
    says: ClassVar[Mapping[str, str]] = {
        "runs": "^{} .* runs ",
        "may be cut off": "^{} .* may be cut off ",
        "cached": "^{} .* cached ",
    }
    mistaken = (
        "pipeline.toml",
        '[pipeline]\nname = "x"\nops = ["chain_ops.py"]\n[node.a]\nop = "append"\nseconds = "soon"\n'
        '[node.b]\nop = "append"\nvalu = "b"\n[node.c]\nop = "append"\nbefore = "@nobody"\n',
    )
    mistakes = (Mistake("seconds", 6), Mistake("valu", 9), Mistake("nobody", 12))

    def make(self, folder: Path) -> None:
        super().make(folder)
        shutil.copy(FILES / "chain_ops.py", folder)

    def write_chain(self, folder: Path, values: Sequence[str], seconds: float = 0.0) -> None:
        nodes = []
        for index, value in enumerate(values):
            before = f'before = "@n{index - 1}"\n' if index else ""
            config = f'name = "n{index}"\nvalue = "{value}"\nseconds = {float(seconds)}\n'
            nodes.append(f'[node.n{index}]\nop = "append"\n{before}{config}')
        self._write(folder, nodes)

    def write_large(self, folder: Path, megabytes: int) -> None:
        self._write(folder, [f'[node.large]\nop = "large"\nsource = "input.txt"\nmegabytes = {megabytes}\n'])

    def _write(self, folder: Path, nodes: Sequence[str]) -> None:
        head = '[pipeline]\nname = "chain"\nops = ["chain_ops.py"]\n\n'
        (folder / "pipeline.toml").write_text(head + "\n".join(nodes))

    def large_file(self, folder: Path) -> Path:
        newest = max((folder / "runs" / "records").iterdir())
        lines = [json.loads(line) for line in (newest / "events.jsonl").read_text().splitlines()]
        digest = [line["digest"] for line in lines if line["node"] == "large" and "digest" in line][-1]
        return folder / "runs" / "objects" / str(digest) / "text.txt"


class Doit(Tool):
    """doit, its tasks read by dodo.py from chain.json."""

    name = "doit"
    run = ("-m", "doit")
    dry = ("-m", "doit", "list", "--all", "--status")
    check = ("-m", "doit")
    says: ClassVar[Mapping[str, str]] = {"runs": r"^R +chain:{}\b", "up to date": r"^U +chain:{}\b"}
    mistaken = (
        "dodo.py",
        'def task_a():\n    return {"actions": [],\n            "seconds": 1}\n\n\n'
        'def task_b():\n    return {"actions": [],\n            "valu": 1}\n\n\n'
        'def task_c():\n    return {"actions": [],\n            "task_dep": ["nobody"]}\n',
    )
    mistakes = (Mistake("seconds", 3), Mistake("valu", 8), Mistake("nobody", 13))

    def make(self, folder: Path) -> None:
        super().make(folder)
        shutil.copy(FILES / "dodo.py", folder)

    def write_chain(self, folder: Path, values: Sequence[str], seconds: float = 0.0) -> None:
        (folder / "chain.json").write_text(json.dumps({"values": list(values), "seconds": seconds, "large": []}))

    def write_large(self, folder: Path, megabytes: int) -> None:
        (folder / "chain.json").write_text(json.dumps({"values": [], "large": [megabytes]}))


class Dvc(Tool):
    """DVC without Git, its stages in dvc.yaml; they list the files with code among what they depend on."""

    name = "DVC"
    run = ("-m", "dvc", "repro")
    dry = ("-m", "dvc", "repro", "--dry")
    check = run
    says: ClassVar[Mapping[str, str]] = {"runs": "Running stage '{}'", "didn't change": "Stage '{}' didn't change"}
    mistaken = (
        "dvc.yaml",
        "stages:\n  a:\n    cmd: echo a\n    seconds: soon\n  b:\n    cmd: echo b\n    valu: b\n"
        "  c:\n    cmd: echo c\n    deps:\n    - nobody\n",
    )
    mistakes = (Mistake("seconds", 4), Mistake("valu", 7), Mistake("nobody", 11))

    def make(self, folder: Path) -> None:
        super().make(folder)
        init = [str(self.python), "-m", "dvc", "init", "--no-scm", "--quiet"]
        subprocess.run(init, cwd=folder, env=environment(), check=True)

    def write_chain(self, folder: Path, values: Sequence[str], seconds: float = 0.0) -> None:
        stages: dict[str, object] = {}
        for index, value in enumerate(values):
            before = [f"n{index - 1}.txt"] if index else []
            command = [str(self.python), "work.py", "append", f"n{index}", f"n{index}.txt", f"'{value}'", str(seconds)]
            stages[f"n{index}"] = {
                "cmd": " ".join([*command, *before]),
                "deps": ["work.py", "helper.py", *before],
                "outs": [f"n{index}.txt"],
            }
        self._write(folder, stages)

    def write_large(self, folder: Path, megabytes: int) -> None:
        command = f"{self.python} work.py large large.txt input.txt {megabytes}"
        deps = ["work.py", "helper.py", "input.txt"]
        self._write(folder, {"large": {"cmd": command, "deps": deps, "outs": ["large.txt"]}})

    def _write(self, folder: Path, stages: dict[str, object]) -> None:
        (folder / "dvc.yaml").write_text(json.dumps({"stages": stages}))  # JSON is YAML


def found_tools(peers_python: Path | None) -> tuple[list[Tool], list[str]]:
    """dflow and the installed peers, and a message for each that is missing."""
    tools: list[Tool] = [Ours(Path(sys.executable))]
    missing = []
    for peer, module in ((Doit, "doit"), (Dvc, "dvc")):
        python = peers_python or Path(sys.executable)
        if _has(python, module):
            tools.append(peer(python))
        else:
            missing.append(f"{peer.name} is not installed in {python}: its column is omitted")
    return tools, missing


def _has(python: Path, module: str) -> bool:
    if python == Path(sys.executable):
        return importlib.util.find_spec(module) is not None
    if not python.exists():
        return False
    return not subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, check=False).returncode


def environment() -> dict[str, str]:
    """This environment, in which dflow can be imported and nothing is sent over the network.

    Python may write its bytecode: dflow runs from a checkout, its peers from packages that pip compiled.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MLFLOW_") and name != "PYTHONDONTWRITEBYTECODE"
    }
    return {**kept, "PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "1", "COLUMNS": "200"}
