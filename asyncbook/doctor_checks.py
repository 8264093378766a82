"""What `asyncbook doctor` looks at.

A check is a function that looks at one thing and returns a `Finding`. "error": a book, or its sidecar, does not start.
"warning": it works, with less than it could have. What is optional and absent is "ok", and says so.

What a check needs is imported in it: where an import fails, that is a finding and not the end of the command.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from asyncbook.ipc.layout import Layout
from asyncbook.ipc.limits import ADDRESS_SPACE, PROCESS_LIMITS, memory_limits

Status = Literal["ok", "warning", "error"]

MIB = 1 << 20
SIDECAR_BYTES = 128 * MIB  # of a sidecar beside its book: the interpreter, numpy, numba and the kernels
SIDECAR_MAPPED_BYTES = 640 * MIB  # the same with all that is mapped and never touched
REQUIRED = ("numpy", "numba", "pyzmq", "msgspec")
OPTIONAL = ("torch", "tokenizers")
EMBEDDED = "asyncbook.open does without"


@dataclass(frozen=True)
class Finding:
    """What a check found. `remedy`: what to do about it; empty where there is nothing to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""


Check = Callable[[Layout | None], Finding]  # of the book that is meant, None where nobody said how large it will be


def _size(num_bytes: int) -> str:
    """At most 9 characters: "3.4 GiB"."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# The kernel


def _why_no_memfd() -> str:
    """Why there is no memfd; empty where there is one."""
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create"
    try:
        os.close(os.memfd_create("asyncbook-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    return ""


def _why_no_seals() -> str:
    """Why a memfd cannot be sealed; empty where it can."""
    if not hasattr(fcntl, "F_ADD_SEALS"):
        return "this Python has no fcntl.F_ADD_SEALS"
    descriptor = os.memfd_create("asyncbook-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, wanted)
        return "" if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted else "seals do not stay"
    except OSError as error:
        return f"F_ADD_SEALS: {error.strerror}"
    finally:
        os.close(descriptor)


def check_memfd(layout: Layout | None) -> Finding:
    """Where a book's shared memory comes from, see `ipc/segment.py`."""
    if reason := _why_no_memfd():
        if hasattr(os, "memfd_create"):
            return Finding("memfd", "error", reason, "allow memfd_create (the container's seccomp profile)")
        return Finding(
            "memfd", "warning", f"{reason}: books lie in /dev/shm", "use a Python built with glibc 2.27 or later"
        )
    if reason := _why_no_seals():
        return Finding("memfd", "warning", f"cannot be sealed ({reason})", "allow F_ADD_SEALS")
    return Finding("memfd", "ok", "present, can be sealed")


