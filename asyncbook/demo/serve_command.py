"""`asyncbook serve`: a small completion server over the demo's model. Needs `asyncbook[serve]`."""

from __future__ import annotations

import socket

import click

from asyncbook.demo import CannotRun
from asyncbook.demo.engine_messages import MAX_MODEL_LEN

GRACE_S = 2  # for streams that are open when the server is told to end
BACKLOG = 128


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--model", type=click.Choice(["smollm2", "random"]), default="smollm2", show_default=True)
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True, help="Requests that run at a time.")
@click.option("--max-model-len", type=click.IntRange(64, MAX_MODEL_LEN), default=1024, show_default=True)
def serve_command(host: str, port: int, model: str, rows: int, max_model_len: int) -> None:
    """Completes text over HTTP, as OpenAI's API does: POST /v1/completions, GET /v1/models, GET /health.

    The model runs in a process of its own with a book, and this one subscribes to what the book delivers. An example
    of that, on the CPU, greedy; it knows no passwords, so keep it on this machine.
    """
    try:
        import uvicorn

        from asyncbook.demo.engine_link import EngineLink, Setting
        from asyncbook.demo.server import make_app
    except ModuleNotFoundError as error:
        raise click.ClickException(f'{error.name} is missing: pip install "asyncbook[serve]"') from error
    with _bound(host, port) as listener:  # a taken port is known before the model is loaded
        try:
            engine = EngineLink.start(Setting(model, rows, max_model_len))
        except CannotRun as error:
            raise click.ClickException(str(error)) from error
        try:
            listener.listen(BACKLOG)
            at = f"[{host}]" if ":" in host else host
            click.echo(f"http://{at}:{listener.getsockname()[1]} serves {model}, {rows} rows; book at {engine.address}")
            config = uvicorn.Config(make_app(engine), loop="asyncio", timeout_graceful_shutdown=GRACE_S)
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # once everything has ended
            pass
        finally:
            engine.close()


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise click.ClickException(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listener
