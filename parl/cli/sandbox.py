"""``parl sandbox``: boxes for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def sandbox() -> None:
    """A noun with one verb keeps its verb."""


@app.command("serve")
def serve(
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="Folder of the server's ledger and log.")
    ] = Path("runs/sandbox-server"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0 = any free one.", min=0, max=65535)] = 8600,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="Orchestrator's token, mode 600; default: $PARL_SANDBOX_TOKEN."
        ),
    ] = None,
    ledger: Annotated[
        str, typer.Option(help="Ledger URL; default: a SQLite file in the state folder.")
    ] = "",
    tasks: Annotated[
        list[Path] | None, typer.Option("--tasks", help="Folder of task folders; may be repeated.")
    ] = None,
    allow_uncertified: Annotated[
        bool, typer.Option("--allow-uncertified", help="Serve task folders without a certificate.")
    ] = False,
    max_sessions: Annotated[int, typer.Option("--sessions", help="Sessions at once.", min=1)] = 64,
    ttl_s: Annotated[
        float,
        typer.Option("--ttl", help="Seconds of silence that end a session.", min=1, max=86400),
    ] = 600.0,
    level: Annotated[
        str, typer.Option(help="Isolation: auto, A, B, docker, ray, or C with --unsafe-local.")
    ] = "auto",
    unsafe_local: Annotated[
        bool, typer.Option("--unsafe-local", help="Permit level C, which isolates nothing.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = "info",
) -> None:
    """Serve sessions over HTTP until SIGTERM or Ctrl-C; every box is closed at the end."""
    from pydantic import ValidationError

    from infra.errors import ConfigError
    from infra.log import configure
    from sandbox.server.config import ServerConfig
    from sandbox.server.serve import serve as run
    from sandbox.server.tokens import load_token

    token = load_token(token_file)
    try:
        config = ServerConfig.model_validate(
            {
                "max_sessions": max_sessions,
                "ttl_s": ttl_s,
                "task_roots": tuple(tasks or ()),
                "allow_uncertified": allow_uncertified,
                "sandbox": {"level": level, "unsafe_local": unsafe_local},
            }
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{key} = {first['input']!r}: {first['msg']}") from error
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"state folder {state_dir}: {error.strerror}; take another") from error
    configure(state_dir, log_level)
    url = ledger or f"sqlite:///{state_dir.resolve()}/ledger.db"
    run(config, token, url, host=host, port=port, ready=lambda at: typer.echo(f"serving on {at}"))
