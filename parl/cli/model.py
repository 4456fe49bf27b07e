"""``parl model``: checkpoints in and out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from parl.cli.model_files import bring_tokenizer, kept_fields, require_empty

if TYPE_CHECKING:
    from engine.model.config import ModelConfig

app = typer.Typer(no_args_is_help=True)

Source = Annotated[Path, typer.Argument(help="Hub folder, or a Llama-family .gguf file.")]
Target = Annotated[Path, typer.Argument(help="New or empty folder.")]


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


@app.command("info")
def info(
    model: Annotated[
        str, typer.Argument(help="Hub folder, .gguf file, or kimi-k2.5, kimi-k2-0905, demo ...")
    ],
    context: Annotated[
        int, typer.Option(help="Tokens before the one whose work is told.", min=0)
    ] = 4096,
) -> None:
    """Shape, parameters, work and cache of a model. Reads no tensors."""
    from engine.model.account import account

    config, stored = _config_of(model)
    costs = account(config)
    lines = [
        f"{config.attention.kind}, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"{config.num_attention_heads} heads, vocabulary {config.vocab_size}, "
        f"{config.max_position_embeddings} positions",
        f"parameters    {_count(costs.total)}, active {_count(costs.active)} "
        f"({_count(costs.active_without_embedding)} without the input embedding)",
        f"work          {_count(costs.flops(context))}FLOP for the token after {context}",
        f"KV cache      {costs.cache_bytes} bytes a token in bf16, {costs.cached_values} numbers a "
        "layer",
    ]
    if config.num_moe_layers:
        lines.insert(
            1,
            f"experts       {config.n_routed_experts} of which {config.num_experts_per_tok}, "
            f"{config.n_shared_experts} shared, in {config.num_moe_layers} layers, "
            f"{_count(costs.expert)} each",
        )
    if stored:
        lines.append(f"stored as     {stored}")
    typer.echo("\n".join(lines))


@app.command("convert")
def convert(
    source: Source,
    target: Target,
    dtype: Annotated[Dtype, typer.Option(help="Of the new tensors.")] = Dtype.bfloat16,
    model_type: Annotated[
        str, typer.Option("--type", help="kimi_k2, deepseek_v3, llama, parl_k25; default: fitting.")
    ] = "",
    shard_gib: Annotated[float, typer.Option(help="Largest file in GiB.", min=0.001)] = 4.0,
) -> None:
    """Write a checkpoint as a safetensors hub folder: INT4, FP8 and GGUF are dequantised."""
    from engine.model.checkpoint.load import DTYPES, open_checkpoint
    from engine.model.checkpoint.save import convert as run

    require_empty(target)
    config, tensors = open_checkpoint(source)
    notes: list[str] = []
    written = run(
        config,
        tensors,
        target,
        dtype=DTYPES[dtype.value],
        model_type=model_type or None,
        max_shard_bytes=int(shard_gib * 1024**3),
        extra=kept_fields(source),
        beside=lambda folder: notes.extend(bring_tokenizer(source, folder)),
    )
    size = sum(path.stat().st_size for path in written)
    typer.echo(f"wrote {len(written)} files, {size / 1024**2:.1f} MiB, to {target}")
    for note in notes:
        typer.echo(note)


@app.command("verify")
def verify(
    source: Source,
    reference: Annotated[
        bool, typer.Option("--reference", help="Also compare logits with transformers' model.")
    ] = False,
) -> None:
    """Names, shapes, numbers and a forward pass; exit 1 when something is wrong."""
    import torch

    from engine.model.checkpoint.load import load_model
    from engine.model.dense import forward_dense

    model = load_model(source)
    config = model.config
    tensors = len(model.state_dict())
    typer.echo(f"{tensors} tensors are there, of the right shape, finite")
    generator = torch.Generator().manual_seed(0)
    length = min(32, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (1, length), generator=generator)
    with torch.no_grad():
        hidden, _ = forward_dense(model, ids, torch.ones_like(ids, dtype=torch.bool))
        logits = model.logits(hidden)
    if not bool(torch.isfinite(logits).all()):
        _broken(f"{source}: logits of {length} random tokens are not finite; the weights overflow")
    typer.echo(f"logits of {length} random tokens are finite, largest {logits.abs().max():.2f}")
    if reference:
        from engine.model.checkpoint.reference import reference_logits

        difference = float((logits - reference_logits(source, ids)).abs().max())
        typer.echo(f"largest difference from transformers {difference:.1e}")
        if difference > 1e-4 * max(1.0, float(logits.abs().max()) / 4):
            _broken(f"{source}: logits differ from transformers' by {difference:.1e}")


@app.command("upcycle")
def upcycle(
    source: Source,
    target: Target,
    experts: Annotated[int, typer.Option(help="Routed experts in a layer.", min=1)] = 8,
    top_k: Annotated[int, typer.Option(help="Experts a token goes to.", min=1)] = 2,
    shared: Annotated[float, typer.Option(help="Share of the output of a shared expert.")] = 0.0,
    dense_layers: Annotated[int, typer.Option(help="First layers that stay dense.", min=0)] = 0,
    noise: Annotated[float, typer.Option(help="Noise of the copies, in their spread.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of router and noise.", min=0)] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the new tensors.")] = Dtype.float32,
) -> None:
    """Turn a dense model into a mixture of experts with the same logits (noise 0)."""
    from engine.model.checkpoint.load import DTYPES, load_model
    from engine.model.checkpoint.save import save_model
    from engine.model.model import count_parameters
    from engine.model.upcycle import upcycle as run

    require_empty(target)
    dense = load_model(source, dtype=DTYPES[dtype.value])
    model = run(
        dense,
        experts,
        top_k,
        shared=shared,
        num_dense_layers=dense_layers,
        noise=noise,
        seed=seed,
    )
    notes: list[str] = []
    save_model(
        model,
        target,
        extra=kept_fields(source),
        beside=lambda folder: notes.extend(bring_tokenizer(source, folder)),
    )
    typer.echo(
        f"{_count(count_parameters(dense))} dense -> {_count(count_parameters(model))} in "
        f"{model.config.num_moe_layers} expert layers, {experts} of which {top_k}; wrote {target}"
    )
    for note in notes:
        typer.echo(note)


@app.command("export-triton")
def export_triton(
    model: Annotated[Path, typer.Argument(help="Hub folder.")],
    repository: Annotated[Path, typer.Argument(help="Model repository to write into.")],
    max_context: Annotated[int, typer.Option(help="Tokens a context may hold.", min=1)] = 512,
    max_contexts: Annotated[int, typer.Option(help="Contexts open at once.", min=1)] = 1024,
    link: Annotated[
        bool, typer.Option("--link", help="Point to the hub folder instead of copying it.")
    ] = False,
) -> None:
    """Write a model repository for Triton Inference Server: MRI over KServe v2."""
    from engine.adapters.triton_export import export_repository
    from engine.config import EngineConfig

    config = EngineConfig(max_context=max_context, max_contexts=max_contexts)
    folder = export_repository(model, repository, config, link=link)
    typer.echo(
        f"wrote {folder}; serve it with tritonserver --model-repository={repository}, where this "
        "package can be imported (docs/adapters.md)"
    )


def _config_of(model: str) -> tuple[ModelConfig, str]:
    """(config, "BF16 x 12, INT4 x 300"); the second is empty where there are no tensors."""
    import difflib
    from collections import Counter

    from engine.errors import CheckpointError
    from engine.model.checkpoint.hub_config import from_hub, read_config
    from engine.model.checkpoint.load import open_checkpoint
    from engine.model.presets import PRESETS

    if model in PRESETS:
        return PRESETS[model](), ""
    path = Path(model)
    if not path.exists():
        near = difflib.get_close_matches(model.lower(), PRESETS, 1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise CheckpointError(
            f"{model}: No such file or folder, and no preset; expected a hub folder, a .gguf file "
            f"or one of {', '.join(PRESETS)}{guess}"
        )
    if path.is_dir() and not any(path.glob("*.safetensors*")):
        return from_hub(read_config(path), str(path / "config.json")), ""
    config, source = open_checkpoint(path)
    kinds = Counter(entry.stored for entry in source.entries.values())
    return config, ", ".join(f"{kind} x {count}" for kind, count in kinds.most_common())


def _broken(message: str) -> NoReturn:
    from engine.errors import EngineError

    raise EngineError(message)


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:g} "
