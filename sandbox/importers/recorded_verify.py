"""Were the right calls made, and does the answer say what it must? A pure function."""

import re

MAX_ANSWER_CHARS = 4000


def verify(final_text, end_state, data):
    """``correctness`` 1.0 when the calls and the answer are right, else 0.0 with the reason."""
    made = list(end_state.get("calls", []))
    left = list(made)
    for wanted in data["calls"]:
        match = next((call for call in left if _fits(wanted, call)), None)
        if match is None:
            return {"correctness": 0.0, "reasons": ["missing call: " + wanted["name"]]}
        left.remove(match)
    names = {call["name"] for call in data["calls"]}
    extra = [call for call in left if data["exact"] or call["name"] in names]
    if extra and data["calls"]:
        return {"correctness": 0.0, "reasons": ["one call too many: " + extra[0]["name"]]}
    text = final_text.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return {"correctness": 0.0, "reasons": ["the answer is too long to be one"]}
    for part in data["contains"]:
        if _plain(part) not in _plain(text):
            return {"correctness": 0.0, "reasons": ["the answer does not say what it must"]}
    if data["answer"] is not None and not _equal(text, data["answer"]):
        return {"correctness": 0.0, "reasons": ["the answer is wrong"]}
    return {"correctness": 1.0, "reasons": ["calls and answer are right"]}


def _fits(wanted, call):
    """Every argument has an accepted value; those that accept "" may be missing."""
    if wanted["name"] != call["name"]:
        return False
    arguments = call["arguments"]
    for key, accepted in wanted["arguments"].items():
        if key not in arguments:
            if "" not in accepted:
                return False
        elif not any(_same(choice, arguments[key]) for choice in accepted):
            return False
    return not (wanted.get("closed") and set(arguments) - set(wanted["arguments"]))


def _same(accepted, value):
    """Text without case, spaces and punctuation; numbers by value; objects field by field."""
    if isinstance(accepted, str) and isinstance(value, str):
        return _bare(accepted) == _bare(value)
    if isinstance(accepted, dict) and isinstance(value, dict):
        for key, choices in accepted.items():
            options = choices if isinstance(choices, list) else [choices]
            if key not in value:
                if "" not in options:
                    return False
            elif not any(_same(option, value[key]) for option in options):
                return False
        return not set(value) - set(accepted)
    if isinstance(accepted, list) and isinstance(value, list):
        return len(accepted) == len(value) and all(map(_same, accepted, value))
    if isinstance(accepted, bool) or isinstance(value, bool):
        return accepted is value
    return accepted == value


def _bare(text):
    return re.sub(r"[ ,./\-_*^'\"]", "", text).lower()


def _plain(text):
    return " ".join(text.lower().replace(",", "").split())


def _equal(text, answer):
    """The answer alone, boxed, or as the last line after 'answer:'; numbers by value."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    lines = text.splitlines()
    told = (
        boxed[-1] if boxed else re.sub(r"(?i)^.*answer\s*[:=]\s*", "", lines[-1] if lines else "")
    )
    told, right = told.strip().strip(".$ "), answer.strip().strip(".$ ")
    if _plain(told) == _plain(right):
        return True
    try:
        return float(told.replace(",", "")) == float(right.replace(",", ""))
    except ValueError:
        return False
