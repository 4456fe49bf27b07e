"""Tools of lookup_calc: a key-value store in a SQLite file, and a calculator. Run in the box."""

from __future__ import annotations

import ast
import sqlite3
from contextlib import closing
from typing import Any

from sandbox.toolkit import ToolError, tool, workdir

MAX_EXPRESSION_CHARS = 200
MAX_ABS = 10**12


def setup(data: dict[str, Any]) -> None:
    """Create the store: ``data["store"]`` is {key: integer}."""
    with closing(sqlite3.connect(workdir() / "store.db")) as db, db:
        db.execute("CREATE TABLE store (key TEXT PRIMARY KEY, value INTEGER NOT NULL)")
        db.executemany("INSERT INTO store VALUES (?, ?)", sorted(data["store"].items()))


@tool(effect="read", idempotent=True)
def lookup(key: str) -> str:
    """Value stored under a key."""
    with closing(sqlite3.connect(workdir() / "store.db")) as db:
        row = db.execute("SELECT value FROM store WHERE key = ?", (key,)).fetchone()
    if row is None:
        raise ToolError("no such key")
    return str(row[0])


@tool(effect="read", idempotent=True)
def calc(expression: str) -> str:
    """Value of an integer expression with + - * and parentheses."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"expression is longer than {MAX_EXPRESSION_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError("not an expression") from error
    return str(_evaluate(tree.body))


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=bool()):
            value = None
        case ast.Constant(value=int(number)):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _evaluate(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            value = _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            value = _evaluate(left) - _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            value = _evaluate(left) * _evaluate(right)
        case _:
            value = None
    if value is None:
        raise ToolError("only integers, + - * and parentheses")
    if abs(value) > MAX_ABS:
        raise ToolError(f"a value is larger than {MAX_ABS}")
    return value


def end_state() -> dict[str, Any]:
    """The whole store, for the verifier."""
    with closing(sqlite3.connect(workdir() / "store.db")) as db:
        return {"store": dict(db.execute("SELECT key, value FROM store ORDER BY key"))}
