"""`asyncbook doctor`: nothing is wrong where the tests run, and each thing that may be wrong is found and named."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
from click.testing import CliRunner, Result
from rich.console import Console

from asyncbook import BookConfig
from asyncbook import doctor_checks as doctor
from asyncbook.__main__ import main
from asyncbook.doctor import WIDTH, make_table
from asyncbook.doctor_checks import CHECKS, MIB, Finding, run_checks
from asyncbook.ipc import jit, runtime_dir
from asyncbook.ipc.channel import NUM_DESCRIPTORS
from asyncbook.ipc.layout import Layout
from asyncbook.ipc.limits import ADDRESS_SPACE, FILE_SIZE, Limit

SMALL_BOOK = BookConfig(max_num_reqs=4, max_model_len=16, vocab_size=100).layout
LARGE_BOOK = BookConfig(max_num_reqs=1024, max_model_len=131_072, vocab_size=100).layout
PLENTY = 1 << 50


def run_doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def returns(value: Any) -> Callable[[], Any]:
    return lambda: value


def refuse(number: int) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs from machine to machine, and from moment to moment, as it should be."""
    monkeypatch.setattr(doctor, "memory_limits", limits(("the machine", PLENTY)))
    monkeypatch.setattr(doctor, "_usable_cores", returns({0, 1}))
    monkeypatch.setattr(doctor, "_descriptor_limit", returns(20_000))
    monkeypatch.setattr(jit, "is_cached", returns(True))


# The command


@pytest.mark.usefixtures("healthy")
def test_all_is_well_here() -> None:
    findings = run_checks()
    assert [finding.name for finding in findings] == list(CHECKS)
    assert [finding for finding in findings if finding.status != "ok"] == []


@pytest.mark.usefixtures("healthy")
def test_json() -> None:
    ran = run_doctor("--json", "--rows", "4", "--len", "16")
    findings = json.loads(ran.output)
    assert ran.exit_code == 0
    assert [finding["name"] for finding in findings] == list(CHECKS)
    assert all(set(finding) == {"name", "status", "found", "remedy"} for finding in findings)
    assert {finding["status"] for finding in findings} == {"ok"}


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_exit_status(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    monkeypatch.setattr(doctor, "_usable_cores", returns({3}))
    assert run_doctor(*arguments).exit_code == 0, "a warning is no error"
    monkeypatch.setattr(doctor, "_descriptor_limit", returns(20))
    ran = run_doctor(*arguments)
    assert ran.exit_code == 1
    assert "ulimit" in ran.output


def test_a_book_has_two_sizes() -> None:
    ran = run_doctor("--rows", "4")
    assert ran.exit_code == 2
    assert "--rows and --len" in ran.output


def test_the_table_fits_in_80_columns_and_brackets_are_no_markup() -> None:
    findings = [Finding(name, "warning", "/a/long/path" * 20, 'pip install "asyncbook[text]"') for name in CHECKS]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(make_table(findings))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("[text]") == len(CHECKS)


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(layout: Layout | None) -> Finding:
        raise ImportError("libzmq.so.5: cannot open shared object file")

    monkeypatch.setattr(doctor, "CHECKS", {"versions": fail})
    (finding,) = run_checks()
    assert (finding.name, finding.status) == ("versions", "error")
    assert "libzmq.so.5" in finding.found


# The kernel


def test_no_memfd_in_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    finding = doctor.check_memfd(None)
    assert finding.status == "warning"
    assert "/dev/shm" in finding.found
    assert finding.remedy


def test_memfd_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EPERM))
    assert doctor.check_memfd(None).status == "error"


def test_no_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.fcntl, "fcntl", refuse(errno.EINVAL))
    assert doctor.check_memfd(None).status == "warning"


@pytest.mark.parametrize(("call", "check"), [("pidfd_open", doctor.check_pidfd), ("eventfd", doctor.check_eventfd)])
def test_no_descriptor_of_this_kind(monkeypatch: pytest.MonkeyPatch, call: str, check: doctor.Check) -> None:
    monkeypatch.setattr(os, call, refuse(errno.ENOSYS))
    assert check(None).status == "error"
    monkeypatch.delattr(os, call)
    finding = check(None)
    assert (finding.name, finding.status) == (call, "error")
    assert "asyncbook.open" in finding.remedy


# Memory


def limits(*rooms: tuple[str, int]) -> Callable[..., list[Limit]]:
    return lambda: sorted((Limit(name, room, "raise it") for name, room in rooms), key=lambda limit: limit.available)


