"""`dflow doctor`: what works here is told, what does not with what to do, and only what stops dflow is a failure."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from io import StringIO
from pathlib import Path
from threading import Thread

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from torch._inductor import config as inductor
from toy_ops import is_alive, wait_for

from dsl.finding import Finding
from executor.cli import main
from executor.commands import doctor
from executor.doctor import cluster, machine
from executor.doctor import store as doctor_store
from executor.doctor.machine import declared, host_findings, loaded_findings, version_findings
from executor.doctor.probe import compile_fault_on
from executor.doctor.store import storage_findings, tracking_findings
from executor.keys.node_key import NOT_INSTALLED, LibraryVersions
from executor.launchers.hosts import HostFacts, host_facts
from executor.store.artifact_store import Store
from executor.store.lease import Lease
from executor.system.progress import PLAIN_S, Activity
from executor.tracking.mlflow_client import open_client

ROOT = Path(__file__).resolve().parents[3]


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings}


def test_the_probes_of_a_doctor_that_is_killed_end_with_it():
    program = (
        "from executor.doctor.machine import start_probes; import time\n"
        "print(*(probe.pid for probe in start_probes().values()), flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as doctor_process:
        assert doctor_process.stdout is not None
        probes = list(map(int, doctor_process.stdout.readline().split()))
        assert len(probes) >= 2
        try:
            for probe in probes:
                wait_for(lambda pid=probe: "/torch/" in Path(f"/proc/{pid}/maps").read_text() or not is_alive(pid))
                os.kill(probe, signal.SIGSTOP)  # so that none ends by itself
            doctor_process.kill()
            wait_for(lambda: not any(map(is_alive, probes)))
        finally:
            doctor_process.kill()
            for probe in filter(is_alive, probes):
                os.kill(probe, signal.SIGKILL)


@pytest.mark.parametrize(
    ("bounds", "version", "level"),
    [
        (">=2.11,<2.15", "2.13.0+cpu", "good"),
        (">=2.11,<2.15", "2.15.0", "warning"),
        (">=2.11,<2.15", "2.9", "warning"),
        (">=2.11,<2.15", "2.12.0rc1", "good"),
        (">=0.5.21,<=0.5.23,!=0.5.22.*", "0.5.23", "good"),
        (">=0.5.21,<=0.5.23,!=0.5.22.*", "0.5.22.post1", "warning"),
        (">=0.5.21,<=0.5.23,!=0.5.22.*", "0.5.24", "warning"),
        (">=11", "11", "good"),
        ("", "0.1", "good"),
    ],
)
def test_versions_are_compared_as_pip_compares_them(
    monkeypatch: pytest.MonkeyPatch, bounds: str, version: str, level: str
) -> None:
    required = {"": [], "sglang": [Requirement(f"x{bounds}")], "datasets": [], "ray": []}
    monkeypatch.setattr(machine, "declared", lambda: (SpecifierSet(">=3.11"), required))
    monkeypatch.setattr(machine, "LibraryVersions", lambda: LibraryVersions({"x": version}))
    assert level == by_name(version_findings())["x"].level


def test_what_is_declared_is_read_from_pyproject() -> None:
    python, required = declared()
    assert ">=3.11" == str(python)
    assert ["sglang"] == [each.name for each in required["sglang"]]
    assert [SpecifierSet(">=2.11,<2.15")] == [each.specifier for each in required[""] if each.name == "torch"]


def test_what_is_declared_is_read_from_the_installed_distribution_where_there_is_no_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requires = ["torch>=2.11,<2.15", 'sglang<=0.5.23,>=0.5.21; extra == "sglang"', 'ruff; extra == "dev"']
    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    expected = {"": [Requirement("torch>=2.11,<2.15")], "sglang": [Requirement(requires[1])], "datasets": [], "ray": []}
    assert (SpecifierSet(">=3.11"), expected) == declared()


def test_a_library_that_is_missing_stops_dflow_and_an_extra_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = LibraryVersions({"transformers": NOT_INSTALLED, "mlflow": "2.0", "sglang": NOT_INSTALLED})
    monkeypatch.setattr(machine, "LibraryVersions", lambda: versions)
    found = by_name(version_findings())
    assert "fatal" == found["transformers"].level
    assert "warning" == found["mlflow"].level
    assert "error" == found["sglang"].level
    assert "pip install" in found["transformers"].advice and "'.[sglang]'" in found["sglang"].advice


def probe(says: str) -> dict[str, subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    return {"torch": subprocess.Popen([sys.executable, "-c", says], stdout=pipe, stderr=pipe, text=True)}


def test_a_torch_that_breaks_is_a_finding_and_no_crash() -> None:
    found = by_name(loaded_findings(probe("raise ImportError('libcudart.so.13: cannot open shared object file')")))
    assert "fatal" == found["torch"].level
    assert "ImportError: libcudart.so.13: cannot open shared object file" in found["torch"].what
    found = by_name(loaded_findings(probe("import os; os.abort()")))
    assert "ended with -6" in found["torch"].what


@pytest.mark.parametrize(
    ("facts", "gpus", "level", "told"),
    [
        ({"cuda": None}, (), "warning", "everything runs on the CPU"),
        ({"cuda": None}, ("0", "1"), "error", "2 found, but this torch is built for CPUs"),
        ({"cuda": "13.0", "warnings": ["The NVIDIA driver is too old"]}, ("0",), "error", "driver is too old"),
        ({"cuda": "13.0", "gpus": ["H200"], "memory": [141_000_000_000]}, ("0",), "good", "1 x H200, 141.0 GB"),
        (
            {"cuda": "13.0", "gpus": ["K80"], "memory": [12_000_000_000], "fault": "no kernel image"},
            ("0",),
            "error",
            "no kernel",
        ),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], gpus: tuple[str, ...], level: str, told: str
) -> None:
    monkeypatch.setattr(machine, "devices", lambda: gpus)
    whole = {"version": "2.13.0", "gpus": [], "memory": [], "warnings": [], "fault": "", "compile_fault": "", **facts}
    found = by_name(loaded_findings(probe(f"print({json.dumps(whole)!r})")))
    assert "good" == found["torch"].level
    assert level == found["GPU"].level and told in found["GPU"].what


def test_a_gpu_that_nothing_can_be_compiled_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "devices", lambda: ("0",))
    whole = {"version": "2.11.0", "cuda": "13.0", "gpus": ["H200"], "memory": [141_000_000_000]}
    for fault, level in (("", "good"), ("ModuleNotFoundError: No module named 'triton'", "error")):
        found = by_name(loaded_findings(probe(f"print({json.dumps(whole | {'compile_fault': fault})!r})")))
        assert (level, "good") == (found["torch.compile"].level, found["GPU"].level)
        assert fault in found["torch.compile"].what


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_the_probe_compiles_and_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with inductor.patch({"cpp.cxx": ("/no/such/compiler",)}):
        assert "InvalidCxxCompiler" in compile_fault_on("cpu")
    assert [] == list(tmp_path.iterdir())


def test_a_torchvision_that_does_not_fit_is_named_as_the_cause() -> None:
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    found = by_name(loaded_findings({"torchvision": probe(broken)["torch"]}))
    assert "error" == found["torchvision"].level and "uninstall it" in found["torchvision"].advice
    assert "torchvision::nms" in found["torchvision"].what


def test_a_store_tells_who_works_in_it_and_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    assert "does not exist yet" in by_name(storage_findings(path))["store"].what
    store = Store.open(path, write=True)
    folder = path / "objects" / ("a" * 64)
    folder.mkdir()
    files = {"data.bin": {"size": 7, "sha256": "0" * 64}}
    (folder / "manifest.json").write_text(json.dumps({"digest": "a" * 64, "files": files}))
    with Lease(store.path / "work" / ("b" * 64), "run-1") as lease:
        assert lease.try_acquire()
        found = by_name(storage_findings(path))
    assert "1 artifacts" in found["store"].what and "good" == found["file system"].level
    assert "run run-1 works on bbbbbbbbbbbb" in found["lease"].what
    assert "1 are damaged" in found["artifacts"].what
    assert {"format", ".id"} == {file.name for file in path.iterdir() if file.is_file()} - {
        "gc.lock"
    }  # nothing is left


def test_another_hosts_lease_is_told(tmp_path: Path) -> None:
    Store.open(tmp_path / "runs", write=True)
    folder = tmp_path / "runs" / "work" / ("c" * 64)
    folder.mkdir()
    (folder / "lease").write_text(json.dumps({"host": "far-away", "run": "run-2", "pid": 1}))
    found = by_name(storage_findings(tmp_path / "runs"))["lease"]
    assert "warning" == found.level and "far-away (run run-2)" in found.what and str(folder / "lease") in found.advice


def test_a_store_that_cannot_be_used_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "format").write_text("99")
    assert "fatal" == by_name(storage_findings(tmp_path))["store"].level
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    found = by_name(storage_findings(tmp_path / "other"))["file system"]
    assert "fatal" == found.level and "locks (flock) are not exclusive" in found.what


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_the_state_of_mlflows_database_is_told_without_loading_mlflow(tmp_path: Path) -> None:
    (absent,) = tracking_findings(tmp_path, None)
    assert "does not exist yet" in absent.what
    open_client(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    (fresh,) = tracking_findings(tmp_path, None)
    assert ("good", "installed version") == (fresh.level, fresh.what[-len("installed version") :])
    known, newest = doctor_store._revisions()
    older = min(known - newest)
    for revision, told in ((older, "older version"), ("ffffffffffff", "newer MLflow")):
        with sqlite3.connect(tmp_path / "mlflow.db") as opened:
            opened.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        opened.close()
        (found,) = tracking_findings(tmp_path, None)
        assert "warning" == found.level and told in found.what
    (tmp_path / "mlflow.db").write_text("no database at all, of any kind")
    (broken,) = tracking_findings(tmp_path, None)
    assert "not an MLflow database" in broken.what


def test_a_tracking_server_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.doctor.store.ANSWER_S", 120.0)

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        (up,) = tracking_findings(tmp_path, f"http://me:secret@127.0.0.1:{port}")
    finally:
        server.shutdown()
        server.server_close()
    assert "good" == up.level and "secret" not in up.what
    (away,) = tracking_findings(tmp_path, f"http://127.0.0.1:{port}")
    assert "warning" == away.level and "dflow sync" in away.advice


def test_limits_of_the_operating_system_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (256, 4096))
    monkeypatch.setattr(machine, "SHARED", tmp_path / "no")
    monkeypatch.setattr(machine, "compiled_sweep", lambda: ("no C compiler", None))
    found = by_name(host_findings())
    assert ("warning", "ulimit -n 1024") == (found["open files"].level, found["open files"].advice)
    assert "warning" == found["shared memory"].level
    assert "error" == found["C compiler"].level


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("tracking_uri = 'http://127.0.0.1:9'", "http://127.0.0.1:9 cannot be reached"),
        ("tags = 3", "mlflow.db: does not exist yet"),
        ("tracking_uri = 'http://${secret:DFLOW_NOT_SET}'", "not checked: its settings in "),
        ("tracking_uri = 3", "not checked: its settings in "),
        ("tracking_uri = [", "not checked: its settings in "),
    ],
)
def test_a_file_with_mistakes_is_told_beside_all_that_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], written: str, told: str
) -> None:
    monkeypatch.setattr(doctor, "start_probes", dict)
    file = tmp_path / "p.toml"
    node = "[node.t]\nop = 'load_target'\ncheckpoint = 'FILL IN: the directory'\n"
    file.write_text(f"pipeline = {{ name = 'p' }}\n{node}[mlflow]\n{written}\n")
    assert 2 == main(["doctor", str(file), "--json", "--store", str(tmp_path / "runs")])
    found = json.loads(capsys.readouterr().out)["findings"]
    mistakes = [f"{each.get('field')}: {each['what']}" for each in found if each["code"] == "pipeline"]
    assert ("= [" in written) == any("not TOML" in mistake for mistake in mistakes)
    assert ("= [" not in written) == any(
        "node.t.checkpoint: still to be filled in: the directory" in mistake for mistake in mistakes
    )
    assert [True] == [told in each["what"] for each in found if each["code"] == "MLflow"]
    assert {"Python", "store", "disk", "machine"} <= {each["code"] for each in found}


def test_a_file_without_mistakes_has_no_finding_and_one_that_is_not_there_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "start_probes", dict)
    assert 0 == main(["doctor", str(ROOT / "pipelines" / "tiny.toml"), "--store", str(tmp_path / "runs")])
    assert "pipeline:" not in capsys.readouterr().out
    assert 2 == main(["doctor", str(tmp_path / "none.toml")])
    assert "there is no pipeline file" in capsys.readouterr().err


def test_on_a_terminal_what_is_looked_at_stands_below_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    shown = StringIO()
    with Activity(Console(file=shown, force_terminal=True, width=100)) as activity:
        activity.status("checking the [store]")
        activity.show("ok  store: here")
    assert "checking the [store]" in shown.getvalue()
    said = capsys.readouterr()
    assert ("ok  store: here\n", "") == (said.out, said.err)


def test_details_are_shown_at_once_on_a_terminal_and_seldom_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = StringIO()
    with Activity(Console(file=shown, force_terminal=True, width=100)) as activity:
        activity.detail("measuring: layers")
    assert "measuring: layers" in shown.getvalue()
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Activity(Console(file=StringIO())) as activity:
        activity.status("measuring")
        activity.detail("measuring: layers")
        now += PLAIN_S
        activity.detail("measuring: padding")
        activity.detail("measuring: speculation")
    assert ["measuring", "measuring: padding"] == capsys.readouterr().err.splitlines()


def test_the_whole_is_told_as_json_and_ends_with_0_here(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "executor.cli", "doctor", "--json", "--store", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert ["checking this machine", "checking the store", "checking torch, transformers"] == [
        re.match("checking (this machine|the store|torch, transformers)", line)[0]  # type: ignore[index]
        for line in done.stderr.splitlines()
    ]
    told = json.loads(done.stdout)
    names = {finding["code"] for finding in told["findings"]}
    assert told["runs"] and {"Python", "torch", "transformers", "GPU", "store", "MLflow", "disk", "sglang"} <= names
    assert not (tmp_path / "runs").exists()


def test_what_differs_between_the_hosts_of_a_cluster_and_this_one_is_found(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    here = host_facts("here")
    same = attrs.evolve(here, name="a")
    [fine] = cluster.host_findings((same, same), tmp_path, tmp_path)
    assert (fine.code, fine.level) == ("hosts", "good")
    blind = attrs.evolve(here, name="b", unseen=(f"{tmp_path}/.dflow-doctor-x", "/data"))
    old = attrs.evolve(here, name="c", sources="other", python="3.1.0", ray="2.0.0")
    gone = HostFacts(name="d", problem="no report within 30 s")
    found = list(cluster.host_findings((same, blind, old, gone), tmp_path, Path("/data")))
    assert [(each.code, each.what) for each in found] == [
        ("host b", f"does not see {tmp_path}"),
        ("host b", "does not see /data"),
        ("host c", "runs another dflow than this machine"),
        ("host c", f"runs Python 3.1.0, and this machine {here.python}"),
        ("host c", f"runs Ray 2.0.0, and this machine {here.ray}"),
        ("host d", "cannot run dflow: no report within 30 s"),
    ]
    assert all(each.level == "error" and each.advice for each in found)


def test_a_cluster_that_cannot_be_reached_is_a_finding(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    [found] = cluster.cluster_findings("127.0.0.1:1", tmp_path / "runs", tmp_path, accepts_open=False)
    message = "the Ray cluster 127.0.0.1:1 cannot be reached: nothing answers there"
    assert (found.code, found.level, found.what) == ("cluster 127.0.0.1:1", "error", message)
    assert list(tmp_path.iterdir()) == []
