"""``parl chat``: talk to a model; one answer with --prompt, else a line at a time."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from parl.cli.visible import visible

if TYPE_CHECKING:
    from engine.chat.dialogue import Renderer
    from engine.light.engine import LightEngine


class Talker(Protocol):
    """A dialogue with a model, here or on a server."""

    def say(self, user: str) -> AsyncIterator[str]: ...

    async def close(self) -> None: ...


LEAVE = ("/exit", "/quit")
AFRESH = "/new"
INTERRUPTED = 130
BLOCK = 32


def chat(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Folder of safetensors or a .gguf file; with --url its name."
        ),
    ] = "",
    url: Annotated[
        str,
        typer.Option(help="Of a running server (parl serve); its key in $PARL_API_KEY."),
    ] = "",
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and exit.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System text; default: the model's own.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability mass to sample from.")
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    context: Annotated[int, typer.Option(min=1, help="Longest dialogue, in tokens.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws; equal seeds answer equally.")] = 0,
    thinking: Annotated[
        bool, typer.Option("--thinking/--instant", help="Kimi K2.5's two modes.")
    ] = True,
) -> None:
    """Talk to a model on this machine's CPU, in 32-bit floats (a model of 135 M takes 1.5 GB), or
    to a server.

    Lines are messages; /new begins a new dialogue, /exit or the end of input leaves.
    """
    from infra.errors import ConfigError

    if not math.isfinite(temperature):
        raise ConfigError(f"--temperature {temperature}: expected a finite number, 0 or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p}: expected more than 0, at most 1")
    if url:
        _talk_to_server(
            url,
            model,
            system,
            prompt,
            {
                "temperature": temperature,
                "top_p": top_p,
                "max_tokens": max_tokens,
                "seed": seed,
                "chat_template_kwargs": {"thinking": thinking},
            },
        )
        return
    from engine.chat.conversation import Conversation, Manner
    from engine.errors import CapacityError

    path = Path(model)
    if not model:
        raise ConfigError("expected --model (a folder or .gguf file) or --url (a running server)")
    if not path.exists():
        raise ConfigError(f"--model {model} does not exist; expected a model folder or .gguf file")
    manner = Manner(system, max_tokens, temperature, top_p, seed)
    renderer, engine = _load(path, thinking, context)
    conversation = Conversation(engine, renderer, manner)
    room = engine.config.max_context
    try:
        with asyncio.Runner() as runner:
            if prompt is None:
                _talk(runner, conversation, room)
            else:
                runner.run(_answer(conversation, prompt))
    except KeyboardInterrupt:
        raise _interrupted() from None
    except CapacityError as error:
        raise CapacityError(
            f"the dialogue has no room left in {room} tokens; give a shorter --prompt or --context "
            "(the model's own limit may be lower)"
        ) from error
    finally:
        engine.close()


def _talk_to_server(
    url: str, model: str, system: str | None, prompt: str | None, options: dict[str, Any]
) -> None:
    from parl.cli.chat_url import RemoteConversation

    conversation = RemoteConversation(url, model, system, options)
    try:
        with asyncio.Runner() as runner:
            if prompt is None:
                _talk(runner, conversation, 0)
            else:
                runner.run(_answer(conversation, prompt))
    except KeyboardInterrupt:
        raise _interrupted() from None


def _interrupted() -> typer.Exit:
    if sys.stdin.isatty():
        typer.echo()
    typer.echo("parl: interrupted", err=True)
    return typer.Exit(INTERRUPTED)


def _load(model: Path, thinking: bool, context: int) -> tuple[Renderer, LightEngine]:
    """ChatError when vocabulary and model do not belong together."""
    from engine.chat.load import load_renderer
    from engine.config import EngineConfig
    from engine.errors import ChatError
    from engine.light.engine import LightEngine
    from engine.model.checkpoint.load import load_model
    from engine.runtime.weights import make_weight_set

    renderer = load_renderer(model, thinking)
    policy = load_model(model)
    config = policy.config
    if renderer.tokenizer.vocab_size > config.vocab_size:
        raise ChatError(
            f"{model}: the tokenizer has {renderer.tokenizer.vocab_size} ids, the model "
            f"{config.vocab_size}; expected a tokenizer of this model"
        )
    context = min(context, config.max_position_embeddings)
    settings = EngineConfig(
        max_context=context,
        num_blocks=-(-context // BLOCK) + 1,
        block_size=BLOCK,
        max_contexts=1,
        deterministic=False,
        report_codes=False,
    )
    tensors = {name: tensor.numpy() for name, tensor in policy.state_dict().items()}
    weights = make_weight_set(0, tensors, config.model_dump(mode="json"))
    return renderer, LightEngine(config, settings, fetch_weights=lambda version: weights)


def _talk(runner: asyncio.Runner, conversation: Talker, room: int) -> None:
    """A line at a time. Read in the main thread, where Ctrl-C ends the reading at once."""
    from engine.errors import CapacityError

    asks = "> " if sys.stdin.isatty() else ""
    while True:
        typer.echo(asks, nl=False)
        line = sys.stdin.readline()
        if not line or line.strip() in LEAVE:
            return
        if line.strip() == AFRESH:
            runner.run(conversation.close())
        elif line.strip():
            try:
                runner.run(_answer(conversation, line.rstrip("\n")))
            except CapacityError:
                typer.echo(
                    f"\nno room left in {room} tokens: shorten the message, or {AFRESH} begins a "
                    "new dialogue (--context gives more room, up to the model's own limit)",
                    err=True,
                )


async def _answer(conversation: Talker, text: str) -> None:
    async for piece in conversation.say(text):
        typer.echo(visible(piece), nl=False)
    typer.echo()
