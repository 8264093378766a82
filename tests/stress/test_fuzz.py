"""The fuzzer of `tests/fuzz.py` for long: `make stress`.

ASYNCBOOK_STRESS_OPERATIONS is how many messages are mutated, a million where nothing is said; ASYNCBOOK_STRESS_SEED is
the first seed. What was tried is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fuzz
from tests.stress.test_book_machine_long import NUM_OPERATIONS, SEED

MESSAGES_A_SEED = 20_000  # a seed starts with a new book
CHECK_EVERY = 20  # a fault stays in the book and is found then; each seed's first messages are looked at one by one
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.stress, pytest.mark.timeout(7200)]


def test_a_million_mutated_messages() -> None:
    num_mutated = num_applied = num_bad = num_gaps = num_records = 0
    seed = SEED
    while num_mutated < NUM_OPERATIONS:
        for count, check_every in ((MESSAGES_A_SEED // 20, 1), (MESSAGES_A_SEED, CHECK_EVERY)):
            fuzzed = fuzz.run(seed, min(count, NUM_OPERATIONS), check_every=check_every)
            num_mutated += min(count, NUM_OPERATIONS)
            num_applied += fuzzed.num_applied
            num_bad += fuzzed.num_bad
            num_gaps += fuzzed.num_gaps
            num_records += fuzzed.num_records
        seed += 1
    print(
        f"\n{num_mutated:,} mutated messages and as many right ones: {num_applied:,} applied, {num_bad:,} refused, "
        f"{num_gaps:,} out of order, {num_records:,} deliveries, 0 crashes; seeds {SEED} to {seed - 1}"
    )


def test_many_mutated_restores() -> None:
    num_mutated = max(50, NUM_OPERATIONS // 200)
    num_taken = fuzz.run_restores(SEED, num_mutated)
    print(f"\n{num_mutated:,} mutated restores, {num_taken:,} taken, 0 crashes; seed {SEED}")


PROGRAM = """
import sys
import numba
from tests import fuzz
assert numba.core.config.BOUNDSCHECK == 1
fuzzed = fuzz.run(int(sys.argv[1]), int(sys.argv[2]), check_every=10)
print(fuzzed.num_applied, fuzzed.num_bad)
"""


def test_no_index_of_a_kernel_is_out_of_bounds(tmp_path: Path) -> None:
    """Kernels compiled with a check of every index, in a cache of their own."""
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    num_mutated = max(1000, NUM_OPERATIONS // 10)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(SEED), str(num_mutated)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=7000,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    num_applied, num_bad = map(int, ran.stdout.split())
    assert num_applied > num_mutated // 3
    print(f"\n{num_mutated:,} mutated messages with every index checked: {num_applied:,} applied, {num_bad:,} refused")
