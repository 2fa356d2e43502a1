"""The whole chain through the command line, on pipelines/tiny.toml: run, cache, override, resume, kill -9."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from eagle3_cases import V, eagle3_folder
from mtp_cases import mtp_checkpoint
from report_page import Page
from toy_ops import is_alive, wait_for

from dsl.errors import DflowError
from executor.records.run_record import Record
from executor.system.trust import trust_store
from executor.tune.winner import check_writable

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "pipelines" / "tiny.toml"
NODES = ["ingest", "inject", "tokenize", "target", "capture", "shard", "train", "export", "eval", "check"]
TWO_RANKS = ["-s", "train.launch.kind=ranks", "-s", "train.launch.nproc=2", "-s", "train.launch.sp_degree=2"]


def command(store: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "executor.cli", *arguments, "--store", str(store)]


def dflow(store: Path, *arguments: str) -> str:
    """Run the command to its end; it must succeed."""
    done = subprocess.run(command(store, *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


# dflow by which every file of the ops has another digest than by this one.
OTHER_CODE = """
import sys
from executor.cli import main
from executor.keys.code_memo import CodeDigests, CodeMemo

closure_of = CodeMemo.of
CodeMemo.of = lambda memo, *asked: CodeDigests({file: sha[::-1] for file, sha in closure_of(memo, *asked).items()})
sys.exit(main())
"""


def by_other_code(store: Path, *arguments: str) -> str:
    """Run the command by OTHER_CODE; it must succeed."""
    command = [sys.executable, "-c", OTHER_CODE, *arguments, "--store", str(store)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def newest(store: Path) -> str:
    """The id of the newest run, also where nothing ran in it."""
    return max(folder.name for folder in (store / "records").iterdir())


def newest_of(store: Path, node: str) -> str:
    """The id of the newest run that computed a node."""
    records = [Record.load(folder) for folder in (store / "records").iterdir()]
    return max(record.run for record in records if record.state.nodes[node].cache != "hit")


def rows(store: Path) -> dict[str, dict]:
    return {row["id"]: row for row in json.loads(dflow(store, "status", newest(store), "--json"))["nodes"]}


def executed(store: Path) -> list[str]:
    """The nodes that the newest run computed."""
    return [node_id for node_id, row in rows(store).items() if row["cache"] != "hit"]


def digests(store: Path) -> dict[str, str]:
    return {node_id: row["digest"] for node_id, row in rows(store).items()}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A store in which the tiny pipeline ran once, undisturbed."""
    store = tmp_path_factory.mktemp("whole") / "runs"
    dflow(store, "run", str(TINY))
    return store


@pytest.fixture(scope="module")
def undisturbed(store) -> dict[str, str]:
    return digests(store)


def test_the_chain_runs_to_the_end_and_measures_tau(store, undisturbed):
    report = json.loads((store / "objects" / undisturbed["eval"] / "report.json").read_text())
    assert {"errors": 0, "ties": 0} == report["lossless"]
    assert ["all", "image", "text"] == sorted(report["tau"])
    assert 1.0 <= report["tau"]["all"]["tau"] <= report["block_size"]
    assert NODES == list(undisturbed)
    assert ["README.md", "config.json", "manifest.json", "model.safetensors"] == sorted(
        file.name for file in (store / "objects" / undisturbed["export"]).iterdir()
    )


def test_the_chain_ends_with_a_checked_draft_whose_card_holds_tau(store, undisturbed):
    tau = json.loads((store / "objects" / undisturbed["eval"] / "report.json").read_text())["tau"]["all"]
    checked = store / "objects" / undisturbed["check"]
    assert ["README.md", "config.json", "model.safetensors"] == sorted(
        file.name for file in (checked / "draft").iterdir()
    )
    assert f"| all | {tau['prompts']} | {tau['tau']:.2f} |" in (checked / "draft" / "README.md").read_text()
    assert "passed" == json.loads((checked / "check.json").read_text())["static"]
    shown = dflow(store, "status")
    assert "results of eval" in shown and "results of check" in shown


