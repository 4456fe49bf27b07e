# ruff: noqa: F821 - follows the text of tau2_world.py
# pyright: reportUndefinedVariable=false
# Verifier of an imported tau2 task: the product over its reward_basis.

MAX_ANSWER_CHARS = 4000


def verify(final_text, end_state, data):
    """DB: the end state is that of the right actions on a fresh data base. ACTION: they were made.
    ENV_ASSERTION: functions of the toolkit say so. COMMUNICATE: the answer holds it all."""
    world = World(SOURCES)
    if "DB" in data["basis"]:
        kit = world.start(data["db"], data["initial"])
        for action in data["actions"]:
            try:
                kit.use_tool(action["name"], **action["arguments"])
            except Exception:
                continue  # a right action may be one that the world refuses
        if digest(world.plain(kit)) != end_state["digest"]:
            return _no("the data base is not as it must be")
    if "ACTION" in data["basis"]:
        left = list(end_state["calls"])
        for action in data["actions"]:
            made = next((call for call in left if _same(action, call)), None)
            if made is None:
                return _no("missing call: " + action["name"])
            left.remove(made)
    if "ENV_ASSERTION" in data["basis"]:
        if end_state["db"] is None:
            return {"error": "the data base is too large to be judged"}
        kit = world.kit(end_state["db"])
        for check in data["assertions"]:
            found = getattr(kit, check["func_name"])(**check.get("arguments", {}))
            if bool(found) != bool(check.get("assert_value", True)):
                return _no("the world is not as it must be: " + check["func_name"])
    text = " ".join(final_text.lower().replace(",", "").split())
    if len(final_text) > MAX_ANSWER_CHARS:
        return _no("the answer is too long to be one")
    for part in data["contains"]:
        if " ".join(part.lower().replace(",", "").split()) not in text:
            return _no("the answer does not say what it must")
    return {"correctness": 1.0, "reasons": ["world and answer are right"]}


def _same(action, call):
    keys = action["compare_args"]
    keys = list(action["arguments"]) if keys is None else keys
    return action["name"] == call["name"] and all(
        action["arguments"].get(key) == call["arguments"].get(key) for key in keys
    )


def _no(reason):
    return {"correctness": 0.0, "reasons": [reason]}
