# ruff: noqa: F821 - follows the text of tau2_world.py
# pyright: reportUndefinedVariable=false
# Tools of an imported tau2 task: the domain's own, over a data base in the box.

from sandbox.toolkit import ToolError, tool, workdir  # noqa: F401 - tools follow

MAX_STATE_BYTES = 3 << 20
_LOADED = []


def _world():
    if not _LOADED:
        _LOADED.append(World(SOURCES))
    return _LOADED[0]


def setup(data):
    """The task's initial state, and no call yet."""
    kit = _world().start(data["db"], data["initial"])
    (workdir() / "db.json").write_text(json.dumps(_world().plain(kit)))
    (workdir() / "calls.json").write_text("[]")


def end_state():
    """Calls in order; the data base, if it is not too large, and its hash."""
    text = (workdir() / "db.json").read_text()
    db = json.loads(text)
    calls = json.loads((workdir() / "calls.json").read_text())
    return {
        "calls": calls,
        "digest": digest(db),
        "db": db if len(text) <= MAX_STATE_BYTES else None,
    }


def _use(name, arguments, reads):
    """Run a tool of the domain; what it raises is its refusal."""
    calls = json.loads((workdir() / "calls.json").read_text())
    calls.append({"name": name, "arguments": arguments})
    (workdir() / "calls.json").write_text(json.dumps(calls))
    kit = _world().kit(json.loads((workdir() / "db.json").read_text()))
    try:
        answer = kit.use_tool(name, **arguments)
    except Exception as error:
        raise ToolError(str(error) or type(error).__name__) from error
    if not reads:
        (workdir() / "db.json").write_text(json.dumps(_world().plain(kit)))
    return _world().text(answer)