def check_pidfd(layout: Layout | None) -> Finding:
    """How the end of a sidecar, or of its runner, is noticed."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding("pidfd_open", "error", str(error), f"a sidecar needs Linux 5.3 or later; {EMBEDDED}")
    return Finding("pidfd_open", "ok", "present")


def check_eventfd(layout: Layout | None) -> Finding:
    """How threads of the runner wake each other."""
    try:
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        return Finding("eventfd", "error", str(error), f"a sidecar needs it; {EMBEDDED}")
    return Finding("eventfd", "ok", "present")


# Memory


def check_memory(layout: Layout | None) -> Finding:
    """Of the machine, or what a control group leaves of it. The small parts of a book are reserved at once; its table
    and the overflow of outputs that nobody reads are sparse, and take what is in use."""
    limit = next(limit for limit in memory_limits() if limit.name not in PROCESS_LIMITS)
    found = f"{_size(limit.available)} left of {limit.name}"
    reserved = SIDECAR_BYTES + (0 if layout is None else layout.table_offset)
    whole = SIDECAR_BYTES + (0 if layout is None else layout.total_bytes)
    whose = "a sidecar" if layout is None else "book and sidecar"
    if limit.available < reserved:
        return Finding("memory", "error", found, f"{_size(reserved)} for {whose} at once: {limit.remedy}")
    if limit.available < whole:
        return Finding("memory", "warning", found, f"{_size(whole)} for {whose} when full: {limit.remedy}")
    return Finding("memory", "ok", found if layout is None else f"{found}; {_size(whole)} for {whose} when full")


def check_process_limits(layout: Layout | None) -> Finding:
    """Limits that a sidecar inherits. A book is mapped whole, its empty table too."""
    limits = [limit for limit in memory_limits() if limit.name in PROCESS_LIMITS]
    if not limits:
        return Finding("limits", "ok", "none on memory")
    wanted = 0 if layout is None else layout.total_bytes
    for limit in limits:
        needed = wanted + (SIDECAR_MAPPED_BYTES if limit.name == ADDRESS_SPACE else 0)
        if limit.available < needed:
            found = f"{_size(limit.available)} left of {limit.name}"
            return Finding("limits", "error", found, f"{_size(needed)} are needed: {limit.remedy}")
    return Finding("limits", "ok", ", ".join(f"{_size(limit.available)} left of {limit.name}" for limit in limits))


def _shm_bytes() -> int | None:
    """Free in /dev/shm; None where there is no such folder."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def check_shm(layout: Layout | None) -> Finding:
    """/dev/shm, which a book needs where there is no memfd."""
    room = _shm_bytes()
    if not _why_no_memfd():
        return Finding("/dev/shm", "ok", f"{'absent' if room is None else f'{_size(room)} free'}; not used, see memfd")
    if room is None:
        return Finding("/dev/shm", "error", "absent, and there is no memfd", "mount a tmpfs there")
    found = f"{_size(room)} free; used, as there is no memfd"
    needed = 0 if layout is None else layout.total_bytes  # a file system may be full later: all of it is reserved
    if room < needed:
        return Finding("/dev/shm", "error", found, f"{_size(needed)} for the book: make it larger (docker --shm-size)")
    return Finding("/dev/shm", "ok", found)


# The process


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0)


def check_cores(layout: Layout | None) -> Finding:
    """How many cores the runner and its sidecar may use."""
    usable = len(_usable_cores())
    found = f"{usable} of {os.cpu_count() or usable} usable"
    if usable == 1:
        remedy = "allow a second one (taskset, cpuset); or asyncbook.open"
        return Finding("cores", "warning", f"{found}: the sidecar shares it with the runner", remedy)
    return Finding("cores", "ok", found)


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder that is there, or that can be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def check_kernels(layout: Layout | None) -> Finding:
    """The cache of compiled kernels."""
    try:
        # All modules with kernels of a book, on both sides: they register themselves. Where no folder can be written
        # numba refuses them here already.
        from asyncbook import embedded, sidecar  # noqa: F401
        from asyncbook.ipc import jit
        from asyncbook.worker import duty  # noqa: F401
    except (RuntimeError, OSError) as error:
        return Finding("kernels", "error", str(error), "set NUMBA_CACHE_DIR to a folder that can be written")
    folder, is_cached = Path(jit.cache_path()), jit.is_cached()
    found = f"{'compiled' if is_cached else 'not compiled yet'}, in {folder}"
    if not _is_writable(folder):
        remedy = "set NUMBA_CACHE_DIR to a folder that can be written"
        return Finding("kernels", "warning" if is_cached else "error", f"{found}, which is not writable", remedy)
    if not is_cached:
        return Finding("kernels", "warning", found, "the first start takes longer: start a book once")
    return Finding("kernels", "ok", found)


