"""``parl bench``: measurements of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Every command here is one measurement."""


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


@app.command("engine")
def engine(
    engines: Annotated[
        str, typer.Option(help="Commas between: light, light-exact, transformers, vllm, triton.")
    ] = "light,transformers",
    model: Annotated[
        Path | None, typer.Option(help="Hub folder or .gguf file; default: SmolLM2-135M.")
    ] = None,
    new: Annotated[int, typer.Option(min=1, max=256, help="Greedy tokens a prompt.")] = 32,
    prompts: Annotated[int, typer.Option(min=1, max=50, help="How many of the 50.")] = 50,
    threads: Annotated[int, typer.Option(min=1, help="Of each engine.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option("--json", help="Also write the outcomes.")] = None,
) -> None:
    """Compare engines on one set of weights in fp32; exit 1 when tokens differ but at a tie."""
    import json

    from engine.bench.engines import ENGINES, Process, as_json, compare, hub_folder, table
    from infra.errors import ConfigError

    names = [name.strip() for name in engines.split(",") if name.strip()]
    unknown = [name for name in names if name not in ENGINES]
    if unknown or len(set(names)) != len(names) or not names:
        raise ConfigError(f"--engines {engines}: expected some of {', '.join(ENGINES)}, each once")
    with hub_folder(model) as (folder, ids, label):
        typer.echo(f"{label}; {min(prompts, len(ids))} prompts, {new} new tokens, fp32")
        done = []
        for outcome in compare(names, lambda n: Process(n, folder, threads), ids[:prompts], new):
            done.append(outcome)
            typer.echo(f"{outcome.engine} done, {outcome.num_unexplained} unexplained", err=True)
            if out is not None:
                out.write_text(json.dumps(as_json(done, label, new), indent=1) + "\n")
    for line in table(done):
        typer.echo(line)
    if any(outcome.num_unexplained for outcome in done):
        raise typer.Exit(1)
