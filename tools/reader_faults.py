"""Faults in what other processes read, for `mutate.py`: name, file, text, replacement; and the tests that find it."""

TESTS = (
    "tests/unit/test_broadcast.py",
    "tests/process/test_attach.py",
    "tests/process/test_subscribe.py",
    "tests/property/test_crashes.py",
    "tests/process/test_faults.py",
)
BROADCAST, DUTY = "ipc/broadcast.py", "worker/duty.py"

FAULTS = (
    (
        "what the predecessor did not broadcast is never broadcast",
        "ipc/outputs_log.py",
        "            self._broadcast_rest(outputs, overflow, self.broadcast.last_number_since(broadcast, number))\n",
        "            pass\n",
    ),
    (
        "nobody looks whether a record was overwritten",
        BROADCAST,
        "is_there = self._reserved_word.load_acquire() - self.position <= self._ring.num_lines",
        "is_there = True",
    ),
    (
        "overwriting is announced too late",
        BROADCAST,
        "self._reserved_word.store_release(self.written + num_lines)",
        "self._reserved_word.store_release(self.written)",
    ),
    (
        "a log that begins anew has no number",
        BROADCAST,
        "        self._start_number_word.store_release(number)\n",
        "",
    ),
    ("requests are not named", DUTY, "                self._subscribers.announce(message)\n", "                pass\n"),
    (
        "a released row is not marked",
        "worker/ledger.py",
        "        tables.released_generations[row] = message.generation\n",
        "",
    ),
    (
        "a frame holds for one step too long elsewhere",
        "asyncbook/attached.py",
        "applied_step - step >= self._frames.num_frames - 1",
        "applied_step - step >= self._frames.num_frames",
    ),
    (
        "a subscriber is answered before the requests are known",
        "worker/subscribers.py",
        "        if not self._knows_requests:\n",
        "        if False:\n",
    ),
)