def check_runtime_directory(layout: Layout | None) -> Finding:
    """Where the sockets of a sidecar go, and what dead owners left there."""
    from asyncbook.ipc import runtime_dir
    from asyncbook.ipc.channel import SOCKET_NAMES

    name = "sockets"
    reasons: list[str] = []
    for place in runtime_dir.places():
        reason = runtime_dir.why_unusable(place, SOCKET_NAMES)
        if reason:
            reasons.append(reason)
            continue
        found = f"in {place}"
        if stale := runtime_dir.stale_directories():
            found += f"; the next sidecar removes {len(stale)} folders of dead owners"
        if reasons:
            remedy = "set XDG_RUNTIME_DIR or TMPDIR to a folder that is short and can be written"
            return Finding(name, "warning", f"{found}; passed over: {', '.join(reasons)}", remedy)
        return Finding(name, "ok", found)
    most = runtime_dir.MAX_SOCKET_PATH_BYTES
    remedy = f"set TMPDIR to a folder that can be written; a path may have {most} bytes"
    return Finding(name, "error", f"no place for them: {', '.join(reasons)}", remedy)


def _descriptor_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_descriptors(layout: Layout | None) -> Finding:
    """RLIMIT_NOFILE."""
    from asyncbook.ipc.channel import NUM_DESCRIPTORS

    limit = _descriptor_limit()
    if limit == resource.RLIM_INFINITY:
        return Finding("descriptors", "ok", "no limit")
    left = limit - len(os.listdir("/proc/self/fd"))
    found = f"{left} left of {limit}"
    remedy = f"raise the limit (ulimit -n): a sidecar needs up to {NUM_DESCRIPTORS}"
    if left < NUM_DESCRIPTORS:
        return Finding("descriptors", "error", found, remedy)
    # The one that is replaced may not have closed its own yet, and an engine has more of them than this command.
    if left < 4 * NUM_DESCRIPTORS:
        return Finding("descriptors", "warning", found, f"{remedy}, and so does the one that replaces it")
    return Finding("descriptors", "ok", found)


# Libraries


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_pinning(layout: Layout | None) -> Finding:
    """Whether shared memory can be pinned for a CUDA device, so that nobody waits for a copy."""
    if not _is_installed("torch"):
        return Finding("pinning", "ok", "no torch: numpy arrays only", 'for tensors: pip install "asyncbook[torch]"')
    from asyncbook.device.api import why_not_pinned

    reason = why_not_pinned()
    if reason is None:
        return Finding("pinning", "ok", "torch finds no CUDA device: nothing to pin")
    if reason:
        return Finding("pinning", "warning", reason, "see torch and driver: copies of pageable memory are waited for")
    return Finding("pinning", "ok", "memory can be pinned for CUDA")


def check_tokenizers(layout: Layout | None) -> Finding:
    """What text and stop strings need."""
    if _is_installed("tokenizers"):
        return Finding("tokenizers", "ok", "installed")
    return Finding("tokenizers", "ok", "not installed: ids only", 'for text: pip install "asyncbook[text]"')


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_versions(layout: Layout | None) -> Finding:
    """Of everything that a report of a fault should name."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {package: _version(package) for package in ("asyncbook", *REQUIRED, *OPTIONAL)}
    missing = [package for package in REQUIRED if versions[package] is None]
    if "pyzmq" not in missing:
        from asyncbook.ipc.channel import LIBZMQ_VERSION

        versions["libzmq"] = LIBZMQ_VERSION
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if missing:
        return Finding("versions", "error", f"{found}; without {', '.join(missing)}", "pip install asyncbook")
    return Finding("versions", "ok", found)


CHECKS: dict[str, Check] = {
    "memfd": check_memfd,
    "pidfd_open": check_pidfd,
    "eventfd": check_eventfd,
    "memory": check_memory,
    "limits": check_process_limits,
    "/dev/shm": check_shm,
    "cores": check_cores,
    "kernels": check_kernels,
    "sockets": check_runtime_directory,
    "descriptors": check_descriptors,
    "pinning": check_pinning,
    "tokenizers": check_tokenizers,
    "versions": check_versions,
}


def run_checks(layout: Layout | None = None) -> list[Finding]:
    """All of them. One that fails itself is a finding too: a library that does not load, a file that is not there."""
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(check(layout))
        except Exception as error:
            findings.append(Finding(name, "error", f"{type(error).__name__}: {error}", "see the error"))
    return findings
