"""Faults in the text of rows for `mutate.py`: name, file, text, what replaces it; and the tests that must find them."""

TESTS = ("tests/unit/test_stops.py", "tests/unit/test_text.py")
KERNELS, ROWS, STOPS, IDS = "worker/text_kernels.py", "worker/text.py", "worker/stops.py", "worker/detokenize.py"

FAULTS = (
    (
        "a failed match forgets its border",
        KERNELS,
        "            matched = borders[row, start + matched - 1]\n        progress",
        "            matched = 0\n        progress",
    ),
    ("min_tokens ignored", KERNELS, "            if complete >= 0 and counts:", "            if complete >= 0:"),
    (
        "min_tokens, > for >=",
        KERNELS,
        "rows[NUM_OUTPUTS, row] >= rows[MIN_TOKENS, row]",
        "rows[NUM_OUTPUTS, row] > rows[MIN_TOKENS, row]",
    ),
    ("a stop string ends with a stop id", KERNELS, " and not is_stop_id\n", "\n"),
    (
        "a stop id says something",
        KERNELS,
        "    if is_stop_id and rows[INCLUDES_STOP, row] == 0:\n        return False\n",
        "",
    ),
    (
        "a whole stop string held",
        KERNELS,
        "            num_held = max(num_held, progress[row, index])",
        "            num_held = max(num_held, ends[row, index])",
    ),
    ("too high a character", KERNELS, "        elif first == 0xF4:\n            most = 0x8F\n", ""),
    ("a broken run never ends", KERNELS, "        rows[IS_BROKEN, row] = 0\n", ""),
    ("the first space stays", KERNELS, "        if id_bytes[start] == SPACE:\n            start += 1\n", ""),
    (
        "blocks freed that are written on",
        KERNELS,
        "free_blocks(rows, links, free, row, min(position, rows[LENGTH, row]))",
        "free_blocks(rows, links, free, row, position)",
    ),
    (
        "incomplete character twice",
        KERNELS,
        "                rows[NUM_PARTIAL, row] = 0\n            rows[NUM_HELD",
        "            rows[NUM_HELD",
    ),
    (
        "the last of the list wins",
        KERNELS,
        "            if complete < 0:\n                complete = index\n",
        "            complete = index\n",
    ),
    ("a stop string of the last tenant", STOPS, "        self.progress[row] = 0\n", ""),
    ("earlier outputs end it wherever", ROWS, "max(min_tokens, outputs.size - 1)", "min_tokens"),
    (
        "earlier outputs delivered again",
        ROWS,
        "rows[LENGTH, row] if num_delivered_bytes is None",
        "0 if num_delivered_bytes is None",
    ),
    ("the end is searched", ROWS, "            self._rows[NUM_STOPS, row] = 0\n", ""),
    ("a U+FFFD a byte at the end", IDS, "if num_bytes and text.endswith(REPLACEMENT * num_bytes):", "if False:"),
    ("a stream grows", IDS, "        if len(self._pending) == MAX_PENDING_IDS:", "        if False:"),
    (
        "another error hidden",
        IDS,
        "            if not str(error).startswith(INVALID_PREFIX):\n                raise\n            lost",
        "            lost",
    ),
    (
        "broken bytes lost",
        IDS,
        "            lost = self._broken_text()\n            text = self._restart",
        "            text = self._restart",
    ),
    (
        "a prompt without text primes",
        IDS,
        "                if text and not text.endswith(REPLACEMENT):",
        "                if not text.endswith(REPLACEMENT):",
    ),
    ("a reset takes a space off", IDS, "        for priming in (self._any_word, []):", "        for priming in ([],):"),
    (
        "the library is not asked",
        IDS,
        "                return False\n    return True\n\n\ndef _chunks",
        "                pass\n    return True\n\n\ndef _chunks",
    ),
)
