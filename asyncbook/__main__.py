"""The command line: `asyncbook bench ...`, `demo`, `doctor`, `serve` and `top`. A command's module is imported when it
is asked for."""

from __future__ import annotations

import importlib
import sys

try:
    import click
except ModuleNotFoundError:

    def main() -> None:
        """Says what is missing."""
        sys.exit('the command line needs click: pip install "asyncbook[cli]"')

else:

    class LazyGroup(click.Group):
        """A group that knows of each command where it lives: "module:attribute"."""

        def __init__(self, name: str, homes: dict[str, str], help: str) -> None:
            super().__init__(name, help=help)
            self._homes = homes

        def list_commands(self, ctx: click.Context) -> list[str]:
            return sorted({*super().list_commands(ctx), *self._homes})

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in self._homes:
                return super().get_command(ctx, cmd_name)
            module, _, attribute = self._homes[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command

    bench = LazyGroup(
        "bench",
        {
            "critical-path": "asyncbook.bench.critical_path:critical_path_command",
            "logprobs": "asyncbook.bench.logprobs:logprobs_command",
            "text": "asyncbook.bench.text:text_command",
            "gpu": "asyncbook.bench.gpu:gpu_command",
            "outputs": "asyncbook.bench.outputs:outputs_command",
            "policies": "asyncbook.bench.policies:policies_command",
            "crossover": "asyncbook.bench.crossover:crossover_command",
            "overlap": "asyncbook.bench.overlap:overlap_command",
            "updates": "asyncbook.bench.updates:updates_command",
            "vllm": "asyncbook.bench.vllm:vllm_command",
        },
        "Benchmarks: all arms side by side in one run, results checked in the same run.",
    )
    commands = {
        "demo": "asyncbook.demo.command:demo_command",
        "doctor": "asyncbook.doctor:doctor_command",
        "serve": "asyncbook.demo.serve_command:serve_command",
        "top": "asyncbook.top:top_command",
    }
    main = LazyGroup("asyncbook", commands, "Token bookkeeping for LLM engines.")
    main.add_command(bench)


if __name__ == "__main__":
    main()
