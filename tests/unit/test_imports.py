"""Who imports whom: by the contracts of `.importlinter`, and by what a fresh interpreter has loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numba", "llvmlite", "zmq", "asyncio", "numpy", "msgspec", "matplotlib", "tokenizers")


def loaded_after(program: str, cwd: Path) -> set[str]:
    """The modules in a fresh interpreter after the program."""
    tell = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", program + tell], capture_output=True, text=True, cwd=cwd, check=True, timeout=100
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "program", ["import asyncbook", "import asyncbook; asyncbook.__version__; dir(asyncbook)", "import asyncbook.ipc"]
)
def test_import_asyncbook_is_quick(tmp_path: Path, program: str) -> None:
    assert loaded_after(program, tmp_path).isdisjoint(HEAVY)


def test_a_config_and_errors_need_no_compiler(tmp_path: Path) -> None:
    program = (
        "import asyncbook; asyncbook.BookConfig(max_num_reqs=1, max_model_len=1, vocab_size=1); asyncbook.BookFull"
    )
    assert loaded_after(program, tmp_path).isdisjoint({"numba", "llvmlite", "torch", "transformers", "zmq", "asyncio"})


@pytest.mark.parametrize("make", ["open", "spawn"])
def test_a_book_needs_no_torch(tmp_path: Path, make: str) -> None:
    program = f"""
import asyncbook, numpy as np
with asyncbook.{make}(asyncbook.BookConfig(max_num_reqs=4, max_model_len=16, vocab_size=100)) as book:
    book.submit(book.batch([book.admit("a", [1])]), np.array([5], np.int32))
    book.wait_applied(1)
"""
    loaded = loaded_after(program, tmp_path)
    assert loaded.isdisjoint({"torch", "transformers", "matplotlib", "tokenizers", "click", "rich"})
    assert not any(name.startswith(("asyncbook.bench", "asyncbook.demo", "asyncbook.integrations")) for name in loaded)


def test_the_sidecar_imports_only_what_it_needs(tmp_path: Path) -> None:
    # All that asyncbook.worker.__main__ imports sooner or later, and the kernels that it makes ready.
    program = """
import asyncbook.worker.__main__, asyncbook.worker.duty, asyncbook.worker.idle
from asyncbook.ipc import jit
jit.compile_all()
"""
    loaded = loaded_after(program, tmp_path)
    assert {"zmq", "numba", "numpy", "msgspec", "asyncbook.worker.ledger"} <= loaded
    assert loaded.isdisjoint({"torch", "transformers", "asyncio", "matplotlib", "tokenizers", "multiprocessing.pool"})
    ours = {name for name in loaded if name.startswith("asyncbook.")}
    assert {name.split(".")[1] for name in ours} == {"ipc", "worker"}


def test_text_loads_its_library_when_rows_are_made(tmp_path: Path) -> None:
    loaded = loaded_after("import asyncbook.worker.text", tmp_path)
    assert loaded.isdisjoint({"tokenizers", "torch", "transformers", "asyncio"})


def test_the_running_sidecar_has_loaded_no_library_of_torch() -> None:
    import asyncbook
    from asyncbook import BookConfig

    with asyncbook.spawn(BookConfig(max_num_reqs=4, max_model_len=16, vocab_size=100)) as book:
        mapped = Path(f"/proc/{book.sidecar_pid}/maps").read_text()
    assert "libzmq" in mapped
    for library in ("torch", "transformers", "cuda", "_asyncio", "tokenizers"):
        assert library not in mapped


# The sources


@pytest.fixture(scope="module")
def tree() -> Path:
    """The packages as they are installed, in links."""
    subprocess.run([sys.executable, ROOT / "tools" / "link_tree.py"], check=True, timeout=100)
    return ROOT / "build" / "tree"


def test_import_contracts(tree: Path) -> None:
    """The contracts name the direction asyncbook -> worker -> ipc, the only user of zmq and the users of torch."""
    lint = Path(sys.executable).parent / "lint-imports"
    ran = subprocess.run(
        [lint, ROOT / ".importlinter", "--no-cache"],
        capture_output=True,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 broken" in ran.stdout


LIST_IMPORTS = """
import grimp, json
graph = grimp.build_graph("asyncbook", include_external_packages=True, cache_dir=None)
print(json.dumps({module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}))
"""


def test_every_module_keeps_the_direction(tree: Path) -> None:
    """The contracts list modules; this holds for those that are not listed yet, too."""
    pytest.importorskip("grimp")
    ran = subprocess.run(
        [sys.executable, "-P", "-c", LIST_IMPORTS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree)},
        check=True,
        timeout=100,
    )
    imports: dict[str, list[str]] = json.loads(ran.stdout)
    may_import = {"ipc": {"ipc"}, "worker": {"ipc", "worker"}}
    users_of_torch = {"device", "bench", "demo", "integrations"}
    wrong = []
    for module, all_imported in imports.items():
        package = module.split(".")[1] if module.startswith("asyncbook.") else ""
        for imported in all_imported:
            is_ours = imported.startswith("asyncbook.")
            if (
                (is_ours and imported.split(".")[1] not in may_import.get(package, {imported.split(".")[1]}))
                or (imported == "zmq" and module != "asyncbook.ipc.channel")
                or (imported == "torch" and package not in users_of_torch)
                or imported == "pickle"
            ):
                wrong.append((module, imported))
    assert wrong == []
    assert "zmq" in imports["asyncbook.ipc.channel"]
    assert "asyncbook.worker.ledger" in imports


def test_nothing_called_ipc_or_worker_is_installed_beside_the_package() -> None:
    program = "import importlib.util as u; print([u.find_spec(name) is None for name in ('ipc', 'worker')])"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd="/", check=True, timeout=100
    )
    assert ran.stdout.strip() == "[True, True]"
