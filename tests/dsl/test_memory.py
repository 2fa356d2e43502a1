"""The memory of a machine and of a container with a limit, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.memory import FILES, free_memory, machine_memory

KIB, GIB = 1 << 10, 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable: {40 * GIB // KIB} kB\n")
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr("dsl.memory.MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("dsl.memory.CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize("names", FILES)
def test_a_container_has_what_its_limit_leaves(machine: Path, names: tuple[str, str, str]) -> None:
    whole = machine_memory()
    assert 40 * GIB == free_memory()
    limit, current, statistics = (machine / name for name in names)
    limit.write_text("1073741824\n")
    current.write_text("805306368\n")
    statistics.write_text("anon 268435456\ninactive_file 536870912\n")
    assert (GIB, GIB * 3 // 4) == (machine_memory(), free_memory())
    current.write_text("2147483648\n")  # a limit that was lowered
    assert 0 == free_memory()
    limit.write_text("max\n")
    assert (whole, 40 * GIB) == (machine_memory(), free_memory())
    limit.write_text("9223372036854771712\n")  # version 1 without a limit
    assert (whole, 40 * GIB) == (machine_memory(), free_memory())


def test_a_machine_that_does_not_say_what_is_free_has_all_of_it(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert machine_memory() == free_memory()
