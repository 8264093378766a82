"""Puts small faults into a copy of the code, one at a time; the quick tests must find each. `python tools/mutate.py`.

A fault is a text that stands exactly once in its file, and what replaces it. One that the tests do not find (it
"survived") shows where a test is missing, or code that does nothing. Exit status 1 if one survives or does not apply.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import reader_faults
import text_faults

ROOT = Path(__file__).resolve().parent.parent
# In order: what finds most faults soonest. Hypothesis is last, it takes its time to make a failure small.
TESTS = (
    "tests/property/test_book_machine.py::test_many_random_calls",
    "tests/property/test_kept_examples.py",
    "tests/property/test_slow_reader.py",
    "tests/property/test_lagging_runner.py",
    "tests/cases",
    "tests/unit/test_contract_logprobs.py",
    "tests/process/test_logprobs_restart.py",
    "tests/property/test_book_machine.py::test_short_random_calls",
)
TIMEOUT_S = 900  # a fault may make a test wait for ever
ALL_PASSED, SOME_FAILED = 0, 1  # exit statuses of pytest


@dataclass(frozen=True)
class Fault:
    """One fault; `file` as in the repository."""

    name: str
    file: str
    search: str
    replace: str
    tests: tuple[str, ...] = TESTS


RULES, KERNELS, LEDGER, OUTBOX = "worker/rules.py", "worker/kernels.py", "worker/ledger.py", "worker/outbox.py"
LOGPROBS, LOGPROB_KERNELS = "worker/logprobs.py", "worker/logprob_kernels.py"
LOGPROB_STAGING, CHECKPOINT = "ipc/logprob_staging.py", "worker/checkpoint.py"
ROWS, BATCH, STAGING, WIRE = "asyncbook/rows.py", "asyncbook/batch.py", "ipc/staging.py", "ipc/wire.py"

FAULTS = (
    # The rules of a step
    Fault("padding is an id", RULES, "sampled_row[v] != PADDING", "sampled_row[v] != PADDING - 1"),
    Fault("stale handle applied", RULES, "work[GENERATION, row] != generation", "work[GENERATION, row] < generation"),
    Fault("default schedule without drafts", RULES, "work[REMEMBERED, row], 0) + d if", "work[REMEMBERED, row], 0) if"),
    Fault("partial prefill, <= for <", RULES, "if end < work[NO_SPEC, row]", "if end <= work[NO_SPEC, row]"),
    Fault("overscheduled, drafts forgotten", RULES, "end > work[NO_SPEC, row] + d:", "end > work[NO_SPEC, row]:"),
    Fault("overscheduled, >= for >", RULES, "end > work[NO_SPEC, row] + d:", "end >= work[NO_SPEC, row] + d:"),
    Fault("preempted row overscheduled", RULES, "if state == RUNNING and end", "if end"),
    Fault(
        "preempted row computes a prefill",
        RULES,
        "            if work[STATE, row] == RUNNING:\n                work[COMPUTED, row] = work[REMEMBERED, row]\n",
        "            work[COMPUTED, row] = work[REMEMBERED, row]\n",
    ),
    Fault("num_accepted_tokens not reset", RULES, "    work[ACCEPTED, row] = 0\n    is_running", "    is_running"),
    Fault("rejected drafts computed", RULES, "scheduled - (d + 1 - m)", "scheduled - (1 - m)"),
    Fault(
        "computed below 0", RULES, "max(computed + scheduled - (d + 1 - m), 0)", "computed + scheduled - (d + 1 - m)"
    ),
    Fault(
        "remembered computed wraps",
        RULES,
        "min(max(computed + scheduled - (d + 1 - m), 0), INT32_MAX)",
        "max(computed + scheduled - (d + 1 - m), 0)",
    ),
    Fault("remembered computed not kept", RULES, "    work[REMEMBERED, row] = computed\n", ""),
    Fault("drafts for a preempted row", RULES, "work[STATE, row] == RUNNING else", "work[STATE, row] != FINISHED else"),
    Fault("min_tokens, <= for <", RULES, "num_outputs_before < work[MIN", "num_outputs_before <= work[MIN"),
    Fault("last stop id not looked at", RULES, "work[NUM_STOP_IDS, row])", "work[NUM_STOP_IDS, row] - 1)"),
    Fault("full row written behind its end", RULES, "position < max_model_len", "position <= max_model_len"),
    Fault(
        "max_tokens, > for >=", RULES, "work[OUTPUTS, row] >= work[MAX_TOKENS", "work[OUTPUTS, row] > work[MAX_TOKENS"
    ),
    Fault("max_model_len one too early", RULES, "row] >= max_model_len:", "row] >= max_model_len - 1:"),
    Fault(
        "length before stop",
        RULES,
        "    if is_stop_id(work, stop_ids, row, work[OUTPUTS, row] - 1, token_id):\n        return STOP\n"
        "    if work[OUTPUTS, row] >= work[MAX_TOKENS, row]:\n        return LENGTH\n",
        "    if work[OUTPUTS, row] >= work[MAX_TOKENS, row]:\n        return LENGTH\n"
        "    if is_stop_id(work, stop_ids, row, work[OUTPUTS, row] - 1, token_id):\n        return STOP\n",
    ),
    Fault(
        "vocab_size is an id",
        RULES,
        "token_id >= vocab_size:\n            reason",
        "token_id > vocab_size:\n            reason",
    ),
    Fault("bad id committed", RULES, "COMMITTED_TOKENS] += index\n", "COMMITTED_TOKENS] += index + 1\n"),
    Fault("stop_reason of a length", RULES, "token_id if reason == STOP else -1", "token_id"),
    Fault("finish keeps drafts", RULES, "    drop_drafts(work, token_ids, is_token_ids, row)\n    work", "    work"),
    Fault("accepted counts kept ids", RULES, "work[ACCEPTED, row] = v - 1", "work[ACCEPTED, row] = m - 1"),
    Fault("given drafts one too many", RULES, "min(d, given - 1)", "min(d, given)"),
    Fault("round without a draft", RULES, "    if num_draft_tokens == 0:\n        return\n", ""),
    Fault("positions of kept ids", RULES, "for position in range(v - 1)", "for position in range(m - 1)"),
    Fault(
        "emitted counts verified ids",
        RULES,
        "counters[EMITTED_TOKENS] += m\n    row",
        "counters[EMITTED_TOKENS] += v\n    row",
    ),
    Fault("a row's emitted counts verified ids", RULES, "ROW_EMITTED_TOKENS] += m", "ROW_EMITTED_TOKENS] += v"),
    Fault("drafts behind max_model_len", RULES, "min(start + given, max_model_len)", "start + given"),
    Fault("padding is an invalid draft", RULES, "and draft_row[given] != PADDING", "and draft_row[given] != 0"),
    Fault(
        "draft mask not written",
        RULES,
        "position - start]\n        is_token_ids[row, position] = True\n",
        "position - start]\n",
    ),
    # Frames, lists, deliveries
    Fault("retired drafts not touched", KERNELS, "if rules.drop_drafts(", "if not rules.drop_drafts("),
    Fault(
        "given drafts live for ever",
        KERNELS,
        "NUM_VERIFIED_DRAFTS, lists[DRAFTED, index]] = 0",
        "NUM_VERIFIED_DRAFTS, 0] = 0",
    ),
    Fault("history of a frame lost", KERNELS, "history_lengths[slot] = num_touched", "history_lengths[slot] = 0"),
    Fault(
        "own slot's history copied",
        KERNELS,
        "if other != slot:\n                for",
        "if other == slot:\n                for",
    ),
    Fault("touched flag stays", KERNELS, "        work[IS_TOUCHED, row] = 0\n", ""),
    Fault("end without ids not delivered", KERNELS, " or work[FINISH_REASON, row] != 0:", ":"),
    Fault(
        "end outside of a step not touched",
        KERNELS,
        "reason, stop_reason)\n    rules.add_to_list(work, lists, lengths, IS_TOUCHED, TOUCHED, row)\n",
        "reason, stop_reason)\n",
    ),
    Fault(
        "cleared row keeps its mask",
        KERNELS,
        "        token_ids[row, position] = 0\n        is_token_ids[row, position] = False\n",
        "        token_ids[row, position] = 0\n",
    ),
    Fault("cleared row keeps its rounds", KERNELS, "        row_counters[row, index] = 0\n", "        pass\n"),
    Fault(
        "cleared row not touched",
        KERNELS,
        "        row_counters[row, index] = 0\n    rules.add_to_list(work, lists, lengths, IS_TOUCHED, TOUCHED, row)\n",
        "        row_counters[row, index] = 0\n",
    ),
    Fault(
        "id of a full row delivered from the table",
        KERNELS,
        "if output < num_written else",
        "if output <= num_written else",
    ),
    Fault("delivered again", KERNELS, "        work[NUM_DELIVERED, row] = last\n", ""),
    Fault("pending flag stays", KERNELS, "            work[IS_PENDING, row] = 0\n", ""),
    # The life of a row
    Fault("preempt keeps computed", LEDGER, "                self.work[Field.NUM_COMPUTED_TOKENS, row] = 0\n", ""),
    Fault("preempt keeps drafts", LEDGER, "                self.tables.token_ids[row, start:end] = 0\n", ""),
    Fault("preempt not touched", LEDGER, "= start\n                self._touch(row)\n", "= start\n"),
    Fault(
        "resume not touched",
        LEDGER,
        "self.generation[row] = message.generation\n            self._touch(row)\n",
        "self.generation[row] = message.generation\n",
    ),
    Fault(
        "resume remembers the old computed",
        LEDGER,
        "                self.work[Field.REMEMBERED_COMPUTED, row] = message.num_computed_tokens\n",
        "",
    ),
    Fault(
        "admission remembers no computed",
        LEDGER,
        "        work[Field.REMEMBERED_COMPUTED, row] = message.num_computed_tokens\n        work",
        "        work",
    ),
    Fault("admission not touched", LEDGER, "        self._touch(row)\n        ends_by", "        ends_by"),
    Fault(
        "earlier outputs delivered again",
        LEDGER,
        "row] = work[Field.NUM_DELIVERED, row] = outputs.size",
        "row] = outputs.size",
    ),
    Fault(
        "ignore_eos ignores stop ids",
        WIRE,
        "self.stop_token_ids + ([] if self.ignore_eos else self.eos_token_ids)",
        "[] if self.ignore_eos else self.stop_token_ids + self.eos_token_ids",
    ),
    Fault("wider stop ids lose the others", LEDGER, "        wider[:, : self.stop_ids.shape[1]] = self.stop_ids\n", ""),
    Fault(
        "min_tokens at admission, one too early",
        LEDGER,
        "outputs.size - 1 >= work[Field.MIN",
        "outputs.size >= work[Field.MIN",
    ),
    Fault(
        "full row at admission goes on",
        LEDGER,
        "row] >= self.tables.layout.max_model_len:",
        "row] > self.tables.layout.max_model_len:",
    ),
    Fault("prompt mask forgotten", LEDGER, "        if is_prompt_token_ids is not None:\n", "        if False:\n"),
    Fault("released request not aborted", LEDGER, "if effect is Effect.END_AND_CLEAR:", "if effect is Effect.CLEAR:"),
    Fault("abort keeps its end back", LEDGER, "            self.outbox.depart(message.row)\n", ""),
    Fault(
        "departed id of a full row lost",
        OUTBOX,
        "            token_ids = np.append(token_ids, work[Field.LAST_TOKEN_ID, row])\n",
        "            pass\n",
    ),
    Fault(
        "departed ids from the first output",
        OUTBOX,
        "work[Field.NUM_PROMPT_TOKENS, row] + work[_NUM_DELIVERED, row]",
        "work[Field.NUM_PROMPT_TOKENS, row]",
    ),
    Fault("departed row still pending", OUTBOX, "        self._work[Field.IS_PENDING, row] = 0\n", ""),
    Fault("departed delivered again", OUTBOX, "        self._departed.clear()\n", ""),
    # The client
    Fault("rows not lowest first", ROWS, "heapq.heappush(self._free, row.index)", "self._free.append(row.index)"),
    Fault(
        "released row keeps its id",
        ROWS,
        '        """Frees the row."""\n        self.abort(row)\n',
        '        """Frees the row."""\n',
    ),
    Fault("renamed row stays preempted", ROWS, "        held.is_preempted = False\n", "        pass\n"),
    Fault(
        "old handle good after a rename", ROWS, "if held.generation != generation", "if held.generation < generation"
    ),
    Fault(
        "aborted row refuses a rewind",
        ROWS,
        "held.is_preempted != preempted and not held.is_aborted",
        "held.is_preempted != preempted",
    ),
    Fault(
        "nothing scheduled",
        BATCH,
        "np.maximum(fields[BatchField.NUM_DRAFT_TOKENS], 1)",
        "fields[BatchField.NUM_DRAFT_TOKENS]",
    ),
    Fault(
        "a draft too many",
        BATCH,
        "num_draft_tokens, n, 0, num_spec_tokens)",
        "num_draft_tokens, n, 0, num_spec_tokens + 1)",
    ),
    Fault(
        "lost batch slot taken for known",
        BATCH,
        "batch.slot >= 0 and self._batches[batch.slot] is batch",
        "batch.slot >= 0",
    ),
    Fault("ids too wide", STAGING, "0 < width <= max_width", "0 < width <= max_width + 1"),
    Fault("wide id wraps", STAGING, "flat[i] if INT32_MIN <= flat[i] <= INT32_MAX else INT32_MIN", "flat[i]"),
    # Logprobs
    Fault("a row gets what the batch has", LOGPROB_STAGING, "width = min(widths[i], given)", "width = given"),
    Fault("logprobs of another id", LOGPROB_KERNELS, "given[at + 1] != token_id", "given[at + 1] < -1"),
    Fault(
        "a dropped row's logprobs are the next row's",
        LOGPROB_KERNELS,
        "\n        at += num_ids * size\n",
        "\n            at += num_ids * size\n",
    ),
    Fault("NaN is not counted", LOGPROB_KERNELS, "[NAN_LOGPROBS] += has_nan", "[NAN_LOGPROBS] += 0 * has_nan"),
    Fault(
        "missing ones are not counted", LOGPROB_KERNELS, "[MISSING_LOGPROBS] += kept < width", "[MISSING_LOGPROBS] += 0"
    ),
    Fault(
        "infinity is NaN", LOGPROB_KERNELS, "& MAGNITUDE_BITS) > INFINITY_BITS", "& MAGNITUDE_BITS) >= INFINITY_BITS"
    ),
    Fault("what is missing is NaN", LOGPROB_KERNELS, " and table[row, start + j] != MISSING_ID", ""),
    Fault(
        "the sum is the last one",
        LOGPROB_KERNELS,
        "cumulative[row] += table_values[row, start",
        "cumulative[row] = table_values[row, start",
    ),
    Fault(
        "earlier outputs have logprobs to come",
        LEDGER,
        "message.logprobs_width, outputs.size",
        "message.logprobs_width, 0",
    ),
    Fault("logprobs stay in a released row", LOGPROBS, "self.table[row, :size] = 0", "self.table[row, :0] = 0"),
    Fault("the sum stays in a released row", LOGPROBS, "        self.cumulative[row] = 0.0\n", ""),
    Fault(
        "the sum dies with the sidecar",
        CHECKPOINT,
        "            ledger.logprobs.derive_cumulative()",
        "            pass",
    ),
    Fault(
        "the ring has no logprobs", STAGING, "header[_LOGPROBS_WIDTH] = logprobs_width", "header[_LOGPROBS_WIDTH] = 0"
    ),
)


ALL_FAULTS = (
    *FAULTS,
    *(Fault(*fault, tests=faults.TESTS) for faults in (text_faults, reader_faults) for fault in faults.FAULTS),
)


def copy_repository(copy: Path) -> dict[str, str]:
    """Lays code and tests out under `copy` as they are installed, and returns an environment in which they are what is
    imported, also by the sidecar."""
    ignore = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    for folder, target in (("asyncbook", ""), ("ipc", "asyncbook"), ("worker", "asyncbook"), ("tests", "")):
        shutil.copytree(ROOT / folder, copy / target / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)
    # Without byte code: a fault of the same length in the same second would look like the code before it.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    return environment


def path_in(copy: Path, file: str) -> Path:
    """Where a file of the repository lies in the copy."""
    return copy / file if file.startswith("asyncbook/") else copy / "asyncbook" / file


def check_imports(copy: Path, environment: dict[str, str]) -> None:
    """Whether it is really the copy that is imported: the installed package lies in wait behind it."""
    modules = sorted({path_in(copy, fault.file).relative_to(copy).with_suffix("").as_posix() for fault in ALL_FAULTS})
    program = "import importlib, sys; [print(importlib.import_module(name).__file__) for name in sys.argv[1:]]"
    command = [sys.executable, "-P", "-c", program, *(module.replace("/", ".") for module in modules)]
    found = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=True).stdout
    expected = [str(copy / f"{module}.py") for module in modules]
    if found.split() != expected:
        sys.exit(f"not the copy is imported, but {found}")


def run_tests(copy: Path, environment: dict[str, str], tests: Sequence[str]) -> tuple[str, str]:
    """What became of the code under test, "killed" or "survived", and which test said so."""
    tests = [test for test in tests if (copy / test.partition("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    try:
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "killed", f"no end within {TIMEOUT_S} s"
    if run.returncode == ALL_PASSED:
        return "survived", ""
    if run.returncode != SOME_FAILED and run.returncode > 0:
        sys.exit(f"the tests do not run (status {run.returncode}):\n{run.stdout}{run.stderr}")
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "killed", failed[0].split(" ", 1)[1].split(" - ")[0] if failed else f"status {run.returncode}"


def try_fault(fault: Fault, copy: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Puts the fault in, runs the tests, and takes it out again."""
    path = path_in(copy, fault.file)
    source = path.read_text()
    if source.count(fault.search) != 1:
        return "does not apply", f"the text stands {source.count(fault.search)} times in {fault.file}"
    path.write_text(source.replace(fault.search, fault.replace))
    try:
        return run_tests(copy, environment, fault.tests)
    finally:
        path.write_text(source)


def main() -> int:
    """Runs the faults that are asked for, all where nothing is said, and prints what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults whose name or file has one of these in it")
    words = parser.parse_args().words
    faults = [fault for fault in ALL_FAULTS if not words or any(word in fault.name + fault.file for word in words)]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="asyncbook-mutate-") as folder:
        copy = Path(folder)
        environment = copy_repository(copy)
        check_imports(copy, environment)
        for tests in sorted({fault.tests for fault in faults}):
            verdict, why = run_tests(copy, environment, tests)
            if verdict != "survived":
                sys.exit(f"the tests fail without a fault: {why}")
        for fault in faults:
            start = time.monotonic()
            verdict, why = try_fault(fault, copy, environment)
            verdicts.append(verdict)
            seconds = time.monotonic() - start
            print(f"{verdict:14}  {fault.file:19}  {fault.name:42}  {seconds:4.0f} s  {why}", flush=True)
    print(f"{verdicts.count('killed')} of {len(verdicts)} faults were found")
    return 0 if all(verdict == "killed" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
