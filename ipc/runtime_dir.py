"""Folders for sockets: made where only this user gets in, named after their owner, removed when that is dead.

A name holds the owner's process id, when that process started, and which processes can see it at all: a digest of the
boot and the namespace of process ids. An id that was given to another process since has another start; an owner in
another container is not looked for here, and its folder never touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncbook.ipc.errors import HandshakeFailed

MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, its closing zero aside
PREFIX = "asyncbook"
SUBSCRIBERS_SOCKET = "subscribers"  # in the folder of a book's address
_NAME = re.compile(rf"{PREFIX}-(?P<pid>[1-9][0-9]*)-(?P<start>[0-9a-f]+)-(?P<world>[0-9a-f]{{6}})-[^-]+")


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None where there is no such process, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _world() -> str:
    """6 hex digits for this boot and this namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.blake2b(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode(), digest_size=3).hexdigest()


def places() -> Iterator[Path]:
    """Where folders are looked for and made, the best place first."""
    places = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    yield from (Path(place) for place in dict.fromkeys(places) if place)


def why_unusable(place: Path, names: Iterable[str]) -> str:
    """Why no folder with sockets of these names can be made in a place; empty where one can."""
    try:
        status = place.stat()
    except OSError as error:
        return f"{place} ({error.strerror})"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} (not writable)"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"{place} (anybody may rename what is in it: it has no sticky bit)"
    longest = len(os.fsencode(place / f"{_own_prefix()}{'x' * 8}" / max(names, key=len)))
    return f"{place} (a path of {longest} bytes)" if longest > MAX_SOCKET_PATH_BYTES else ""


def _own_prefix() -> str:
    return f"{PREFIX}-{os.getpid()}-{start_time(os.getpid()):x}-{_world()}-"


def create_directory(names: Iterable[str]) -> Path:
    """A new 0700 folder in which the paths of these sockets fit an address. What dead owners left is removed first.

    Raises `HandshakeFailed` where there is no place for it."""
    remove_stale()
    tried = []
    for place in places():
        reason = why_unusable(place, names)
        if not reason:
            try:
                return Path(tempfile.mkdtemp(prefix=_own_prefix(), dir=place))
            except OSError as error:  # a full disk
                reason = f"{place} ({error.strerror})"
        tried.append(reason)
    raise HandshakeFailed(
        f"no folder for the sockets: a path may have {MAX_SOCKET_PATH_BYTES} bytes; tried {', '.join(tried)}; "
        f"set TMPDIR to a shorter folder that can be written"
    )


def folders() -> list[Path]:
    """This user's folders whose owners live, and are seen from here."""
    world = _world()
    found = [path for place in places() for path in _ours(place)]
    return [path for path in found if _is_of(path.name, world) and not _is_stale(path.name, world)]


def is_name(name: str) -> bool:
    """Whether `create_directory` gives such names."""
    return _NAME.fullmatch(name) is not None


def _is_of(name: str, world: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and match["world"] == world


def stale_directories() -> list[Path]:
    """This user's folders whose owners are dead."""
    world = _world()
    return [path for place in places() for path in _ours(place) if _is_stale(path.name, world)]


def _ours(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.name.startswith(PREFIX)
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            ]
    except OSError:
        return []


def _is_stale(name: str, world: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and match["world"] == world and start_time(int(match["pid"])) != int(match["start"], 16)


def remove_stale() -> list[Path]:
    """Removes what dead owners left, and says what that was. Two that do it at once do not disturb each other."""
    removed = stale_directories()
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def check_private(directory: Path) -> None:
    """Raises `HandshakeFailed` unless the folder is this user's own, and nobody else gets in."""
    status = None
    with contextlib.suppress(OSError):
        status = directory.lstat()
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise HandshakeFailed(f"{directory} is no folder")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise HandshakeFailed(
            f"{directory} is of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, "
            f"expected user {os.getuid()} and mode 700"
        )
