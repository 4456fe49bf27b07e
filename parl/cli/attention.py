"""``parl attention``: knobs of sparse attention, found by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def attention() -> None:
    """Keeps ``calibrate-topk`` a word of its own while it is the only command."""


@app.command("calibrate-topk")
def calibrate_topk(
    model: Annotated[Path, typer.Option(help="Hub folder or GGUF file.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text of the kind the model will read.")],
    context: Annotated[int, typer.Option(min=512, help="Tokens of it that are read.")] = 4096,
    window: Annotated[
        int, typer.Option(min=0, help="Newest tokens always read; 0: a quarter, 1024 at most.")
    ] = 0,
    ks: Annotated[str, typer.Option("--k", help="Budgets to try.")] = "16,32,64,128,256,512",
) -> None:
    """Which k your text needs: far attention caught, and hidden numbers found, by k."""
    from engine.bench.kv_topk import calibrate, report
    from engine.chat.load import load_tokenizer
    from engine.model.checkpoint.load import load_model
    from infra.errors import ConfigError

    if not text.is_file():
        raise ConfigError(f"--text {text}: no such file; expected a text of the user's own")
    try:
        budgets = sorted({int(k) for k in ks.split(",")})
    except ValueError:
        budgets = [0]
    if budgets[0] < 1:
        raise ConfigError(f"--k {ks}: expected numbers from 1 on, such as 16,64,256")
    try:
        content = text.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {text} is not UTF-8 ({error.reason}); convert it") from error
    found = calibrate(
        load_model(model).eval(),
        load_tokenizer(model),
        content,
        context=context,
        window=window or min(1024, context // 4),
        ks=budgets,
    )
    for line in report(found):
        typer.echo(line)
