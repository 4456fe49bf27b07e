"""``parl model``: checkpoints in and out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from engine.model.config import ModelConfig

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
]

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
    context: Annotated[int, typer.Option(help="Tokens before the one whose work is told.")] = 4096,
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

    _require_empty(target)
    config, tensors = open_checkpoint(source)
    written = run(
        config,
        tensors,
        target,
        dtype=DTYPES[dtype.value],
        model_type=model_type or None,
        max_shard_bytes=int(shard_gib * 1024**3),
    )
    _bring_tokenizer(source, target)
    size = sum(path.stat().st_size for path in written)
    typer.echo(f"wrote {len(written)} files, {size / 1024**2:.1f} MiB, to {target}")


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
        difference = float((logits - _reference_logits(source, ids)).abs().max())
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
    seed: Annotated[int, typer.Option(help="Of router and noise.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the new tensors.")] = Dtype.float32,
) -> None:
    """Turn a dense model into a mixture of experts with the same logits (noise 0)."""
    from engine.model.checkpoint.load import DTYPES, load_model
    from engine.model.checkpoint.save import save_model
    from engine.model.model import count_parameters
    from engine.model.upcycle import upcycle as run

    _require_empty(target)
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
    save_model(model, target)
    _bring_tokenizer(source, target)
    typer.echo(
        f"{_count(count_parameters(dense))} dense -> {_count(count_parameters(model))} in "
        f"{model.config.num_moe_layers} expert layers, {experts} of which {top_k}; wrote {target}"
    )


def _bring_tokenizer(source: Path, target: Path) -> None:
    """Whatever chats with the source can chat with the target."""
    import json
    import shutil

    if source.suffix == ".gguf":
        from engine.chat.gguf_vocab import read_metadata, tokenizer_json

        metadata = read_metadata(source)
        (target / "tokenizer.json").write_text(json.dumps(tokenizer_json(metadata)))
        template = metadata.get("tokenizer.chat_template")
        if template:
            (target / "chat_template.jinja").write_text(str(template))
        return
    for path in source.iterdir():
        if path.name in TOKENIZER_FILES:
            shutil.copyfile(path, target / path.name)


def _config_of(model: str) -> tuple[ModelConfig, str]:
    """(config, "BF16 x 12, INT4 x 300"); the second is empty for a preset."""
    from collections import Counter

    from engine.model.checkpoint.load import open_checkpoint
    from engine.model.presets import PRESETS

    if model in PRESETS:
        return PRESETS[model](), ""
    config, source = open_checkpoint(Path(model))
    kinds = Counter(entry.stored for entry in source.entries.values())
    return config, ", ".join(f"{kind} x {count}" for kind, count in kinds.most_common())


def _require_empty(target: Path) -> None:
    """CheckpointError before anything is read: a folder with files is somebody's."""
    from engine.errors import CheckpointError

    try:
        held = sorted(path.name for path in target.iterdir()) if target.exists() else []
    except OSError as error:
        raise CheckpointError(
            f"{target}: {error.strerror}; expected a new or empty folder that we may write"
        ) from error
    if held:
        raise CheckpointError(f"{target} is not empty ({held[0]}); give a new or empty folder")


def _reference_logits(source: Path, ids):
    import torch
    from transformers import AutoModelForCausalLM

    from engine.errors import CheckpointError
    from engine.model.checkpoint.hub_config import OWN_TYPE, read_config

    if source.suffix != ".gguf" and read_config(source).get("model_type") == OWN_TYPE:
        raise CheckpointError(
            f"{source}: transformers has no model of type {OWN_TYPE} to compare with; leave out "
            "--reference, or verify the checkpoint this one was made from"
        )
    options = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
    folder = source.parent if options else source
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return theirs.eval()(ids).logits


def _broken(message: str) -> NoReturn:
    from engine.errors import EngineError

    raise EngineError(message)


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:g} "
