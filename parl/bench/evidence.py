"""The command behind each ``make evidence-*``: measure what has no record yet, then sum up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parl.bench.command import ROOT
from parl.bench.records import Item, Records, measure

FOLDER = ROOT / "evidence"


def evidence_app(
    file: str,
    all_items: Callable[[Path], Sequence[Item]],
    summary: Callable[[dict[str, dict[str, Any]]], str],
) -> typer.Typer:
    """``all_items(folder)`` are measured in order, one record each in ``folder / file``;
    ``summary(records by name)`` is printed after them. An interrupted call is simply repeated."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def main(
        only: Annotated[
            list[str], typer.Option(help="Names or their beginnings: kill, kill-03.")
        ] = [],  # noqa: B006 - typer reads the default, nobody writes to it
        limit: Annotated[
            int | None, typer.Option(help="Measure at most this many items now.")
        ] = None,
        redo: Annotated[
            bool, typer.Option("--redo", help="Measure again what has a record.")
        ] = False,
        folder: Annotated[
            Path, typer.Option(help="Where records and what they leave go.")
        ] = FOLDER,
    ) -> None:
        """Exit 1 when a record says that something does not hold."""
        records = Records(folder / file)
        made, wanted = measure(
            records, all_items(folder), only=only, limit=limit, redo=redo, say=typer.echo
        )
        typer.echo(f"{summary(made)}\n{records.path}: {len(made)} of {wanted} records")
        if not all(record["ok"] for record in made.values()):
            sys.exit(1)

    return app