def test_a_smoke_run_passes_through_the_chain_and_foretells_the_full_one(store, undisturbed, tmp_path):
    out = dflow(tmp_path / "runs", "run", str(TINY), "--smoke", "8")
    assert [] == list((tmp_path / "runs" / "objects").iterdir())
    told = [re.split(r"\s{2,}", line.strip()) for line in out[out.index("the full run, estimated from") :].splitlines()]
    by_node = {cells[0]: cells[1:] for cells in told if len(cells) > 3}
    assert NODES == [node_id for node_id in by_node if node_id in NODES]
    captured = json.loads((store / "objects" / undisturbed["capture"] / "manifest.json").read_text())["files"]
    truth = sum(file["size"] for file in captured.values()) / 1e6
    number, unit = by_node["capture"][2].split()
    assert "MB" == unit
    assert truth / 1.5 <= float(number) <= truth * 1.5
    steps = int(re.search(r"train: about (\d+) steps", out)[1])
    planned = json.loads((store / "objects" / undisturbed["shard"] / "plan.json").read_text())["steps"]
    assert planned / 1.5 <= steps <= planned * 1.5
    plan = ["plan", str(TINY), "-s", "tokenize.expected_tokens=1000000", "--gpus", "1", "--gpu", "cpu", "--json"]
    rates = json.loads(dflow(tmp_path / "runs", *plan))["cost"]["train"]["rates"]
    trial = newest_of(tmp_path / "runs" / "smoke", "train")
    assert f"measured by run {trial}" == rates["train_source"] == rates["capture_source"]


def test_a_plan_computes_the_cost_of_a_training_by_the_rates_that_its_run_reached(store):
    told = json.loads(dflow(store, "plan", str(TINY), "--gpus", "2", "--gpu", "cpu", "--json"))["cost"]["train"]
    record = Record.load(store / "records" / newest_of(store, "train"))
    metrics = record.state.nodes["train"].metrics
    trained = metrics["train/tokens_per_second"] / (1 - metrics["train/wait_share"])
    assert told["rates"]["train"] == pytest.approx(trained)
    assert f"measured by run {record.run}" == told["rates"]["train_source"] == told["rates"]["capture_source"]
    captured = record.state.nodes["capture"]
    assert told["rates"]["capture"] > captured.metrics["capture/tokens"] / captured.seconds
    tokens = json.loads((store / "objects" / digests(store)["tokenize"] / "tokens.json").read_text())["shards"]
    counted = sum(shard["tokens"] for shard in tokens if shard["split"] == "train")
    assert (2 * counted, True) == (told["tokens"], told["is_counted"])  # epochs
    assert told["stored"]["train"]["hours"] >= 2 * counted / told["rates"]["train"] / 2 / 3600


def test_a_run_counts_for_the_kind_of_gpu_that_its_record_names(store, tmp_path):
    shutil.copytree(store, tmp_path / "runs", symlinks=True)
    trust_store(tmp_path / "runs")
    record = Record.load(tmp_path / "runs" / "records" / newest_of(store, "train"))
    record.state.nodes["train"].gpu = "NVIDIA H100 80GB HBM3"
    record.save_node("train")
    plan = ["plan", str(TINY), "--gpus", "1", "--json", "--gpu"]
    rates = {
        gpu: json.loads(dflow(tmp_path / "runs", *plan, gpu))["cost"]["train"]["rates"] for gpu in ("h100", "h100-pcie")
    }
    assert f"measured by run {record.run}" == rates["h100"]["train_source"]
    assert "of 989 TFLOP/s, assumed" in rates["h100"]["capture_source"]
    assert "of 756 TFLOP/s, assumed" in rates["h100-pcie"]["train_source"]


