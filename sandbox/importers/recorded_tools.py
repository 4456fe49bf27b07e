"""Tools of an imported task: reads look into a small data base, the rest is only recorded."""

import json

from sandbox.toolkit import ToolError, tool, workdir  # noqa: F401 - tools follow

MAX_FOUND = 5


def setup(data):
    """No call yet."""
    (workdir() / "state.json").write_text(json.dumps({"calls": [], "db": data["db"]}))


def end_state():
    """Calls in order."""
    return {"calls": _load()["calls"]}


def _load():
    return json.loads((workdir() / "state.json").read_text())


def _take(name, arguments, reads):
    """Record a call and answer it."""
    state = _load()
    state["calls"].append({"name": name, "arguments": arguments})
    (workdir() / "state.json").write_text(json.dumps(state))
    if not (reads and state["db"]):
        return "recorded"
    found = _find(state["db"], [value for value in arguments.values() if value not in ("", None)])
    if not found:
        raise ToolError("nothing found")
    return json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False)


def _find(db, values):
    """Records under a key, or with a field, that equals one of the values; all without values."""
    found = []
    for table in db.values():
        if isinstance(table, dict):
            rows = list(table.items())
        else:
            rows = [(None, row) for row in table] if isinstance(table, list) else []
        for key, row in rows:
            fields = list(row.values()) if isinstance(row, dict) else [row]
            if not values or any(value == key or value in fields for value in values):
                found.append(row)
    return found[:MAX_FOUND]