def test_memory_against_a_book(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(room: int, layout: Layout | None) -> str:
        monkeypatch.setattr(doctor, "memory_limits", limits(("a group", room), (FILE_SIZE, 1), ("the machine", PLENTY)))
        finding = doctor.check_memory(layout)
        assert "a group" in finding.found
        assert finding.status == "ok" or "raise it" in finding.remedy
        return finding.status

    sidecar = doctor.SIDECAR_BYTES
    assert status(sidecar - 1, None) == "error"
    assert status(sidecar, None) == "ok"
    assert status(sidecar + LARGE_BOOK.table_offset - 1, LARGE_BOOK) == "error"
    assert status(sidecar + LARGE_BOOK.table_offset, LARGE_BOOK) == "warning"
    assert status(sidecar + LARGE_BOOK.total_bytes - 1, LARGE_BOOK) == "warning"
    assert status(sidecar + LARGE_BOOK.total_bytes, LARGE_BOOK) == "ok"
    assert status(sidecar + SMALL_BOOK.total_bytes, SMALL_BOOK) == "ok"


@pytest.mark.parametrize(("name", "beside"), [(ADDRESS_SPACE, doctor.SIDECAR_MAPPED_BYTES), (FILE_SIZE, 0)])
def test_limits_of_the_process(monkeypatch: pytest.MonkeyPatch, name: str, beside: int) -> None:
    needed = beside + LARGE_BOOK.total_bytes
    for room, status in ((needed, "ok"), (needed - 1, "error")):
        monkeypatch.setattr(doctor, "memory_limits", limits(("the machine", PLENTY), (name, room)))
        finding = doctor.check_process_limits(LARGE_BOOK)
        assert (finding.status, name in finding.found) == (status, True)
    monkeypatch.setattr(doctor, "memory_limits", limits(("the machine", PLENTY)))
    assert doctor.check_process_limits(LARGE_BOOK).status == "ok"


def test_shm_matters_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_shm_bytes", returns(2 * SMALL_BOOK.total_bytes))
    assert doctor.check_shm(LARGE_BOOK).status == "ok"
    monkeypatch.delattr(os, "memfd_create")
    assert [doctor.check_shm(layout).status for layout in (None, SMALL_BOOK, LARGE_BOOK)] == ["ok", "ok", "error"]
    monkeypatch.setattr(doctor, "_shm_bytes", returns(MIB // 4))
    assert doctor.check_shm(LARGE_BOOK).status == "error"
    monkeypatch.setattr(doctor, "_shm_bytes", returns(None))
    assert doctor.check_shm(None).status == "error"


# The process


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_usable_cores", returns({5}))
    finding = doctor.check_cores(None)
    assert finding.status == "warning"
    assert "shares" in finding.found


def test_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jit, "cache_path", returns(str(tmp_path / "not" / "made" / "yet")))
    monkeypatch.setattr(jit, "is_cached", returns(False))
    finding = doctor.check_kernels(None)
    assert (finding.status, finding.remedy) == ("warning", "the first start takes longer: start a book once")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    finding = doctor.check_kernels(None)
    assert finding.status == "error"
    assert "NUMBA_CACHE_DIR" in finding.remedy
    monkeypatch.setattr(jit, "is_cached", returns(True))
    assert doctor.check_kernels(None).status == "warning"


def test_a_long_runtime_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(runtime_dir, "places", lambda: iter([long, tmp_path / "absent"]))
    finding = doctor.check_runtime_directory(None)
    assert finding.status == "error"
    assert "a path of" in finding.found
    assert "TMPDIR" in finding.remedy
    monkeypatch.setattr(runtime_dir, "places", lambda: iter([long, Path("/tmp")]))
    finding = doctor.check_runtime_directory(None)
    assert finding.status == "warning"
    assert finding.found.startswith("in /tmp")


def test_folders_of_dead_owners_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_dir, "stale_directories", returns([Path("/tmp/a"), Path("/tmp/b")]))
    finding = doctor.check_runtime_directory(None)
    assert finding.status == "ok", "they are removed without anybody's doing"
    assert "2 folders" in finding.found


def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd"))

    def status(left: int) -> str:
        monkeypatch.setattr(doctor, "_descriptor_limit", returns(used + left))
        return doctor.check_descriptors(None).status

    assert status(NUM_DESCRIPTORS // 2) == "error"
    assert status(2 * NUM_DESCRIPTORS) == "warning"
    assert status(8 * NUM_DESCRIPTORS) == "ok"
    monkeypatch.setattr(doctor, "_descriptor_limit", returns(resource.RLIM_INFINITY))
    assert doctor.check_descriptors(None).status == "ok"


# Libraries


def test_what_is_optional_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda module: False)
    for check, extra in ((doctor.check_pinning, "[torch]"), (doctor.check_tokenizers, "[text]")):
        finding = check(None)
        assert finding.status == "ok"
        assert extra in finding.remedy


def test_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from asyncbook.device import api
    from asyncbook.device.fake import FakeDevice

    device = FakeDevice(0)
    monkeypatch.setattr(api, "open_device", lambda name: device)
    monkeypatch.setattr(api, "_count_cuda_devices", returns(1))
    assert doctor.check_pinning(None).found == "memory can be pinned for CUDA"
    monkeypatch.setattr(device, "refuses", "no more memory can be pinned")
    finding = doctor.check_pinning(None)
    assert (finding.status, finding.found) == ("warning", "no more memory can be pinned")
    monkeypatch.setattr(api, "_count_cuda_devices", returns(0))
    assert doctor.check_pinning(None).status == "ok"


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.check_versions(None).found
    assert all(f"{name} " in found for name in ("python", "numpy", "numba", "pyzmq", "libzmq", "msgspec"))
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in ("torch", "msgspec") else "1.0")
    finding = doctor.check_versions(None)
    assert finding.status == "error"
    assert finding.found.endswith("without msgspec")
