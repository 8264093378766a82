"""Folders for sockets: private, short, named after their owner, and gone once that is dead."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asyncbook import HandshakeFailed
from asyncbook.ipc import runtime_dir
from asyncbook.ipc.channel import SOCKET_NAMES

ME = os.getpid()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place."""
    monkeypatch.setattr(runtime_dir, "places", lambda: iter([tmp_path]))
    monkeypatch.setattr(runtime_dir, "MAX_SOCKET_PATH_BYTES", 300)  # the folder of a test has a long path
    return tmp_path


def make(place: Path, name: str) -> Path:
    folder = place / name
    folder.mkdir(mode=0o700)
    (folder / "commands").write_text("")
    return folder


@pytest.fixture
def dead_pid() -> int:
    """Of a process that has been."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_is_private_and_names_its_owner(place: Path) -> None:
    folder = runtime_dir.create_directory(SOCKET_NAMES)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    start = runtime_dir.start_time(ME)
    assert folder.name.startswith(f"asyncbook-{ME}-{start:x}-{runtime_dir._world()}-")
    assert runtime_dir.create_directory(SOCKET_NAMES) != folder
    runtime_dir.check_private(folder)


def test_folders_of_dead_owners_go_and_no_others(place: Path, dead_pid: int) -> None:
    world, start = runtime_dir._world(), runtime_dir.start_time(ME)
    other_world = "0" * 6 if world != "0" * 6 else "1" * 6
    stale = [
        make(place, f"asyncbook-{dead_pid}-1f-{world}-aaaaaaaa"),
        make(place, f"asyncbook-{ME}-{start + 1:x}-{world}-aaaaaaaa"),  # the number is in use again, by us
    ]
    kept = [
        make(place, f"asyncbook-{ME}-{start:x}-{world}-aaaaaaaa"),  # ours
        make(place, f"asyncbook-1-{runtime_dir.start_time(1):x}-{world}-aaaaaaaa"),  # a live neighbour's
        make(place, f"asyncbook-{dead_pid}-1f-{other_world}-aaaaaaaa"),  # perhaps alive, in another container
        make(place, f"asyncbook-{dead_pid}"),
        make(place, f"asyncbook-{dead_pid}-1f-{world}"),
        make(place, f"asyncbook-x{dead_pid}-1f-{world}-aaaaaaaa"),
        make(place, f"asyncbook-{dead_pid}-1f-{world}-aaaaaaaa-more"),
        make(place, f"other-{dead_pid}-1f-{world}-aaaaaaaa"),
    ]
    file = place / f"asyncbook-{dead_pid}-2f-{world}-aaaaaaaa"
    file.write_text("no folder")
    link = place / f"asyncbook-{dead_pid}-3f-{world}-aaaaaaaa"
    link.symlink_to(kept[-1])
    assert sorted(runtime_dir.stale_directories()) == sorted(stale)
    folder = runtime_dir.create_directory(SOCKET_NAMES)
    assert sorted(place.iterdir()) == sorted([*kept, file, link, folder])
    assert all((path / "commands").exists() for path in kept)


def test_a_process_that_is_not_waited_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert runtime_dir.start_time(process.pid) is None
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_stays(place: Path, dead_pid: int) -> None:
    folder = make(place, f"asyncbook-{dead_pid}-1f-{runtime_dir._world()}-aaaaaaaa")
    os.chown(folder, 65534, 65534)
    assert runtime_dir.remove_stale() == []
    with pytest.raises(HandshakeFailed, match="user 65534"):
        runtime_dir.check_private(folder)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o600, 0o1700])
def test_a_folder_that_others_may_enter_is_refused(place: Path, mode: int) -> None:
    folder = make(place, "folder")
    folder.chmod(mode)
    with pytest.raises(HandshakeFailed, match=f"mode {mode:o}"):
        runtime_dir.check_private(folder)


def test_what_is_no_folder_is_refused(place: Path) -> None:
    folder = make(place, "folder")
    (place / "link").symlink_to(folder)
    for path in (place / "link", place / "nothing", folder / "commands"):
        with pytest.raises(HandshakeFailed, match="is no folder"):
            runtime_dir.check_private(path)


# Places


def test_a_place_that_is_too_deep_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = runtime_dir.create_directory(SOCKET_NAMES)
    try:
        assert folder.parent == Path("/tmp")
        assert len(os.fsencode(folder / max(SOCKET_NAMES, key=len))) <= 107
        assert list(long.iterdir()) == []
    finally:
        folder.rmdir()


def test_no_place_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long, open_to_all, full = tmp_path / ("x" * 120), tmp_path / "open", tmp_path / "full"
    for folder in (long, open_to_all, full):
        folder.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setattr(runtime_dir, "places", lambda: iter([tmp_path / "nowhere", long, open_to_all, full]))

    def no_space(**options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", no_space)
    monkeypatch.setattr(runtime_dir, "_own_prefix", lambda: "p")
    monkeypatch.setattr(runtime_dir, "MAX_SOCKET_PATH_BYTES", len(str(long)))
    with pytest.raises(HandshakeFailed) as caught:
        runtime_dir.create_directory(SOCKET_NAMES)
    for fragment in ("nowhere (No such file", "a path of", "sticky bit", "full (No space left", "TMPDIR"):
        assert fragment in str(caught.value)
