"""The engine of `asyncbook serve`, a process of its own: model, continuous batching, and a book with a sidecar.

Nothing here makes or sends outputs. The sidecar has them, text included, and the server reads them from there. The loop
lags one step, as that of `runner`; it ends with the server.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import asyncbook
from asyncbook import BookConfig, PeerError
from asyncbook.demo import CannotRun, weights
from asyncbook.demo.bookkeeping import Bookkeeping
from asyncbook.demo.engine import NUM_SPEC_TOKENS, PREFILL_CHUNK, Engine, leave_a_core
from asyncbook.demo.engine_messages import Abort, Failed, Ready, encode, receive_request
from asyncbook.demo.runner import TIMEOUT_S, Plan, Request, Running, Scheduler, launch_step


class Service:
    """Takes requests from the server's end and runs them through the engine."""

    def __init__(self, server: socket.socket, book: Bookkeeping, engine: Engine) -> None:
        self._server, self._book, self._engine = server, book, engine
        self._scheduler = Scheduler(book, engine, ())
        self._step = 0

    def run(self) -> None:
        """Until the server is gone. Without a request it sleeps."""
        while self._take_messages():
            plan = self._scheduler.schedule()
            if plan is not None:
                self._step += 1
                self._run_step(self._step, plan)

    def _take_messages(self) -> bool:
        """All that have come; waits for one where there is nothing else to do. False where the server is gone."""
        has_work = bool(self._scheduler.running or self._scheduler.waiting)
        while select.select([self._server], [], [], 0 if has_work else None)[0]:
            message = receive_request(self._server)
            if message is None:
                return False
            if isinstance(message, Abort):
                self._scheduler.abort(message.request_id)
            else:
                self._scheduler.waiting.append(
                    Request(message.request_id, "", message.prompt_token_ids, message.params)
                )
            has_work = True  # look once more, and do not wait
        return True

    def _run_step(self, step: int, plan: Plan) -> None:
        """Launches it, and only then looks at what the book made of the step before."""
        launched = launch_step(step, self._engine, plan)
        finished: list[Running] = []
        if step > 1:
            self._book.wait_applied(step - 1, TIMEOUT_S)
            finished = self._scheduler.finished(self._book.frame(step - 1))
        self._book.submit(plan.batch, launched.sampled.wait(), draft_token_ids=launched.drafts.wait())
        self._scheduler.retire(finished)


@contextmanager
def tokenizer_file(text: str) -> Iterator[str]:
    """A tokenizer.json without a name: it goes with this process, however that ends. The path is good for other
    processes of this user, too."""
    descriptor = os.memfd_create("tokenizer.json")
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def serve(server: socket.socket, model_name: str, num_rows: int, max_model_len: int) -> None:
    """Loads, says so, and runs until the server is gone."""
    leave_a_core()
    model, tokenizer = weights.load(model_name, torch.device("cpu"))
    engine = Engine(model, num_rows, max_model_len, PREFILL_CHUNK)
    engine.warm_up()
    with tokenizer_file(tokenizer.to_json()) as path:
        config = BookConfig(
            max_num_reqs=num_rows,
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            num_spec_tokens=NUM_SPEC_TOKENS,
            tokenizer=path,
            transport="ring",
            runner_reads_outputs=False,  # the server does
        )
        with asyncbook.spawn(config) as book:
            server.send(encode(Ready(book.address, tokenizer.eos_token_id)))
            Service(server, book, engine).run()


def main() -> None:
    """`python -m asyncbook.demo.engine_process DESCRIPTOR MODEL ROWS MAX_MODEL_LEN`, as `EngineLink.start` does it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server as well, and that decides
    parser = argparse.ArgumentParser()
    parser.add_argument("descriptor", type=int)
    parser.add_argument("model")
    parser.add_argument("num_rows", type=int)
    parser.add_argument("max_model_len", type=int)
    options = parser.parse_args()
    with socket.socket(fileno=options.descriptor) as server:
        try:
            serve(server, options.model, options.num_rows, options.max_model_len)
        except CannotRun as error:
            server.send(encode(Failed(str(error))))
            sys.exit(1)
        except BrokenPipeError:  # the server left while this was loading
            sys.exit(1)
        except PeerError as error:  # no sidecar, or too many that died
            sys.exit(f"the engine ends: {error}")


if __name__ == "__main__":
    main()