def test_the_report_shows_every_node_and_accounts_for_every_sample(store, undisturbed, tmp_path):
    dflow(store, "report", "-o", str(tmp_path / "report.html"))
    page = Page.read(tmp_path / "report.html")
    assert NODES == [row[0] for row in page.table("pipeline", "node", "op", "state")]
    assert "missing here" not in page.text()
    answers, tau = (
        page.text("answers"),
        json.loads((store / "objects" / undisturbed["eval"] / "report.json").read_text()),
    )
    assert f"{tau['tau']['all']['tau']:.2f} (" in answers and "a random draft" in answers
    for said in ("times as fast as plain decoding", "4 of 4 answers", "the serving directory meets the contract"):
        assert said in answers
    assert "not measured: SGLang has not served it" in answers or "SGLang 0." in answers
    assert "slots right" in answers and "the loss on val was" in answers
    accounts = page.table("samples", "node", "in", "dropped", "kept", "test", "train", "val", "adds up")
    assert ["yes"] * 6 == [row[7] for row in accounts]
    assert ["ingest", "inject", "tokenize", "capture", "shard", "train"] == [row[0] for row in accounts]
    splits = json.loads((store / "objects" / undisturbed["tokenize"] / "summary.json").read_text())["splits"]
    training = json.loads((store / "objects" / undisturbed["train"] / "training.json").read_text())
    assert str(splits["train"]) == str(training["samples_seen"]) == accounts[-1][5]
    assert any("learnt in 1 answer" in frame for frame in page.frames)
    assert {"eval/tau", "eval/tau_image", "eval/tau_text"} <= {
        row[0] for row in page.table("results", "figure", "value")
    }


def test_the_plan_shows_what_ranks_hold_and_what_the_processes_took_last(store):
    planned = json.loads(dflow(store, "plan", str(TINY), "--json", "-s", "train.lr=1e-3"))["resources"]
    assert {"train", "export", "eval", "check"} == {
        name for name, need in planned.items() if need["disk_total"] or need["memory_total"]
    }
    [first] = sorted((store / "records").iterdir())[:1]
    measured = {node_id: node.memory for node_id, node in Record.load(first).state.nodes.items()}
    for node_id in ("train", "eval", "check"):
        held = planned[node_id]["memory_total"]
        assert measured[node_id] == planned[node_id]["memory_measured"]
        assert 0 < held < measured[node_id]


def test_a_second_run_executes_nothing(store, undisturbed):
    out = dflow(store, "run", str(TINY))
    assert [] == executed(store)
    assert undisturbed == digests(store)
    assert "results in MLflow run" in out


def test_another_learning_rate_runs_exactly_train_export_eval_and_check(store, undisturbed):
    planned = json.loads(dflow(store, "plan", str(TINY), "-s", "train.lr=1e-3", "--json"))["nodes"]
    assert {"train": "miss", "export": "maybe", "eval": "maybe", "check": "maybe"} == {
        row["id"]: row["cache"] for row in planned if row["cache"] != "hit"
    }
    assert "train.lr from 0.0006 to 0.001" in next(row["reason"] for row in planned if row["id"] == "train")
    dflow(store, "run", str(TINY), "-s", "train.lr=1e-3", *TWO_RANKS)
    assert ["train", "export", "eval", "check"] == executed(store)


def test_the_launch_of_a_training_is_outside_its_key(store, undisturbed):
    planned = json.loads(dflow(store, "plan", str(TINY), *TWO_RANKS, "--json"))["nodes"]
    assert ["hit"] * len(NODES) == [row["cache"] for row in planned]


def test_a_training_on_two_ranks_that_share_every_sequence_gives_a_draft_that_loses_nothing(store, undisturbed):
    dflow(store, "run", str(TINY), "-s", "train.lr=1e-3", *TWO_RANKS)  # done above, where that test ran
    made = digests(store)
    training = json.loads((store / "objects" / made["train"] / "manifest.json").read_text())
    assert ("ranks", 2, 2) == tuple(training["launch"][name] for name in ("kind", "nproc", "sp_degree"))
    report = json.loads((store / "objects" / made["eval"] / "report.json").read_text())
    assert {"errors": 0, "ties": 0} == report["lossless"]


