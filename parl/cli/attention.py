"""``parl attention``: knobs of sparse attention, found by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


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


@app.command("train-summaries")
def train_summaries(
    model: Annotated[Path, typer.Option(help="Hub folder or GGUF file.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text of the kind the model will read.")],
    out: Annotated[Path, typer.Option(help="Safetensors file to write.")],
    encoder: Annotated[
        str, typer.Option(help="means, or a sentence encoder for the MLP: minilm, hashing.")
    ] = "means",
    dimension: Annotated[
        int, typer.Option(min=0, help="Dimension the encoder must have; 0: whatever it has.")
    ] = 0,
    documents: Annotated[int, typer.Option(min=2, help="Pieces of the text; one is held.")] = 4,
    length: Annotated[int, typer.Option(min=512, help="Tokens of a piece.")] = 1024,
    window: Annotated[int, typer.Option(min=1, help="Newest tokens always read.")] = 128,
    warm: Annotated[int, typer.Option(min=32, help="Tokens before those that are kept.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Of KL training.")] = 48,
    minutes: Annotated[float, typer.Option(help="Of processor time, at most.")] = 4.0,
) -> None:
    """Train summaries of what is cold: ridge regression, then KL; the model stays as it is."""
    from engine.bench.summary_training import TrainingPlan, encoder_of
    from engine.bench.summary_training import train_summaries as train
    from engine.chat.load import load_tokenizer
    from engine.kvcache.router.encoder import check_encoder
    from engine.model.checkpoint.load import load_model
    from infra.errors import ConfigError

    if encoder not in ("means", "minilm", "hashing"):
        raise ConfigError(f"--encoder {encoder}: expected means, minilm or hashing")
    if not text.is_file():
        raise ConfigError(f"--text {text}: no such file; expected a text of the user's own")
    try:
        content = text.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {text} is not UTF-8 ({error.reason}); convert it") from error
    made = None if encoder == "means" else encoder_of(encoder)
    if made is not None:
        check_encoder(made, dimension or None)
    plan = TrainingPlan(
        documents=documents, length=length, window=window, warm=warm, steps=steps, minutes=minutes
    )
    plan.check()
    base = load_model(model).eval()
    for line in train(base, load_tokenizer(model), content, plan, out, made):
        typer.echo(line)
