"""Which GPUs the ranks of a node get, and which nodes see none; devices are read from CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch
from side_ops import side

from dsl.errors import ConfigError
from dsl.estimate import Estimate
from dsl.graph import Graph
from dsl.op_table import all_ops
from dsl.read_toml import read_graph
from executor.launchers.backends import Backends
from executor.launchers.host_run import stage_environment
from executor.launchers.worker import _device
from executor.planning.preflight import too_large
from executor.system import hardware, resource_pool
from executor.system.resource_pool import Capacity, device_order, too_much

OPS = """
from attrs import frozen
from dsl.op import op
from ops.artifacts import Samples

@op(version=1, run="placed_ops:run", gpu=True, sequence_parallel=True)
@frozen(kw_only=True)
class Compute:
    output = Samples

@op(version=1, run="placed_ops:run")
@frozen(kw_only=True)
class Read:
    output = Samples
"""
EIGHT = 'kind = "ranks", nproc = 8'


def graph(folder: Path, launch: str, op: str = "compute", machine: str = "") -> Graph:
    (folder / "placed_ops.py").write_text(OPS)
    file = folder / "p.toml"
    head = f'[pipeline]\nname = "p"\nops = ["placed_ops.py"]\n{machine}'
    file.write_text(f'{head}[node.n]\nop = "{op}"\nlaunch = {{ {launch} }}\n')
    return read_graph(file)


def asked(whole: Graph) -> int | None:
    return Capacity.of_this_machine(whole.machine).demand(whole.nodes["n"]).gpus


def refused(whole: Graph) -> list[str]:
    return [str(mistake) for mistake in too_much(whole.nodes, Capacity.of_this_machine(whole.machine))]


@pytest.mark.parametrize(
    ("visible", "launch", "gpus", "said"),
    [
        ("0,1,2,3,4,5,6,7", EIGHT, 8, ""),
        ("GPU-a,GPU-b", 'kind = "ranks", nproc = 2', 2, ""),
        ("0,1,2,3", "", 1, ""),
        ("", EIGHT, None, ""),
        ("", 'device = "cuda"', None, ""),
        ("0,1", EIGHT + ', device = "cpu"', 0, ""),
        ("0,1", EIGHT + ", gpus = 0", 0, ""),
        ("0,1,2,3", 'gpus = 4, kind = "ranks", nproc = 2', 4, ""),
        (
            "0,1,2,3",
            EIGHT,
            8,
            "node.n.launch.nproc: needs 8 GPUs, but the run may use only 4 GPUs "
            '(each rank needs one: set nproc = 4 or device = "cpu")',
        ),
        (
            "0,1,2",
            EIGHT + ", sp_degree = 2",
            8,
            "node.n.launch.nproc: needs 8 GPUs, but the run may use only 3 GPUs "
            '(each rank needs one: set nproc = 2 or device = "cpu")',
        ),
        (
            "5",
            EIGHT + ", sp_degree = 2",
            8,
            "node.n.launch.nproc: needs 8 GPUs, but the run may use only 1 GPU "
            '(each rank needs one: set nproc = 1 with sp_degree = 1 or device = "cpu")',
        ),
        (
            "0,1,2,3",
            EIGHT + ", gpus = 4",
            4,
            "node.n.launch.gpus: 4 GPUs for 8 ranks, each of which needs one (set gpus = 8, or leave gpus out)",
        ),
    ],
)
def test_every_rank_of_an_op_that_computes_on_a_gpu_takes_one_or_the_node_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, launch: str, gpus: int | None, said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    whole = graph(tmp_path, launch)
    assert (asked(whole), refused(whole)) == (gpus, [said] if said else [])


@pytest.mark.parametrize(("launch", "gpus"), [("", 0), (EIGHT, 0), ("gpus = 1", 1), ('device = "cuda"', 1)])
def test_an_op_that_computes_on_no_gpu_sees_none_unless_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str, gpus: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert asked(graph(tmp_path, launch, "read")) == gpus


def test_a_node_that_insists_on_a_gpu_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insisting = graph(tmp_path, 'device = "cuda"')
    said = [f"node.n.launch.device: {hardware.NO_GPU}"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said == [str(mistake) for mistake in Backends(insisting.machine).check(insisting.nodes)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [] == Backends(insisting.machine).check(insisting.nodes)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver = tmp_path / "driver"
    monkeypatch.setattr(hardware, "DRIVERS", ())
    monkeypatch.setattr(hardware, "UNLISTED", (driver,))
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cu130")
    monkeypatch.setattr(resource_pool, "gpu_indices", lambda: ())
    assert said == [str(mistake) for mistake in Backends(insisting.machine).check(insisting.nodes)]
    driver.touch()  # torch may find what the driver does not list
    assert [] == Backends(insisting.machine).check(insisting.nodes)
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cpu")
    assert said == [str(mistake) for mistake in Backends(insisting.machine).check(insisting.nodes)]


def test_a_run_that_may_use_no_gpu_computes_on_the_cpu_unless_a_node_insists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    none = "[machine]\ngpus = 0\n"
    assert asked(graph(tmp_path, "", machine=none)) == 0
    assert refused(graph(tmp_path, 'device = "cuda"', machine=none))[0].startswith(
        "node.n.launch.device: needs 1 GPU, but the run may use only 0 GPUs"
    )


def test_more_ranks_than_gpus_are_told_by_plan_and_refused_by_run(tmp_path: Path) -> None:
    (tmp_path / "placed_ops.py").write_text(OPS)
    toy = side(tmp_path, f'[node.n]\nop = "gpus"\nname = "n"\nother = "n"\nlaunch = {{ {EIGHT} }}\n')
    said = "node.n.launch.nproc: needs 8 GPUs, but the run may use only 2 GPUs (each rank needs one: set nproc = 2 or"
    assert said in toy.dflow("plan", str(toy.file), CUDA_VISIBLE_DEVICES="4,6").stdout
    result = toy.dflow("run", str(toy.file), CUDA_VISIBLE_DEVICES="4,6")
    assert (result.returncode, said in result.stderr, list(toy.store.glob("records/*"))) == (2, True, [])


def test_a_node_that_does_not_fit_on_this_machine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    needs = {"n": Estimate(memory={"weights": 90 * 10**9, "gradients": 41 * 10**9})}
    said = "n: memory: DOES NOT FIT: each rank needs 131.0 GB, and a GPU here has 80.0 GB"
    whole, on_cpu = graph(tmp_path, ""), graph(tmp_path, 'device = "cpu", kind = "ranks", nproc = 2')
    assert too_large(whole, needs, lambda: 80 * 10**9, 1) == [said]
    assert too_large(whole, needs, lambda: 141 * 10**9, 1) == []
    assert too_large(whole, needs, lambda: None, 1) == []
    assert too_large(on_cpu, needs, lambda: 80 * 10**9, 262 * 10**9) == []
    assert too_large(on_cpu, needs, lambda: 80 * 10**9, 200 * 10**9) == [
        "n: memory: DOES NOT FIT: needs 2 ranks of 131.0 GB each, and this machine has 200.0 GB"
    ]


def test_stages_see_their_own_gpus_and_those_without_see_none(tmp_path: Path) -> None:
    toy = side(
        tmp_path,
        '[node.a]\nop = "look"\n[node.b]\nop = "gpus"\nname = "b"\nother = "b"\nlaunch = { device = "cpu" }\n'
        '[node.c]\nop = "look"\ntoken = "c"\nlaunch = { gpus = 1 }\n',
    )
    file = tmp_path / "toy.py"
    file.write_text(
        file.read_text().replace('"open": sorted', '"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "open": sorted')
    )
    result = toy.dflow("run", str(toy.file), CUDA_VISIBLE_DEVICES="3,10")
    assert result.returncode == 0, result.stderr
    assert '"gpus": ""' in toy.text("a")
    assert toy.text("b") == ""
    assert '"gpus": "3"' in toy.text("c")


def test_the_ops_that_compute_on_a_device_are_those_that_ask_for_gpus() -> None:
    asking = {name for name, spec in all_ops().items() if spec.gpu}
    folders = {spec.run.partition(":")[0].split(".")[1]: name for name, spec in all_ops().items()}
    uses = ("stage.device", "rank_group.device_of")
    computing = {
        name
        for folder, name in folders.items()
        if any(use in file.read_text() for file in Path("ops", folder).glob("*.py") for use in uses)
    }
    assert asking == computing
    assert "train_dflash" in asking
    assert "tokenize_chat" not in asking


def test_numbers_of_devices_mean_to_cuda_what_nvidia_smi_lists_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert device_order() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert stage_environment(1, ("2",))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert stage_environment(1, ("2",))["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,GPU-cd")
    assert "CUDA_DEVICE_ORDER" not in stage_environment(1, ("GPU-cd",))


def test_a_rank_compiles_with_as_many_processes_as_it_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    told = [stage_environment(threads)["TORCHINDUCTOR_COMPILE_THREADS"] for threads in (1, 16, 192)]
    assert told == ["1", "16", "32"]
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    assert stage_environment(16)["TORCHINDUCTOR_COMPILE_THREADS"] == "5"


def test_a_rank_without_a_gpu_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ConfigError, match=r"rank 4 .* sees only 4; .* launch.nproc = 4, or launch.device = \"cpu\""):
        _device("auto")
    assert _device("cpu") == "cpu"
