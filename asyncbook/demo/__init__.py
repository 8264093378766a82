"""A small continuous-batching engine on a real model, run three ways: per-row loop, embedded book, sidecar book.

`command` is the command line; `runner` is the engine's loop, the part to read first.
"""


class CannotRun(Exception):
    """What was asked for cannot run here; the message says why."""
