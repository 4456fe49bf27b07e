"""``parl bench``: measurements of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Keeps ``kernels`` a word of its own while it is the only command."""


@app.command("kernels")
def kernels(
    device: Annotated[str, typer.Option(help="Only cuda can be timed.")] = "cuda",
    contexts: Annotated[int, typer.Option(min=1, help="Contexts decoded together.")] = 8,
    context: Annotated[int, typer.Option(min=4096, help="Tokens of each.")] = 32768,
    repeats: Annotated[int, typer.Option(min=1, help="Runs a median is of.")] = 50,
    only: Annotated[str, typer.Option(help="Kernels whose name holds this.")] = "",
    sweep: Annotated[bool, typer.Option(help="Also time other warps and stages.")] = False,
    compile_for: Annotated[
        int, typer.Option("--compile", help="Compile for a CUDA capability (90); needs no GPU.")
    ] = 0,
) -> None:
    """Time the Triton kernels of a decode step against their torch twins."""
    from engine.bench.kernel_cases import Size
    from engine.bench.kernels import compile_all, measure
    from infra.errors import ConfigError

    if device != "cuda" and not compile_for:
        raise ConfigError(
            f"--device {device}: expected cuda; on a CPU the torch twins run, not the kernels"
        )
    size = Size(contexts=contexts, context_length=context // 32 * 32)
    lines = compile_all(compile_for, only) if compile_for else measure(size, repeats, sweep, only)
    for line in lines:
        typer.echo(line)
