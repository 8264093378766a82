"""A process that reads a book's outputs to their end, for `asyncbook bench outputs`:

    python -m asyncbook.bench.outputs_reader ADDRESS

It says "ready", and in the end what it got and what that cost, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import asyncbook


def main(address: str) -> None:
    """Until the book is closed."""
    num_ids = total = num_deliveries = max_lag_bytes = 0
    with asyncbook.subscribe(address) as subscription:
        print("ready", flush=True)
        before_s = time.process_time()
        try:
            while subscription.wait_outputs():
                max_lag_bytes = max(max_lag_bytes, subscription.lag_bytes)
                for outputs in subscription.poll_outputs():
                    num_deliveries += 1
                    num_ids += outputs.token_ids.size
                    total += int(outputs.token_ids.sum(dtype="int64"))
        except asyncbook.BookClosed:
            pass
        used_s = time.process_time() - before_s
    print(
        json.dumps(
            {
                "num_ids": num_ids,
                "sum_of_ids": total,
                "num_deliveries": num_deliveries,
                "max_lag_bytes": max_lag_bytes,
                "cpu_s": used_s,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