@pytest.mark.slow
def test_two_ranks_that_share_every_sequence_have_the_losses_of_one_process(store, undisturbed, tmp_path):
    figure = tmp_path / "curves.png"
    command = [sys.executable, "benchmarks/sp_curve.py", "--store", str(store), "--steps", "6", "--figure", str(figure)]
    done = subprocess.run([*command, "--exchange", "gather"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "over 6 steps" in done.stdout.splitlines()[-1]
    assert b"PNG" == figure.read_bytes()[1:4]


def test_resume_from_capture_runs_exactly_capture_and_all_below_it(store, undisturbed):
    dflow(store, "run", str(TINY))
    dflow(store, "resume", newest(store), "--from", "capture")
    assert ["capture", "shard", "train", "export", "eval", "check"] == executed(store)
    assert undisturbed == digests(store)


# A sitecustomize: who gives so many files of a folder a name of the pattern stops there, until it is killed.
STOPS = """
import os, signal
from pathlib import Path

def stopping(move):
    def moved(self, target):
        place = move(self, target)
        if Path(target).match("{pattern}") and len(list(Path(target).parent.glob("{pattern}"))) >= {count}:
            Path(__file__).with_name("stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return place
    return moved

Path.replace, Path.rename, os.link = map(stopping, (Path.replace, Path.rename, os.link))
"""


def kill_at(store: Path, pattern: str, count: int, *arguments: str, seen: Callable[[], None] = lambda: None) -> None:
    """kill -9 of a command and of every process that works on the store, once `count` files of a stage match.

    seen: called meanwhile, again and again.
    """
    place = store.with_name(f"killed by {arguments[0]}")
    place.mkdir()
    (place / "sitecustomize.py").write_text(STOPS.format(pattern=pattern, count=count))
    with (place / "log").open("wb") as output:
        environment = {**os.environ, "PYTHONPATH": str(place)}
        started = subprocess.Popen(command(store, *arguments), cwd=ROOT, stdout=output, stderr=output, env=environment)

    def reached() -> bool:
        seen()
        assert started.poll() is None, "the run ended before the moment to kill it"
        return (place / "stopped").exists()

    wait_for(reached, seconds=500)
    killed = at_work(store)
    for pid in killed:
        with suppress(ProcessLookupError):  # it ended with those before it
            os.kill(pid, signal.SIGKILL)
    started.wait()
    wait_for(lambda: not any(map(is_alive, killed)))


def at_work(store: Path) -> list[int]:
    """The processes whose command line names the store."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended just now
            if int(folder.name) != os.getpid() and str(store).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three runs
def test_a_capture_and_a_training_killed_in_the_middle_end_with_the_same_bytes(tmp_path, undisturbed):
    store = tmp_path / "runs"
    kill_at(store, "train-*.safetensors", 3, "run", str(TINY))
    shards = {file: file.stat().st_mtime_ns for file in store.glob("work/*/state/train-*.safetensors")}
    assert len(shards) >= 3
    assert "capture" == next(node_id for node_id, row in rows(store).items() if row["state"] != "done")
    kept: dict[Path, int] = {}

    def keep() -> None:
        for file in shards:
            with suppress(FileNotFoundError):  # the capture is committed
                kept[file] = file.stat().st_mtime_ns

    kill_at(store, "checkpoint-*", 1, "resume", seen=keep)
    assert {file: time_ns for file, time_ns in shards.items() if file in kept} == kept, (
        "finished shards were written again"
    )
    assert len(kept) == len(shards)
    dflow(store, "resume")
    assert undisturbed == digests(store)
    training = rows(store)["train"]
    assert "resumed" == training["cache"]
    measured = json.loads((store / "objects" / training["digest"] / "measurements.json").read_text())
    plan = json.loads((store / "objects" / undisturbed["shard"] / "plan.json").read_text())
    assert measured["steps_in_this_attempt"] < plan["steps"]


def test_a_search_killed_in_a_training_finds_the_best_trial_and_asked_again_does_nothing(store, undisturbed, tmp_path):
    store = shutil.copytree(store, tmp_path / "runs")
    trust_store(store)
    before = {folder.name for folder in (store / "records").iterdir()}
    file, best = tmp_path / "tuned.toml", tmp_path / "tuned_best.toml"
    file.write_text(
        f"""
extends = "{TINY}"
[mlflow]
tracking = false
[node.train]
eval_every = 4
[tune]
rungs = [3, 6]
[tune.space]
train.lr = [1e-5, 3e-3]
train.num_layers = [1, 2]
"""
    )
    kill_at(store, "checkpoint-*", 2, "tune", str(file))
    out = dflow(store, "tune", str(file))
    last = rows(store)
    assert {"train_6-t03", "train_6-t04"} == set(executed(store))
    assert all(last[node]["digest"] == undisturbed[node] for node in ("capture", "shard"))
    shown = {cells[0]: cells for line in out.splitlines() if len(cells := re.split(r"\s{2,}", line.strip())) > 6}
    trials = ["t01", "t02", "t03", "t04"]
    assert trials == sorted(name for name in shown if name in trials)
    assert {"t01": "3", "t02": "3", "t03": "6", "t04": "6"} == {name: shown[name][2] for name in trials}
    taus = {name: float(shown[name][3]) for name in trials}
    assert max(taus["t01"], taus["t02"]) < min(taus["t03"], taus["t04"])
    (winner,) = (name for name in trials if shown[name][-1] == "the best")
    assert taus[winner] == max(taus.values())
    answers = store / "objects" / last[f"train_6-{winner}"]["digest"] / "val_answers.jsonl"
    each = [json.loads(line) for line in answers.read_text().splitlines()]
    assert 4 == len(each)
    assert f"{sum(one['generated'] for one in each) / sum(one['steps'] for one in each):.3f}" == shown[winner][3]
    assert "18 training steps" in out and "take 24 steps" in out
    page = Page.read(store / "tune" / "tiny-tuned.html")
    assert ["plain decoding", *trials] == sorted(row[0] for row in page.table("trials", "trial", "values"))
    plan = {row["id"]: row["cache"] for row in json.loads(dflow(store, "plan", str(best), "--json"))["nodes"]}
    assert ["train", "export", "eval", "check"] == [node for node, planned in plan.items() if planned != "hit"]
    assert {"train_3", "train_6"} < set(plan)
    ran = {folder.name for folder in (store / "records").iterdir()}
    assert 3 == len(ran - before)
    written = {file: file.stat().st_mtime_ns for file in (best, store / "tune" / "tiny-tuned.html")}
    again = dflow(store, "tune", str(file))
    assert re.search(r"at most 18 training steps in 6 trainings; .+: \S+ s a step", again)
    assert out[out.rindex("\ntrial  ") :] == again[again.rindex("\ntrial  ") :]
    assert ran == {folder.name for folder in (store / "records").iterdir()}
    assert written == {file: file.stat().st_mtime_ns for file in written}
    best.write_text(f"{best.read_text()}\n[node.eval]\nmax_new_tokens = 8\n")
    with pytest.raises(DflowError, match="it was changed since `dflow tune` wrote it"):
        check_writable(best)


WITH_MTP = """
[pipeline]
name = "heads"
[mlflow]
tracking = false
[node.ingest]
op = "ingest"
source = "builtin:digits"
max_samples = 12
[node.inject]
op = "inject_images"
samples = "@ingest"
[node.target]
op = "load_target"
checkpoint = "checkpoint"
[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
target = "@target"
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
num_layers = 1
[node.shard]
op = "shard_sequence"
features = "@capture"
tokens_per_step = 512
[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
tokens = "@tokenize"
block_size = 4
num_layers = 1
num_anchors = 8
eval_every = 50
eval_prompts = 2
eval_new_tokens = 8
[tune]
rungs = [1, 2]
eagle3 = "eagle3"
[tune.space]
train.lr = [1e-4, 3e-3]
"""


@pytest.mark.slow  # 75 s of CPU time: ten processes that load torch
@pytest.mark.timeout(1800)
def test_a_search_killed_in_the_evaluation_of_the_mtp_head_ends_with_rows_of_rivals_and_plain_decoding(tmp_path):
    store, file = tmp_path / "runs", tmp_path / "heads.toml"
    mtp_checkpoint("qwen3_5", tmp_path / "checkpoint", noise=0.0)  # a perfect head, whose blocks are accepted whole
    eagle3_folder(tmp_path / "eagle3", tokens=range(1, V, 2), ids=(0, 1, 2))
    file.write_text(WITH_MTP)
    kill_at(store, "report.json", 1, "tune", str(file))
    out = dflow(store, "tune", str(file))
    assert ["tune_eagle3"] == executed(store)
    lines = out[out.index("\ntrial  ") :].splitlines()[2:]
    shown = [re.split(r"\s{2,}", line.strip()) for line in lines[: lines.index("not tried:")] if "  " in line]
    names = [cells[0] for cells in shown[2:5]]
    assert ["the target's own MTP head", "an EAGLE-3 draft", "plain decoding"] == names
    assert {"t01", "t02"} == {cells[0] for cells in shown[:2]}
    best, head = float(shown[0][3]), shown[2]
    assert ("block_size = 4", "4.000") == (head[1], head[2])
    assert f"{4 - best:+.3f}" in head
    assert best < 4
    records = [Record.load(folder) for folder in sorted((store / "records").iterdir())]
    made = {node: state.digest for record in records for node, state in record.state.nodes.items() if state.digest}
    folders = [store / "objects" / made[node] for node in ("tune_mtp", "tune_eagle3")]
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert [{"errors": 0, "ties": 0}] * 2 == [report["lossless"] for report in reports]
    assert (True, "eagle3") == (reports[0]["mtp"], reports[1]["eagle3"])
    assert f"{reports[1]['tau']['all']['tau']:.3f}" == shown[3][2]
    answered = [path.read_text() for path in store.glob("objects/*/val_answers.jsonl")]
    asked = [(folder / "prompts.jsonl").read_text() for folder in folders]
    ids = [[json.loads(line)["id"] for line in text.splitlines()] for text in (*asked, *answered)]
    assert 3 <= len(answered) and all(sorted(ids[0]) == sorted(each) for each in ids[1:])


def test_a_store_of_other_code_is_kept_resumed_in_the_middle_of_a_training_and_reported(store, undisturbed, tmp_path):
    changed = ["-s", "train.lr=2e-3", "-s", "mlflow.tracking=false"]
    store = shutil.copytree(store, tmp_path / "runs")
    trust_store(store)
    kill_at(store, "checkpoint-*", 1, "run", str(TINY), *changed, "--to", "train")
    above = NODES[: NODES.index("train")]
    planned = json.loads(by_other_code(store, "plan", str(TINY), *changed, "--json"))["nodes"]
    assert [] == [row["id"] for row in planned if row["cache"] == "hit"]
    kept = by_other_code(store, "accept", str(TINY), *changed, "--yes", "--reason", "comments only")
    assert above == [line.partition(":")[0] for line in kept.splitlines() if "was made by run" in line]
    planned = json.loads(by_other_code(store, "plan", str(TINY), *changed, "--to", "train", "--json"))["nodes"]
    assert above == [row["id"] for row in planned if row["cache"] == "hit"]
    said = by_other_code(store, "resume", "--adopt")
    assert "train: continues the work of run" in said
    resumed = newest(store)
    done = {node_id: row for node_id, row in rows(store).items() if row["digest"] is not None}
    assert {**dict.fromkeys(above, "hit"), "train": "resumed"} == {name: row["cache"] for name, row in done.items()}
    assert [undisturbed[name] for name in above] == [done[name]["digest"] for name in above]
    measured = json.loads((store / "objects" / done["train"]["digest"] / "measurements.json").read_text())
    plan = json.loads((store / "objects" / undisturbed["shard"] / "plan.json").read_text())
    assert measured["steps_in_this_attempt"] < plan["steps"]
    by_other_code(store, "run", str(TINY), *changed, "--to", "train")
    assert [] == executed(store)
    by_other_code(store, "report", resumed, "-o", str(tmp_path / "report.html"))
    states = Page.read(tmp_path / "report.html").table("pipeline", "node", "op", "state")
    assert [*((name, "cached") for name in above), ("train", "done")] == [(row[0], row[2]) for row in states]
