"""How a sidecar starts, and what is left when it does not: nothing."""

from __future__ import annotations

import importlib
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import asyncbook
from asyncbook import BookConfig, HandshakeFailed, LayoutMismatch, PeerError
from asyncbook.ipc import channel, wire
from asyncbook.ipc.layout import LAYOUT_VERSION
from asyncbook.process import SidecarProcess
from tests.conftest import KINDS, SMALL, step, tokens
from tests.process.leftovers import children, nothing_left_behind, sockets_folder


@pytest.fixture
def config() -> BookConfig:
    return BookConfig(**SMALL)


@pytest.fixture(autouse=True)
def _everything_is_imported() -> None:
    """What an import keeps open is not what a failed start leaves behind."""
    importlib.import_module("asyncbook.sidecar")


def why_not(config: BookConfig, error: type[PeerError]) -> str:
    """The message of the error. Its traceback, which keeps everything alive, ends here."""
    with pytest.raises(error) as caught:
        asyncbook.spawn(config)
    return str(caught.value)


def program(path: Path, script: str) -> str:
    """A program that stands where the interpreter should."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "embedded"])
def test_a_sidecar_starts_and_ends(runtime_dir: Path, kind: str) -> None:
    config = BookConfig(**(SMALL | KINDS[kind]))
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(config)
        directory = sockets_folder(runtime_dir)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.stat().st_uid == os.getuid()
        assert str(os.getpid()) in directory.name
        assert set(channel.SOCKET_NAMES) <= {path.name for path in directory.iterdir()}
        assert book.sidecar_pid in children()
        row = book.admit("a", [1])
        step(book, [row], [5])
        assert tokens(book, row) == [1, 5]
        book.close()
        del book


def test_books_beside_each_other_are_strangers(config: BookConfig, runtime_dir: Path) -> None:
    with nothing_left_behind(runtime_dir):
        with asyncbook.spawn(config) as one, asyncbook.spawn(config) as other:
            assert one.sidecar_pid != other.sidecar_pid
            assert len(list(runtime_dir.iterdir())) == 4, "sockets and address of each"
            for book, token_id in ((one, 5), (other, 6)):
                row = book.admit("a", [1])
                step(book, [row], [token_id])
                assert tokens(book, row) == [1, token_id]
                assert [outputs.token_ids.tolist() for outputs in book.poll_outputs()] == [[token_id]]
        del one, other, book


# Starts that fail


def test_no_interpreter(config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with nothing_left_behind(runtime_dir):
        assert "/no/such/python" in why_not(config, HandshakeFailed)


def test_an_interpreter_that_may_not_be_run(
    config: BookConfig, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with nothing_left_behind(runtime_dir):
        assert str(tmp_path) in why_not(config, HandshakeFailed)


@pytest.mark.parametrize(
    ("script", "fragments"),
    [
        ("echo no module named asyncbook >&2; exit 3", ["exit status 3", "no module named asyncbook"]),
        ("exit 0", ["exit status 0", "log is empty"]),
        ("kill -KILL $$", ["SIGKILL"]),
        ("kill -SEGV $$", ["SIGSEGV"]),
    ],
)
def test_a_sidecar_that_ends_while_starting(
    config: BookConfig, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str,
    fragments: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", script))
    with nothing_left_behind(runtime_dir):
        message = why_not(config, HandshakeFailed)
    for fragment in ("while starting", *fragments):
        assert fragment in message


def test_a_sidecar_that_is_never_ready(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BookConfig(**SMALL, start_timeout_s=0.2)
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", "exec sleep 1000"))
    with nothing_left_behind(runtime_dir):
        message = why_not(config, HandshakeFailed)
    assert "0.2 s" in message


def before_the_handshake(monkeypatch: pytest.MonkeyPatch, do: Callable[[SidecarProcess], None]) -> None:
    """Does something to the sidecar when it is started and the runner begins to wait for it."""
    shake_hands = SidecarProcess.shake_hands

    def late(self: SidecarProcess, timeout_s: float) -> None:
        do(self)
        shake_hands(self, timeout_s)

    monkeypatch.setattr(SidecarProcess, "shake_hands", late)


def test_killed_while_starting(config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_handshake(monkeypatch, lambda process: os.kill(process.pid, signal.SIGKILL))
    with nothing_left_behind(runtime_dir):
        message = why_not(config, HandshakeFailed)
    assert "while starting" in message
    assert "SIGKILL" in message


def test_an_answer_without_the_token(config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_handshake(monkeypatch, lambda process: setattr(process, "_token", b"another"))
    with nothing_left_behind(runtime_dir):
        assert "token" in why_not(config, HandshakeFailed)


def test_an_answer_that_does_not_decode(config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel.RunnerChannel, "receive_event", lambda self: b"\x80\x04garbage")
    with nothing_left_behind(runtime_dir):
        assert "does not decode" in why_not(config, HandshakeFailed)


@pytest.mark.parametrize(
    ("owner", "fragments"),
    [("asyncbook.ipc.segment", ["layout 99", f"expected {LAYOUT_VERSION}"]), ("asyncbook.process", ["expected 99"])],
    ids=["the sidecar refuses", "the runner refuses"],
)
def test_another_layout(
    config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, owner: str, fragments: list[str]
) -> None:
    monkeypatch.setattr(f"{owner}.LAYOUT_VERSION", 99)
    with nothing_left_behind(runtime_dir):
        message = why_not(config, LayoutMismatch)
    for fragment in fragments:
        assert fragment in message
    assert issubclass(LayoutMismatch, HandshakeFailed)


def test_another_schema(config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = wire.schema_hash()
    monkeypatch.setattr(wire, "schema_hash", lambda: "feedfacefeedface")
    with nothing_left_behind(runtime_dir):
        message = why_not(config, LayoutMismatch)
    assert "feedfacefeedface" in message
    assert ours in message


def test_ctrl_c_while_starting(config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(process: SidecarProcess) -> None:
        raise KeyboardInterrupt

    before_the_handshake(monkeypatch, interrupt)

    def start() -> None:
        with pytest.raises(KeyboardInterrupt):
            asyncbook.spawn(config)

    with nothing_left_behind(runtime_dir):
        start()


def test_a_failed_start_is_no_hindrance_to_the_next(
    config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/such/python")
        why_not(config, HandshakeFailed)
    with asyncbook.spawn(config) as book:
        step(book, [], [])


# Where a sidecar runs, and what it may import


def test_the_sidecar_runs_where_it_is_told() -> None:
    core = max(os.sched_getaffinity(0))
    with asyncbook.spawn(BookConfig(**SMALL, sidecar_cpu=core)) as book:
        assert os.sched_getaffinity(book.sidecar_pid) == {core}
    assert core in os.sched_getaffinity(0)


def test_the_working_directory_is_no_place_to_import_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("msgspec", "zmq", "numpy", "logging", "struct"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    with asyncbook.spawn(BookConfig(**SMALL)) as book:
        step(book, [], [])
    assert not (tmp_path / "imported").exists()
