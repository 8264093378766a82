"""Group F of the cases from the field: two processes, and what becomes of one without the other. More of each is in
`process/`; here is the input as it was reported."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import BookConfig, BookFull, HandshakeFailed, InFlightFull, SidecarDied
from asyncbook.ipc import limits, runtime_dir, segment, wire
from asyncbook.ipc.channel import SOCKET_NAMES
from asyncbook.ipc.layout import Layout, Word
from asyncbook.ipc.segment import Segment
from tests.conftest import (
    SMALL,
    TIMEOUT_S,
    MakeBook,
    delivered,
    ids_of,
    step,
    stopped_sidecar,
    tables,
    tokens,
    wait_until,
)
from tests.process.kills import kill_runner
from tests.process.leftovers import sockets_folder

SIDECARS = pytest.mark.parametrize("kind", ["sidecar", "ring"])
ONE_SIDECAR = pytest.mark.parametrize("kind", ["sidecar"])
MIB = 1 << 20


@pytest.fixture
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where books put their sockets. Not under `tmp_path`, which is too long for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="ab") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_f1_a_process_that_only_attached_takes_nothing_along() -> None:
    layout = Layout(2, 16, 0, 1)
    program = """
import sys
from asyncbook.ipc.segment import Segment
with Segment.inherit(int(sys.argv[1])) as segment:
    memory = segment.readable()
    print(int(segment.layout.token_ids.view(memory)[1, 3]))
