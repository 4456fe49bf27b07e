"""A stock list in a JSON file. Runs in the box; `sandbox.toolkit` is there too."""

from __future__ import annotations

import json
from typing import Any

from sandbox.toolkit import ToolError, tool, workdir


def setup(data: dict[str, Any]) -> None:
    """The world of one episode, from environment/data.json."""
    _save(data)


@tool(effect="read", idempotent=True)
def list_items() -> str:
    """Every item with its stock and its price in cents."""
    items = _load()["items"]
    return "\n".join(
        f"{name}: stock {item['stock']}, price {item['price']}"
        for name, item in sorted(items.items())
    )


@tool(effect="write", idempotent=True)
def set_price(item: str, price: int) -> str:
    """Set the price of an item, in cents."""
    state = _load()
    if item not in state["items"]:
        raise ToolError(f"no item {item!r}")
    if not 0 < price < 1_000_000:
        raise ToolError("price must be between 1 and 999999")
    state["items"][item]["price"] = price
    _save(state)
    return f"{item}: price {price}"


def end_state() -> dict[str, Any]:
    """What the verifier sees of the world."""
    return _load()


def _load() -> dict[str, Any]:
    return json.loads((workdir() / "state.json").read_text())


def _save(state: dict[str, Any]) -> None:
    (workdir() / "state.json").write_text(json.dumps(state))
