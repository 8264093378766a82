"""Who may talk to a book: processes of its user, in a folder of its own, with the token. And what they may say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

import asyncbook
from asyncbook import BookConfig, HandshakeFailed
from asyncbook.ipc import wire
from asyncbook.ipc.channel import SOCKET_NAMES
from asyncbook.process import SidecarProcess
from tests.conftest import SMALL, MakeBook, ids_of, step, tables, tokens, wait_until
from tests.process.leftovers import sockets_folder

ROOT = Path(__file__).resolve().parents[2]
STRANGER = """
import os, sys, zmq
from zmq.utils.monitor import recv_monitor_message
os.setuid(int(sys.argv[2]))
socket = zmq.Context().socket(zmq.PAIR)
monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
socket.connect("ipc://" + sys.argv[1])
print(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED, flush=True)
os._exit(0)
"""


def is_let_in(path: Path, uid: int) -> bool:
    """Whether a process of this user can talk to the socket."""
    ran = subprocess.run(
        [sys.executable, "-c", STRANGER, str(path), str(uid)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return {"True": True, "False": False}[ran.stdout.strip()]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_turned_away(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that gets into the folder: the kernel says who connects."""
    said: list[bool] = []

    def look(self: SidecarProcess, timeout_s: float) -> None:
        self.kill()  # its place at the sockets is free
        runtime_dir.chmod(0o755)
        folder = sockets_folder(runtime_dir)
        folder.chmod(0o755)
        for name in SOCKET_NAMES:
            (folder / name).chmod(0o777)
            said.append(is_let_in(folder / name, 65534))
        wait_until(lambda: is_let_in(folder / "events", 0), "the place is free, and the same user gets in")
        raise HandshakeFailed("seen enough")

    monkeypatch.setattr(SidecarProcess, "shake_hands", look)
    with pytest.raises(HandshakeFailed, match="seen enough"):
        asyncbook.spawn(BookConfig(**SMALL))
    assert said == [False, False]


def test_a_sidecar_refuses_a_folder_that_others_may_enter(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = SidecarProcess._start

    def opened(self: SidecarProcess, *descriptors: int) -> Any:
        folder = sockets_folder(runtime_dir)
        folder.chmod(0o755)
        return start(self, *descriptors)

    monkeypatch.setattr(SidecarProcess, "_start", opened)
    with pytest.raises(HandshakeFailed, match="mode 755"):
        asyncbook.spawn(BookConfig(**SMALL))


@pytest.mark.parametrize("kind", ["sidecar"])
def test_a_second_peer_gets_nothing_and_disturbs_nobody(make_book: MakeBook) -> None:
    book: Any = make_book(fresh=True)
    row = book.admit("a", [1])
    with zmq.Context() as context, context.socket(zmq.PAIR) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"ipc://{book._channel.directory / 'commands'}")
        step(book, [row], [5])
        assert not stranger.poll(200)
    assert tokens(book, row) == [1, 5]


def test_a_message_longer_than_any_of_a_runner_is_not_taken(runtime_dir: Path) -> None:
    """The socket breaks off, whoever sent it, and nothing of it is kept. A runner's own are all shorter: see below."""
    book: Any = asyncbook.spawn(BookConfig(**SMALL, restart="fail"))
    number = step(book, [], [])
    longest = wire.max_command_bytes(book.config.layout)
    assert longest < 2**22
    assert book._channel.send_command(b"\xc1" * (longest + 1))
    with pytest.raises((asyncbook.SidecarTimeout, asyncbook.InFlightFull)):
        book.wait_applied(book.submit(book.batch([]), ids_of([])), 0.3)
    assert (book.applied_step, book.stats().bad_messages) == (number, 0)
    book.close()
    assert list(runtime_dir.iterdir()) == []


def test_no_message_of_a_runner_is_longer() -> None:
    for rows, length, drafts in ((1, 1, 0), (7, 5000, 3), (256, 8, 255), (4096, 100, 1)):
        config = BookConfig(max_num_reqs=rows, max_model_len=length, vocab_size=10, num_spec_tokens=drafts)
        longest = wire.max_command_bytes(config.layout)
        big = 2**31 - 1
        ids, mask = (memoryview(bytes(size * length)) for size in (4, 1))
        name = "x" * wire.MAX_REQUEST_ID_BYTES
        stop_ids = [big] * wire.MAX_STOP_IDS
        batch = memoryview(bytes(16 * rows))
        sampled, given = memoryview(bytes(4 * rows * (1 + drafts))), memoryview(bytes(4 * rows * drafts))
        messages = [
            wire.Admit(
                2**62,
                rows,
                2**32 - 1,
                big,
                name,
                ids,
                memoryview(b""),
                mask,
                length,
                big,
                big,
                stop_ids,
                [],
                False,
                ["x"] * wire.MAX_STOP_BYTES,
            ),
            wire.DescribeBatch(2**62, 31, batch),
            wire.Step(2**62, 2**62, 31, 1 + drafts, sampled, drafts, given),
            wire.Restore(
                2**62,
                [wire.RestoredRow(rows, "r" * 70, [big] * 20, ["xyz"] * 9, False, True)] * rows,
                [wire.RestoredBatch(31, batch)] * 32,
            ),
        ]
        assert max(len(wire.encode(message)) for message in messages) <= longest


# What may be written


@pytest.mark.parametrize("kind", ["sidecar", "ring"])
def test_a_runner_cannot_write_what_the_sidecar_keeps(make_book: MakeBook) -> None:
    book: Any = make_book()
    row = book.admit("a", [1])
    step(book, [row], [5])
    frame = book.frame()
    for view in (*tables(book), book.token_ids(row), frame.num_tokens, frame.finish_reason, book._counters):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    writable = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "asyncbook" in line and line.split()[1][1] == "w"
    ]
    sizes = {int(end, 16) - int(start, 16) for start, end in (fields[0].split("-") for fields in writable)}
    assert book._layout.runner_end - book._layout.runner_offset in sizes
    assert book._layout.total_bytes not in {
        size
        for fields, size in zip(writable, sizes, strict=False)
        if fields[-2] == str(os.fstat(book._segment.descriptor).st_ino)
    }


def test_nothing_is_pickled() -> None:
    """No module of the core imports what unpickles."""
    unpickle = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "joblib"}
    found = set()
    for path in [*ROOT.glob("ipc/*.py"), *ROOT.glob("worker/*.py"), *ROOT.glob("asyncbook/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            calls = ("recv_pyobj", "send_pyobj", "allow_pickle")
            names += ["pickle" for call in calls if isinstance(node, ast.Attribute) and node.attr == call]
            found |= {(path.name, name) for name in names if name.split(".")[0] in unpickle}
    assert found == set()
