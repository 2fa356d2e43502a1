"""What a running node uses of this machine."""

import queue
import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace

import pytest

from executor.system import hardware, resource_pool, system_metrics
from executor.system.system_metrics import Usage, Used, Watched, gpu_metrics, used_below


def test_a_young_node_is_looked_at_soon_and_an_old_one_every_ten_seconds() -> None:
    watched = Watched(1, since=0.0)
    now, pauses = 0.0, []
    for _ in range(7):
        pauses.append(watched.pause)
        now += watched.pause
        watched.sample(now, {})
    assert [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0] == pauses


def test_the_first_look_tells_the_cpu_time_since_the_node_was_seen() -> None:
    told: queue.Queue[Mapping[str, float]] = queue.Queue()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        usage = Usage(busy.pid, [], told.put)
        try:
            metrics = told.get(timeout=60)
        finally:
            usage.close()
            busy.kill()
    assert {"memory_usage_megabytes", "cpu_utilization_percentage"} == set(metrics)
    assert metrics["memory_usage_megabytes"] > 1
    assert metrics["cpu_utilization_percentage"] > 0


def test_what_a_node_uses_is_that_of_all_processes_below_its_own_and_of_no_other() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as own:
        assert own.stdout is not None
        own.stdout.readline()
        used = used_below(own.pid)
        own.kill()
    assert own.pid in used
    assert 2 == len(used)
    assert all(each.memory > 2**20 for each in used.values())
    assert {} == used_below(own.pid)


def test_the_cpu_time_between_two_looks_is_told_of_the_time_between_them() -> None:
    watched = Watched(7, since=10.0, used={7: Used(0.5, 0)})
    told = [watched.sample(now, {7: Used(seconds, 0)}) for now, seconds in ((12.0, 1.5), (16.0, 9.5))]
    assert [{"cpu_utilization_percentage": 50.0}, {"cpu_utilization_percentage": 200.0}] == told


def test_a_process_that_has_ended_since_the_last_look_takes_nothing_off() -> None:
    watched = Watched(7, since=0.0, used={7: Used(1.0, 0), 8: Used(5.0, 0)})
    assert {"cpu_utilization_percentage": 100.0} == watched.sample(1.0, {7: Used(2.0, 0)})


def test_a_node_whose_processes_have_just_ended_uses_no_memory_that_is_told() -> None:
    assert {} == Watched(7).sample(1.0, {})
    assert "memory_usage_megabytes" not in Watched(7).sample(1.0, {7: Used(1.0, 0)})


class NoReading(Exception):
    """An error that stands for pynvml.NVMLError."""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's library on a machine with two GPUs, of which the second does not tell its power."""

    def power(handle: int) -> int:
        if handle == 1:
            raise NoReading
        return 350_000

    def by_uuid(uuid: str) -> int:
        if uuid != "GPU-1":
            raise NoReading
        return 1

    library = ModuleType("pynvml")
    vars(library).update(
        NVMLError=NoReading,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=40 + handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3e9, total=(80 - handle) * 10**9),
        nvmlDeviceGetPowerUsage=power,
    )
    for module in (hardware, system_metrics):
        monkeypatch.setattr(module, "nvml", lambda: library)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_tells_its_load_memory_and_power_where_it_can() -> None:
    first = {"gpu_0_utilization_percentage": 40.0, "gpu_0_memory_usage_megabytes": 3000.0}
    first["gpu_0_power_usage_watts"] = 350.0
    second = {"gpu_1_utilization_percentage": 41.0, "gpu_1_memory_usage_megabytes": 3000.0}
    assert first == gpu_metrics(["0"])
    assert second == gpu_metrics(["GPU-1", "GPU-no-such"])
    assert {**first, **second} == gpu_metrics(None)
    assert {} == gpu_metrics([])


@pytest.mark.usefixtures("two_gpus")
def test_the_gpus_are_those_of_the_environment_or_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (("0", "1"), 79 * 10**9) == (resource_pool.devices(), hardware.gpu_memory())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab, 3,-1,0")
    assert ("GPU-ab", "3") == resource_pool.devices()


def test_without_a_driver_there_are_no_gpus_and_its_library_is_not_imported() -> None:
    script = (
        "import sys; from pathlib import Path; from executor.system import hardware\n"
        "hardware.DRIVERS = (Path('/no/such/device'),)\n"
        "print(hardware.gpu_indices(), hardware.gpu_memory(), 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "() None False\n" == done.stdout


def test_a_driver_that_cannot_be_asked_is_none() -> None:
    """As on a machine whose device is there and whose library is not, or is of another version."""
    script = (
        "import sys; from pathlib import Path; from executor.system import hardware\n"
        "import pynvml; pynvml.nvmlInit = lambda: (_ for _ in ()).throw(pynvml.NVMLError_LibraryNotFound())\n"
        "hardware.DRIVERS = (Path('/dev/null'),)\n"
        "print(hardware.gpu_indices(), hardware.gpu_memory())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "() None\n" == done.stdout
