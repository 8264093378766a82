"""`asyncbook doctor`: looks at the machine the way a book will, and says what to do about what it finds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click

from asyncbook.config import BookConfig
from asyncbook.ipc import runtime_dir
from asyncbook.ipc.channel import SOCKET_NAMES
from asyncbook.ipc.limits import memory_limits, space_limit
from asyncbook.ipc.segment import Segment

REQUIRED = ("msgspec", "numba", "numpy", "pyzmq")
OPTIONAL = ("click", "rich", "torch", "tokenizers")
MIN_DESCRIPTORS = 256
SHM = Path("/dev/shm")
MIB = 1 << 20


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # something is slower, or missing that not everybody needs
    FAIL = "fail"  # a book would not work


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `remedy` is empty where there is nothing to do."""

    check: str
    level: Level
    what: str
    remedy: str = ""


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def check_python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.platform != "linux":
        yield Finding("python", Level.FAIL, f"Python {version} on {sys.platform}", "asyncbook needs Linux")
    else:
        yield Finding("python", Level.OK, f"Python {version}, Linux {platform.release()}, {platform.machine()}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_versions() -> Iterator[Finding]:
    least = dict(re.findall(r"^([a-z]+)>=([0-9.]+)", "\n".join(importlib.metadata.requires("asyncbook") or ()), re.M))
    for name in (*REQUIRED, *OPTIONAL):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in REQUIRED:
                yield Finding("versions", Level.FAIL, f"{name} is missing", f"pip install {name}")
            else:
                yield Finding("versions", Level.OK, f"{name} is not there, and not needed for a book")
            continue
        if _numbers(version) < _numbers(least.get(name, "0")):
            level, remedy = Level.FAIL, f'pip install "{name}>={least[name]}"'
            yield Finding("versions", level, f"{name} {version}, expected {least[name]} or later", remedy)
        else:
            yield Finding("versions", Level.OK, f"{name} {version}")


def check_shared_memory() -> Iterator[Finding]:
    if hasattr(os, "memfd_create"):
        os.close(os.memfd_create("asyncbook-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        yield Finding("shared memory", Level.OK, "memfd with seals; the size of /dev/shm does not matter")
        return
    limit = space_limit(SHM)
    yield Finding(
        "shared memory",
        Level.NOTE,
        f"no memfd: books lie in {SHM}, reserved whole, where {_mib(limit.available)} are left",
        limit.remedy,
    )


def check_memory(config: BookConfig | None) -> Iterator[Finding]:
    limits = memory_limits()
    for limit in limits:
        yield Finding("memory", Level.OK, f"{_mib(limit.available)} left: {limit.name}")
    if config is None:
        return
    layout = config.layout
    what = f"this book reserves {_mib(layout.table_offset)}, and its table may grow it to {_mib(layout.total_bytes)}"
    tightest = limits[0]
    if layout.table_offset <= tightest.available < layout.total_bytes:
        remedy = (
            f"{tightest.remedy}, or make sure that not all rows are full at once: there are {tightest.available} bytes"
        )
        yield Finding("book", Level.NOTE, what, remedy)
        return
    try:
        Segment.create(layout).close()
    except Exception as error:
        yield Finding("book", Level.FAIL, what, str(error))
    else:
        yield Finding("book", Level.OK, what)


def check_cores() -> Iterator[Finding]:
    usable = sorted(os.sched_getaffinity(0))
    what = f"{len(usable)} of {os.cpu_count()} cores may be used: {usable[0]} to {usable[-1]}"
    if len(usable) == 1:
        remedy = (
            "give the process a second core (taskset, cpuset), or use asyncbook.open: a sidecar would share this one"
        )
        yield Finding("cores", Level.NOTE, what, remedy)
    else:
        yield Finding("cores", Level.OK, what)


def check_descriptors() -> Iterator[Finding]:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    in_use = len(os.listdir("/proc/self/fd"))
    level = Level.OK if limit - in_use >= MIN_DESCRIPTORS else Level.FAIL
    remedy = "" if level is Level.OK else f"raise it (ulimit -n) by at least {MIN_DESCRIPTORS}"
    yield Finding("descriptors", level, f"{in_use} of {limit} in use", remedy)


def check_kernel_cache() -> Iterator[Finding]:
    from asyncbook.ipc import jit

    importlib.import_module("asyncbook.worker.kernels")
    folder = Path(jit.cache_path())
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        remedy = "set NUMBA_CACHE_DIR to a folder that can be written, or each start compiles for half a minute"
        level = Level.NOTE if jit.is_cached() else Level.FAIL
        yield Finding("kernel cache", level, f"{folder} cannot be written", remedy)
    elif jit.is_cached():
        yield Finding("kernel cache", Level.OK, f"compiled in {folder}")
    else:
        yield Finding("kernel cache", Level.NOTE, f"not compiled yet in {folder}", "the first start takes longer")


def check_runtime_directory() -> Iterator[Finding]:
    reasons: list[str] = []
    for place in runtime_dir.places():
        reason = runtime_dir.why_unusable(place, SOCKET_NAMES)
        if not reason:
            level = Level.NOTE if reasons else Level.OK
            remedy = f"not used: {'; '.join(reasons)}" if reasons else ""
            yield Finding("sockets", level, f"in {place}", remedy)
            break
        reasons.append(reason)
    else:
        remedy = "set TMPDIR to a short folder that can be written"
        yield Finding("sockets", Level.FAIL, f"no folder for them: {'; '.join(reasons)}", remedy)
    for path in runtime_dir.stale_directories():
        yield Finding("leftovers", Level.NOTE, f"{path} of a dead process", "the next book removes it")


def check_torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", Level.OK, "not there, and not needed")
        return
    from asyncbook import device

    for is_good, what, remedy in device.diagnosis():
        yield Finding("torch", Level.OK if is_good else Level.NOTE, what, remedy)


def examine(config: BookConfig | None) -> list[Finding]:
    """Every finding. A check that fails itself is one, too."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_python, check_versions, check_shared_memory, lambda: check_memory(config), check_cores, check_descriptors,
        check_kernel_cache, check_runtime_directory, check_torch,
    ]  # fmt: skip
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:
            what = f"{getattr(check, '__name__', 'a check')} ended with {type(error).__name__}: {error}"
            findings.append(Finding("doctor", Level.FAIL, what, "what it looks at cannot be right"))
    return findings


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {Level.OK: "green", Level.NOTE: "yellow", Level.FAIL: "bold red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = f"[{colours[finding.level]}]{finding.level}[/]"
        table.add_row(mark, finding.check, finding.what.replace("[", r"\["), finding.remedy.replace("[", r"\["))
    Console().print(table)


@click.command("doctor")
@click.option("--rows", type=click.IntRange(1), help="A book of so many requests at a time ...")
@click.option("--model-len", type=click.IntRange(1), help="... of so many tokens each: does it fit?")
@click.option("--spec-tokens", type=click.IntRange(0), default=0, show_default=True, help="Its drafts a row and step.")
@click.option("--json", "as_json", is_flag=True, help="A list of findings as JSON.")
def doctor_command(rows: int | None, model_len: int | None, spec_tokens: int, as_json: bool) -> None:
    """Checks this machine: memory and its limits, cores, kernel cache, folders, versions. Says what to do.

    Exit status 1 where a book would not work.
    """
    if (rows is None) != (model_len is None):
        raise click.UsageError("--rows and --model-len say the size of a book together")
    config = None
    if rows is not None and model_len is not None:
        try:
            config = BookConfig(max_num_reqs=rows, max_model_len=model_len, vocab_size=1, num_spec_tokens=spec_tokens)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    findings = examine(config)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level is Level.FAIL for finding in findings):
        raise SystemExit(1)
