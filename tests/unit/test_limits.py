"""What bounds a book's memory, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncbook.ipc.limits import memory_limits, space_limit

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 900 MiB left, without control groups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {800 * 1024} kB\nSwapFree: {100 * 1024} kB\n")
    write(tmp_path / "proc/self/statm", "1 1 1 1 1 1 1\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def left(machine: Path) -> dict[str, int]:
    """What is left, in MiB, by the name of what limits it."""
    limits = memory_limits(machine / "proc", machine / "cgroup")
    assert all(limit.remedy for limit in limits)
    assert [limit.available for limit in limits] == sorted(limit.available for limit in limits)
    return {limit.name.replace(str(machine / "cgroup"), ""): limit.available // MIB for limit in limits}


def group_v2(folder: Path, limit: str, usage: int, inactive: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive}\nslab_reclaimable 0\n")


def test_a_machine_without_control_groups(machine: Path) -> None:
    assert left(machine) == {"memory of this machine": 900}


def test_groups_of_version_2_and_those_around_them(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/outer/inner\n")
    group_v2(machine / "cgroup/outer/inner", "max", 5 * MIB)
    group_v2(machine / "cgroup/outer", str(64 * MIB), 50 * MIB, inactive=20 * MIB)
    assert left(machine) == {"memory of this machine": 900, "memory.max of /outer": 34}


def test_a_container_sees_its_own_group_at_the_root(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/docker/0123456789\n")
    group_v2(machine / "cgroup", str(64 * MIB), 70 * MIB)
    assert left(machine)["memory.max of "] == 0


def test_groups_of_version_1(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "5:cpu:/a\n4:memory:/a\n0::/\n")
    for folder, limit in (("memory/a", 100 * MIB), ("memory", 2**63 - 4096)):
        write(machine / f"cgroup/{folder}/memory.limit_in_bytes", f"{limit}\n")
        write(machine / f"cgroup/{folder}/memory.usage_in_bytes", f"{40 * MIB}\n")
        write(machine / f"cgroup/{folder}/memory.stat", f"total_inactive_file {10 * MIB}\n")
    assert left(machine) == {"memory of this machine": 900, "memory.limit_in_bytes of /memory/a": 70}


def test_files_that_are_no_numbers(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/a\n")
    write(machine / "cgroup/a/memory.max", "lots\n")
    assert left(machine) == {"memory of this machine": 900}


def test_this_machine() -> None:
    assert memory_limits()[0].available > 0
    assert space_limit(Path("/dev/shm")).available >= 0
