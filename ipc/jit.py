"""How kernels are compiled: numba, cached on disk, without the GIL, and compiled anew when any kernel's source changes.

numba's cache looks at one function's own file only; a kernel that calls a rule in another file would stay old when the
rule changes. So the name under which a kernel is cached carries a digest of all kernel sources.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config

KERNEL_SOURCES = {
    "asyncbook.ipc": (
        "columns.py", "jit.py", "layout.py", "logprob_staging.py", "logprobs.py", "prefetch.py", "publish.py",
        "staging.py", "wire.py", "words.py",
    ),
    "asyncbook.worker": (
        "kernels.py", "life.py", "logprob_kernels.py", "rules.py", "scatter_kernels.py", "text_kernels.py", "warm.py",
    ),
}  # fmt: skip


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=6)
    for package, names in KERNEL_SOURCES.items():
        # Found, not imported: the folders lie beside each other in the repository and in one another when installed.
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        folder = Path(spec.submodule_search_locations[0])
        for name in names:
            if (folder / name).exists():
                digest.update((folder / name).read_bytes())
    return digest.hexdigest()


_numba_config: Any = config  # its names are made at run time
logger = logging.getLogger("asyncbook")

SOURCE_DIGEST = _source_digest()
_kernels: list[tuple[Any, tuple[tuple[Any, ...], ...]]] = []
_unready: list[tuple[Any, tuple[tuple[Any, ...], ...]]] = []


def _ensure_cache_folder() -> None:
    """numba caches beside the source, else under the user's cache folder; where neither can be written, a private
    folder of this user under the temporary directory."""
    if _numba_config.CACHE_DIR or os.access(Path(__file__).resolve().parent, os.W_OK):
        return
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        user_cache.mkdir(parents=True, exist_ok=True)
        if os.access(user_cache, os.W_OK):
            return
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"asyncbook-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        # Cached kernels are code: a folder that somebody else can write must not be read.
        folder = Path(tempfile.mkdtemp(prefix="asyncbook-kernels-"))
    _numba_config.CACHE_DIR = str(folder)


_ensure_cache_folder()


# Kernels only read and write the arrays they are given. Without numba's reference counting there is no atomic
# increment a row and rule, which otherwise costs ten times the work. (A kernel that allocates would not compile.)
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False}


def rule(function: Callable[..., Any]) -> Any:
    """A function that only kernels call: compiled into them."""
    return numba.njit(inline="always", **_OPTIONS)(function)


def kernel(*signatures: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Any]:
    """A kernel for exactly these signatures, each a tuple of argument types. `compile_all` compiles it, or loads it
    from the cache; a call with other types is a TypeError, never a compilation in the middle of a step."""

    return _registered(signatures, **_OPTIONS)


def primitive(*signatures: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Any]:
    """A kernel of a few instructions, which keeps the GIL; ready with the others, or at its first call before that."""
    return _registered(signatures, **{**_OPTIONS, "nogil": False})


def _registered(signatures: tuple[tuple[Any, ...], ...], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ = f"{function.__qualname__}_{SOURCE_DIGEST}"
        compiled = numba.njit(cache=True, **options)(function)
        _kernels.append((compiled, signatures))
        _unready.append((compiled, signatures))
        return compiled

    return decorate


def generic_kernel(function: Callable[..., Any]) -> Any:
    """A kernel for whatever types it is called with: compiled at its first call with them, or loaded from the cache,
    and no part of `compile_all`. For functions that others call on their own arrays.

    It keeps the GIL. Giving it back and taking it again costs more than a few rows do, and nobody can change an index
    between its check and the write.
    """
    function.__qualname__ = f"{function.__qualname__}_{SOURCE_DIGEST}"
    return numba.njit(cache=True, **{**_OPTIONS, "nogil": False})(function)


def bare(generic: Any, *argument_types: Any) -> Callable[..., Any]:
    """The machine code of a generic kernel for exactly these types, compiled or loaded right here. A call does not look
    at its arguments, which costs as much as ten of them: for numbers that the caller made itself."""
    generic.compile(argument_types)
    function: Callable[..., Any] = generic.get_overload(argument_types)
    return function


def compile_all() -> None:
    """Makes every kernel of the modules imported so far ready."""
    while _unready:
        compiled, signatures = _unready.pop()
        for signature in signatures:
            if not _load(compiled, signature):
                compiled.compile(signature)
        compiled.disable_compile()


def _load(compiled: Any, signature: tuple[Any, ...]) -> bool:
    """Whether a kernel is ready: as `compile`, which loads from the cache as well, but only after it has made ready for
    compiling. That takes a third of a sidecar's start, and for a cached kernel it is of no use."""
    if signature in compiled.overloads:
        return True
    try:
        found = compiled._cache._load_overload(signature, compiled.targetctx)
    except (AttributeError, OSError):  # another numba, or a cache that cannot be read: the long way
        return False
    if found is None:
        return False
    # For kernels that call this one, should they have to be compiled.
    compiled.targetctx.insert_user_function(found.entry_point, found.fndesc, [found.library])
    compiled.add_overload(found)
    return True


def cache_path() -> str:
    """The folder of the kernel cache."""
    return str(_kernels[0][0].stats.cache_path)


def is_cached() -> bool:
    """Whether every kernel that is not ready yet has been compiled on this machine before, from these very sources."""
    return all(
        any(Path(compiled.stats.cache_path).glob(f"*{compiled.py_func.__qualname__}-*.nbi")) for compiled, _ in _unready
    )


def announce_compilation() -> None:
    """Says that the first start takes longer, where it will."""
    if not is_cached():
        logger.warning("compiling kernels, once per machine (cached in %s)", cache_path())
