"""A folder of its own for the sockets of each test, so that what is left in it is this test's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where books put their sockets. Not under `tmp_path`, which is too long for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="ab") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