"""
    with Segment.create(layout) as made:
        layout.token_ids.view(made.writable())[1, 3] = 7
        for _ in range(2):
            ran = subprocess.run(
                [sys.executable, "-W", "error", "-c", program, str(made.descriptor)],
                pass_fds=[made.descriptor], capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert (ran.returncode, ran.stdout, ran.stderr) == (0, "7\n", "")
        assert layout.token_ids.view(made.readable())[1, 3] == 7


def test_f2_a_killed_owner_leaves_nothing_and_a_live_neighbour_keeps_all(runtime_folder: Path) -> None:
    with asyncbook.spawn(BookConfig(**SMALL)) as neighbour:
        its_folder = sockets_folder(runtime_folder)
        (runtime_folder / "asyncbook-of-somebody-else").mkdir()
        dead = f"asyncbook-{os.getpid()}-1-{runtime_dir._world()}-aaaaaaaa"  # our number, of a process before us
        (runtime_folder / dead).mkdir()
        for _ in range(3):
            killed = kill_runner("idle", random.Random(0), runtime_folder)
            assert killed.num_left == 0
        with asyncbook.spawn(BookConfig(**SMALL)) as book:
            step(book, [book.admit("a", [1])], [5])
            names = {path.name for path in runtime_folder.iterdir()}
            assert dead not in names
            assert {its_folder.name, Path(neighbour.address).name, "asyncbook-of-somebody-else"} < names
            assert len(names) == 5  # with the new book's two
        step(neighbour, [neighbour.admit("a", [1])], [5])
        assert set(SOCKET_NAMES) <= {path.name for path in its_folder.iterdir()}


def test_f3_too_little_shared_memory_is_an_error_at_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BookConfig(max_num_reqs=256, max_model_len=131_072, vocab_size=100)
    assert config.layout.total_bytes > 128 * MIB
    monkeypatch.delattr(os, "memfd_create")
    docker = limits.Limit("file system /dev/shm", 64 * MIB, "make it larger (docker run --shm-size)")
    monkeypatch.setattr(segment, "space_limit", lambda path: docker)
    for make in (asyncbook.open, asyncbook.spawn):
        with pytest.raises(BookFull) as caught:
            make(config)
        for fragment in (str(config.layout.total_bytes), str(64 * MIB), "/dev/shm", "--shm-size", "max_num_reqs"):
            assert fragment in str(caught.value)
    monkeypatch.undo()
    asyncbook.open(config).close()  # a memfd does not lie in there


def test_f5_a_long_folder_is_passed_over_and_neighbours_get_their_own(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = runtime_folder / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with asyncbook.spawn(BookConfig(**SMALL)) as one, asyncbook.spawn(BookConfig(**SMALL)) as other:
        folders = [book._channel.directory for book in (one, other)]
        assert len(set(folders)) == 2
        for book, folder, token_id in zip((one, other), folders, (5, 6), strict=True):
            assert len(os.fsencode(folder / max(SOCKET_NAMES, key=len))) <= 107
            assert f"-{os.getpid()}-" in folder.name
            row = book.admit("a", [1])
            step(book, [row], [token_id])
            assert delivered(book)["a"].token_ids == [token_id]
    assert not any(folder.exists() for folder in folders)
    assert list(long.iterdir()) == []


def test_f5_no_folder_is_a_clear_error_at_start(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = runtime_folder / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(runtime_dir, "places", lambda: iter([long]))
    with pytest.raises(HandshakeFailed, match=r"107 bytes.*TMPDIR"):
        asyncbook.spawn(BookConfig(**SMALL))


@SIDECARS
def test_f7_a_stopped_consumer_blocks_nobody_and_loses_nothing(make_book: MakeBook) -> None:
    book = make_book(fresh=True, max_num_reqs=512, vocab_size=1000)
    rows = [book.admit(str(index), [1]) for index in range(512)]
    batch, ids = book.batch(rows), np.arange(512, dtype=np.int32)  # 2 kB a step
    number, refused = step(book, batch, ids), 0
    with stopped_sidecar(book):
        for _ in range(5000):
            try:
                number = book.submit(batch, ids)
            except InFlightFull:
                refused += 1
        assert refused == 5000 - book.config.max_in_flight
        with pytest.raises(asyncbook.SidecarTimeout):
            book.wait_room(0.01)
    book.wait_applied(number, TIMEOUT_S)
    assert all(len(request.token_ids) == 3 for request in delivered(book).values())


@SIDECARS
def test_f7_everything_arrives_that_is_sent_right_after_the_start(make_book: MakeBook) -> None:
    book = make_book(fresh=True, max_model_len=2000)
    row = book.admit("a", [1])
    batch = book.batch([row])
    for index in range(1000):
        book.wait_room(TIMEOUT_S)
        number = book.submit(batch, ids_of([index % 100]))
    book.wait_applied(number, TIMEOUT_S)
    assert delivered(book)["a"].token_ids == [index % 100 for index in range(1000)]


@pytest.mark.parametrize("moment", ["idle", "busy, ring", "spawned in a thread"])
def test_f8_the_sidecar_of_a_killed_runner_is_gone(runtime_folder: Path, moment: str) -> None:
    killed = kill_runner(moment, random.Random(1), runtime_folder)
    assert (killed.num_left, killed.num_stale, killed.num_files) == (0, 0, 0)


def test_f8_a_runner_killed_at_once_after_the_start(runtime_folder: Path) -> None:
    for seed in range(3):
        killed = kill_runner("starting", random.Random(seed), runtime_folder)
        assert (killed.num_left, killed.num_files) == (0, 0)


def test_f8_the_sidecar_outlives_the_thread_that_started_it() -> None:
    books: list[Any] = []
    thread = threading.Thread(target=lambda: books.append(asyncbook.spawn(BookConfig(**SMALL))))
    thread.start()
    thread.join()
    with books[0] as book:
        row = book.admit("a", [1])
        step(book, [row], [5])
        assert tokens(book, row) == [1, 5]


@SIDECARS
def test_f10_three_who_wait_for_a_killed_sidecar_all_raise(make_book: MakeBook) -> None:
    book = make_book(fresh=True, restart="fail")
    batch = book.batch([book.admit("a", [1])])
    step(book, [], [])
    pid = book.sidecar_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    number = book.submit(batch, ids_of([5]))

    async def wait_three_times() -> list[Any]:
        async def outputs() -> None:
            async for _ in book.outputs():
                pass

        waits = [asyncio.ensure_future(wait) for wait in (book.applied(number), book.applied(number), outputs())]
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), TIMEOUT_S)

    errors = asyncio.run(wait_three_times())
    assert [type(error) for error in errors] == [SidecarDied] * 3
    assert all("SIGKILL" in str(error) for error in errors)
    calls = (lambda: book.admit("b", [1]), lambda: book.wait_applied(number), lambda: book.submit(batch, ids_of([6])))
    for call in calls:
        with pytest.raises(SidecarDied):
            call()


@ONE_SIDECAR
def test_f10_a_live_sidecar_is_not_taken_for_dead(make_book: MakeBook) -> None:
    """It is slow, stopped, and woken again: its end is what the kernel says, not what a clock says."""
    book = make_book(fresh=True, restart="fail")
    pid = book.sidecar_pid
    batch = book.batch([book.admit("a", [1])])
    with stopped_sidecar(book):
        number = book.submit(batch, ids_of([5]))
        with pytest.raises(asyncbook.SidecarTimeout):
            book.wait_applied(number, 0.2)
    book.wait_applied(number, TIMEOUT_S)
    assert book.sidecar_pid == pid


@SIDECARS
def test_f11_an_idle_sidecar_sleeps(make_book: MakeBook) -> None:
    """What it used of a core is asked of the kernel once it says that it sleeps: nothing more comes to it."""
    book: Any = make_book(fresh=True)
    step(book, [], [])
    is_sleeping = book._layout.words.view(book._segment.readable())
    wait_until(lambda: bool(is_sleeping[Word.IS_SLEEPING]), "the sidecar sleeps")

    def ticks() -> int:
        fields = Path(f"/proc/{book.sidecar_pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    threading.Event().wait(2.0)
    assert ticks() - before <= 2  # of 200
    assert is_sleeping[Word.IS_SLEEPING]
    assert BookConfig(**SMALL).spin_us <= 1000


def test_f12_a_runner_that_forks_by_habit(tmp_path: Path) -> None:
    """The start method is fork, a thread holds a lock, zmq is in use: the sidecar is a fresh process all the same."""
    program = f"""
