"""``parl <noun> <verb>``: one file a noun; here errors become one line and an exit code.

0 = done, 1 = it failed, 2 = the input is wrong, 130 = interrupted. Nothing heavy is imported before
a command needs it, so help and completion are instant.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from infra.errors import ParlError
from parl.cli import attention, bench, chat, doctor, model, rl, sandbox, serve, task

INTERRUPTED = 130

app = typer.Typer(
    name="parl",
    help="Train tool-using agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(rl.app, name="rl", help="Runs: start, resume, watch, inspect.")
app.add_typer(task.app, name="task", help="Tasks an agent can be trained on.")
app.add_typer(model.app, name="model", help="Checkpoints: look into, convert, upcycle.")
app.add_typer(sandbox.app, name="sandbox", help="Boxes: serve them to other programs.")
app.add_typer(attention.app, name="attention", help="Knobs of sparse attention, measured.")
app.add_typer(bench.app, name="bench", help="Measurements of this machine.")
app.command("serve", help="Serve a model to OpenAI clients.")(serve.serve)
app.command("chat", help="Talk to a model, here or on a server.")(chat.chat)
app.command("doctor", help="What is installed, how tools are isolated, who waits for whom.")(
    doctor.doctor
)


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (any position).")
    ] = False,
) -> None:
    """Declares --debug for the help text; ``run`` reads it, wherever it stands."""
    del debug


def main() -> None:
    """Entry point of the ``parl`` script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Errors go to stderr in one line."""
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    try:
        code = app(args=words, prog_name="parl", standalone_mode=False)
    except TyperException as error:
        return _usage(error)
    except Abort:
        return _fail("interrupted", INTERRUPTED, debug)
    except ParlError as error:
        return _fail(str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, debug)
    except Exception as error:
        # The command line is the last boundary: whatever arrives here untranslated is our bug.
        text = f"{type(error).__name__}: {error} (unexpected; run again with --debug to see where)"
        return _fail(text, 1, debug)
    return code if isinstance(code, int) else 0


def _usage(error: TyperException) -> int:
    """Wrong words on the command line. Help asked for by giving none is printed whole."""
    message = error.format_message()
    if message.startswith("Usage:"):
        typer.echo(message)
        return error.exit_code
    return _fail(f"{message} (see: parl --help)", error.exit_code, debug=False)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    typer.echo(f"parl: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    main()
