"""Trios for this folder: a sidecar takes most of a second to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.property.trio import TrioPool


@pytest.fixture(scope="session")
def trio_pool() -> Iterator[TrioPool]:
    """The trios of this run."""
    pool = TrioPool()
    yield pool
    pool.close()