import multiprocessing, threading, zmq
multiprocessing.set_start_method("fork")
context = zmq.Context.instance()
socket = context.socket(zmq.PAIR)
lock = threading.Lock()
hold = lambda: (lock.acquire(), threading.Event().wait())
threading.Thread(target=hold, daemon=True).start()
import asyncbook, numpy as np, os
with asyncbook.spawn(asyncbook.BookConfig(**{SMALL!r})) as book:
    row = book.admit("a", [1])
    book.wait_applied(book.submit(book.batch([row]), np.array([5], np.int32)), 20)
    maps = open(f"/proc/{{book.sidecar_pid}}/maps").read()
    print(book.token_ids(row).tolist(), "torch" in maps, "cuda" in maps, flush=True)
os._exit(0)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (ran.stdout.strip() or ran.stderr) == "[1, 5] False False"


@SIDECARS
def test_f14_a_row_is_whole_when_its_step_is_seen(make_book: MakeBook) -> None:
    """x86 does not reorder these stores; `unit/test_publish.py` reads the machine code for the processors that do."""
    book = make_book(max_model_len=1000)
    row = book.admit("a", [1])
    batch = book.batch([row])
    token_ids, _ = tables(book)
    for number in range(500):
        book.wait_room(TIMEOUT_S)
        submitted = book.submit(batch, ids_of([number % 90 + 1]))
        while book.applied_step < submitted:
            pass
        count = int(book.frame(submitted).num_tokens[row.index])
        assert count == number + 2
        assert token_ids[row.index, count - 1] == number % 90 + 1


def test_f15_a_token_s_index_beyond_int32() -> None:
    layout = Layout(max_num_reqs=599, max_model_len=3_600_000, num_spec_tokens=0, max_in_flight=1)
    index = 598 * layout.token_ids.shape[1]
    assert index == 598 * 3_600_000 == 2_152_800_000 > np.iinfo(np.int32).max
    config = BookConfig(max_num_reqs=599, max_model_len=3_600_000, vocab_size=100, max_in_flight=1)
    with asyncbook.open(config) as book:
        rows = [book.admit(str(index), [1]) for index in range(599)]
        step(book, [rows[598]], [7])
        assert book.token_ids(rows[598]).tolist() == [1, 7]
        assert int(tables(book)[0][598, 1]) == 7
        assert [book.token_ids(row).tolist() for row in rows[:598]] == [[1]] * 598


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@SIDECARS
def test_f16_a_pickle_is_counted_and_runs_nothing(make_book: MakeBook, tmp_path: Path) -> None:
    book: Any = make_book()
    row = book.admit("a", [1])
    step(book, [row], [5])
    before = book.stats().bad_messages
    trap = tmp_path / "sprung"
    assert book._channel.send_command(pickle.dumps(_Trap(trap)))
    step(book, [row], [6])
    assert not trap.exists()
    assert book.stats().bad_messages == before + 1
    assert tokens(book, row) == [1, 5, 6]
    assert book._channel.directory.stat().st_mode & 0o777 == 0o700
    with pytest.raises(asyncbook.AsyncbookError):
        wire.decode_event(pickle.dumps(_Trap(trap)))
