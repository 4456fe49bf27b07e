"""``parl serve``: a policy behind OpenAI's interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.server.config import ServeConfig
    from engine.server.service import Loaded

YAML = (".yaml", ".yml")


def serve(
    config: Annotated[
        list[Path],
        typer.Option(
            "--config", "-c", help="TOML (or lightengine.yaml); given twice, the later one wins."
        ),
    ] = [],  # noqa: B006 - typer reads the default, nobody writes to it
    overrides: Annotated[
        list[str], typer.Option("--set", "-s", help="One value: listen.port=8080. Wins most.")
    ] = [],  # noqa: B006
    model: Annotated[
        str, typer.Option("--model", "-m", help="Folder or .gguf file; model.path in short.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration as TOML and stop.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = "info",
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C; running requests are finished.

    API keys come from listen.keys_file or $PARL_SERVE_KEYS; beyond loopback they are required.
    """
    from engine.server.config import ServeConfig
    from infra.config import dump_toml, load_config

    if model:
        overrides = [f"model.path={_quoted(model)}", *overrides]
    files = [path for path in config if path.suffix not in YAML]
    for path in config:
        if path.suffix in YAML:
            from engine.server.seed_yaml import read_seed_yaml

            overrides = [*read_seed_yaml(path), *overrides]
    resolved = load_config(ServeConfig, files, overrides)
    if dry_run:
        typer.echo(dump_toml(resolved), nl=False)
        return
    from engine.server.serve import serve as run
    from infra.log import configure

    configure(None, log_level)
    run(
        resolved,
        _load,
        listening=lambda url: typer.echo(f"listening on {url}, loading {resolved.name}"),
        ready=lambda url: typer.echo(f"serving {resolved.name} on {url}/v1"),
    )


def _load(config: ServeConfig) -> Loaded:
    # torch; only when the port is open
    from engine.server.loading import load

    return load(config)


def _quoted(text: str) -> str:
    """As a TOML string."""
    import json

    return json.dumps(text)
