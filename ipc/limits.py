"""How much memory a book may take, and what stands in the way: the machine, its control groups, limits of the process.

A page of shared memory that cannot be had is no error where it is needed: it is a SIGBUS, or the end of a process that
the kernel chooses. So a book asks first.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ADDRESS_SPACE, FILE_SIZE = "RLIMIT_AS, for each mapping", "RLIMIT_FSIZE"
PROCESS_LIMITS = (ADDRESS_SPACE, FILE_SIZE)  # names of limits that nothing that is given back helps to keep
UNLIMITED = 1 << 60  # control groups without a limit say numbers beyond this
_CGROUP_FILES = {  # version: (limit, usage, keys in memory.stat of what can be given back)
    2: ("memory.max", "memory.current", ("inactive_file", "slab_reclaimable")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",)),
}


class Limit(NamedTuple):
    """What is left of something, in bytes, and what raises it."""

    name: str
    available: int
    remedy: str


def memory_limits(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> list[Limit]:
    """Everything that bounds what can be reserved now, the tightest first."""
    limits = [*_machine(proc), *_cgroups(proc, cgroup_root), *_process(proc)]
    return sorted(limits, key=lambda limit: limit.available)


def _machine(proc: Path) -> Iterator[Limit]:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = sum(int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024
    yield Limit("memory of this machine", available, "end what else needs memory")


def _cgroups(proc: Path, root: Path) -> Iterator[Limit]:
    """Limits of the control group that this process is in, and of those around it."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _cgroup_path(2, root, path)
        elif "memory" in controllers.split(","):
            yield from _cgroup_path(1, root / "memory", path)


def _cgroup_path(version: int, mount: Path, path: str) -> Iterator[Limit]:
    # In a container the path may be the host's, while its own group is mounted at the root.
    groups = {mount / part for part in (path.strip("/"), *map(str, Path(path.strip("/")).parents))} | {mount}
    for group in sorted(groups):
        limit = _cgroup(version, group)
        if limit is not None:
            yield limit


def _cgroup(version: int, group: Path) -> Limit | None:
    limit_name, usage_name, reclaimable = _CGROUP_FILES[version]
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= UNLIMITED:
            return None
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    usage -= sum(int(stat.get(key, 0)) for key in reclaimable)
    remedy = "raise the memory limit of the container or control group"
    return Limit(f"{limit_name} of {group}", max(int(limit) - usage, 0), remedy)


def _process(proc: Path) -> Iterator[Limit]:
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        in_use = int((proc / "self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        # A book is mapped twice by its runner, and once more where it is embedded.
        available = max(address_space - in_use, 0) // 3
        yield Limit(ADDRESS_SPACE, available, "raise it (ulimit -v)")
    file_size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if file_size != resource.RLIM_INFINITY:
        yield Limit(FILE_SIZE, file_size, "raise it (ulimit -f)")


def space_limit(path: Path) -> Limit:
    """What a file system has room for: shared memory with a name lies in one, which in a container is often small."""
    status = os.statvfs(path)
    remedy = "make it larger (docker run --shm-size), or use a kernel with memfd"
    return Limit(f"file system {path}", status.f_bavail * status.f_frsize, remedy)
