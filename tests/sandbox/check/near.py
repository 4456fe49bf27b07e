"""Flaws that only a nearly right result shows, each with the part of the check that must see it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

from tests.sandbox.check.planting import (
    Flaw,
    both,
    edit,
    judge,
    log_note,
    manifest,
    tool_code,
    verifier,
)

ITEMS = "    right = end_state['items'] == data['items']\n"
SCORE = "    return {'correctness': float(right and good), 'reasons': []}\n"
CALENDAR = (
    "    found = sorted([e['day'], e['hour']] for e in end_state['events'])\n"
    "    wanted = sorted([*data['kept'], [data['day'], data['hour']]])\n"
)


def answered(condition: str) -> Callable[[Path], None]:
    """Judge the Python example's prices exactly and its answer, a text, by a condition."""
    return verifier(ITEMS + f"    answer, want = final_text.strip(), str(data['changed'])\n"
                    f"    good = {condition}\n" + SCORE)  # fmt: skip


def answer(text: str) -> Callable[[Path], object]:
    """Another right answer: in the solution and in tests/data.json."""

    def plant(folder: Path) -> None:
        path = folder / "solution" / "calls.jsonl"
        lines = path.read_text().splitlines()[:-1]
        path.write_text("\n".join([*lines, json.dumps({"final_text": text})]) + "\n")
        data = folder / "tests" / "data.json"
        data.write_text(json.dumps({**json.loads(data.read_text()), "changed": text}))

    return plant


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """Another name for an item, wherever it stands."""

    def plant(folder: Path) -> None:
        for name in ("environment/data.json", "tests/data.json", "solution/calls.jsonl"):
            path = folder / name
            path.write_text(path.read_text().replace(f'"{old}"', json.dumps(new)))

    return plant


def asked(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "instruction.md").write_text(text + "\n")


def notes(folder: Path) -> None:
    """A tool that keeps notes by name, used by the solution."""
    tool_code("def end_state()", '@tool(effect="write", idempotent=True)\n'
              "def save_note(name: str, text: str) -> str:\n    \"\"\"Keep a note.\"\"\"\n"
              "    path = workdir() / 'notes' / name\n    path.parent.mkdir(exist_ok=True)\n"
              "    path.write_text(text)\n    return 'saved'\n\n\n"
              '@tool(effect="read")\ndef read_note(name: str) -> str:\n    """A note."""\n'
              "    path = workdir() / 'notes' / name\n    if not path.is_file():\n"
              "        raise ToolError('no note')\n    return path.read_text()\n\n\n"
              "def end_state()")(folder)  # fmt: skip
    path = folder / "solution" / "calls.jsonl"
    note = json.dumps({"name": "save_note", "arguments": {"name": "todo", "text": "lamp"}})
    path.write_text(f"{note}\n{path.read_text()}")


def shouting(command: str) -> Callable[[Path], None]:
    """A read that hands its argument to a shell."""
    return tool_code("def end_state()", '@tool(effect="read")\ndef count_of(item: str) -> str:\n'
                     '    """Letters of a name."""\n'
                     f"    done = subprocess.run({command}, shell=True, cwd=workdir(),\n"
                     "                          capture_output=True, text=True)\n"
                     "    return done.stdout\n\n\ndef end_state()",
                     "import subprocess\n")  # fmt: skip


def more_hours(folder: Path) -> None:
    """An optional argument that the server knows under another name."""
    edit(
        folder / "tools" / "tools.py", "title: str) -> str:", "title: str, hours: int = 1) -> str:"
    )
    edit(folder / "tools" / "tools.py", '"hour": hour, "title": title}',
         '"hour": hour, "title": title, "hours": hours}')  # fmt: skip
    broken = "        arguments['hours'] > 1 and arguments['duration']\n        events.append({key"
    edit(folder / "environment" / "files" / "server.py", "        events.append({key", broken)


def policy(folder: Path) -> None:
    """A note that must hold words nobody is told."""
    edit(folder / "tools" / "tools.py", "order_id: str) -> str:", 'order_id: str, note: str = "") '
         "-> str:")  # fmt: skip
    edit(folder / "tools" / "tools.py", '    return _request("POST"',
         '    with (workdir() / "notes").open("a") as file:\n        file.write(note + "\\n")\n'
         '    return _request("POST"')  # fmt: skip
    edit(folder / "tools" / "tools.py", '    return json.loads((workdir() / "state.json")',
         '    path = workdir() / "notes"\n    seen = path.read_text() if path.exists() else ""\n'
         '    return {"notes": seen} | json.loads((workdir() / "state.json")')  # fmt: skip
    edit(folder / "tests" / "verify.py", "if states != wanted:",
         "if states != wanted or end_state['notes'].count('policy') < 2:")  # fmt: skip
    edit(folder / "solution" / "calls.jsonl", '"o-103"', '"o-103", "note": "policy 7"')
    edit(folder / "solution" / "calls.jsonl", '"o-105"', '"o-105", "note": "policy 7"')


def reported(old: str, new: str) -> Callable[[Path], None]:
    """Change how the shell example's solution writes its report."""
    return lambda folder: edit(folder / "solution" / "solve.sh", old, new)


def helper(folder: Path) -> None:
    """test.sh asks a program beside the logs first."""
    log_note("valid.py", "import json, sys\njson.load(open(sys.argv[1]))\n")(folder)
    manifest('["/app/report.json"]', '["/app"]')(folder)
    (folder / "tests" / "test.sh").write_text(
        "#!/bin/bash\nif python3 /app/logs-in/valid.py /app/report.json; then\n"
        "  exec python3 -I /tests/judge.py\nfi\necho 0 > /logs/verifier/reward.txt\n"
    )


def exit_code(folder: Path) -> None:
    """The program that the solution writes is run, and its exit status is the reward."""
    manifest('["/app/report.json"]', '["/app/count.py", "/app/logs-in"]')(folder)
    (folder / "tests" / "test.sh").write_text(
        "#!/bin/bash\nif python3 /app/count.py; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt\n"
    )


def new_prices(folder: Path) -> None:
    """The world holds what the prices must become, and a tool says so."""
    wanted = json.loads((folder / "tests" / "data.json").read_text())
    path = folder / "environment" / "data.json"
    data = json.loads(path.read_text())
    for name, item in data["items"].items():
        item["new_price"] = wanted["items"][name]["new_price"] = wanted["items"][name]["price"]
    path.write_text(json.dumps(data))
    (folder / "tests" / "data.json").write_text(json.dumps(wanted))


def year(folder: Path) -> None:
    """The report needs the year in which the solution runs."""
    reported("import collections", "import datetime, collections")(folder)
    reported("json.dumps(counts)", 'json.dumps({**counts, "y": datetime.date.today().year})')(
        folder
    )
    edit(folder / "tests" / "judge.py", "found == WANTED",
         "found == {**WANTED, 'y': __import__('datetime').date.today().year}")  # fmt: skip


COUNTER = """# Counts what went wrong, told by where the logs lie and where to write.
import json, sys
from glob import glob
kinds = {}
for name in glob(sys.argv[1] + "/*.log"):
    for words in map(str.split, open(name)):
        if "ERROR" in words:
            kind = " ".join(words[2:])
            kinds[kind] = kinds.get(kind, 0) + 1
json.dump(kinds, open(sys.argv[2], "w"))
"""
NAME = answer("Kx-9A")
ALIKE = both(renamed("lamp", "Kx-9A"), renamed("hinge", "kX-9a"), NAME)
FORMS = '{"changed": {"lamp": 2820, "bolt M6": 144}}'
WEEK = "Which day of this week has the most events? Answer with mon, tue, wed, thu or fri."
DAY = (
    verifier("    return {'correctness': float(final_text.strip() == 'mon'), 'reasons': []}\n"),
    asked(WEEK),
    lambda folder: (folder / "solution" / "calls.jsonl").write_text(
        '{"name": "list_events", "arguments": {"day": "mon"}}\n{"final_text": "mon"}\n'
    ),
)
NFD = unicodedata.normalize("NFD", "Türgriff")
NEAR: list[tuple[str, Flaw]] = [
    ("answers", Flaw("one percent is fine", "near-answer-passes", "python", both(answer("1264"),
     answered("answer.isdigit() and abs(int(answer) - int(want)) <= int(want) / 100")))),
    ("answers", Flaw("one off is fine", "near-answer-passes", "python",
     answered("answer.isdigit() and abs(int(answer) - int(want)) <= 1"))),
    ("answers", Flaw("small letters are fine", "near-answer-passes", "python",
     both(ALIKE, answered("answer.lower() == want.lower()")))),
    ("answers", Flaw("the beginning is fine", "near-answer-passes", "python", both(
        answer("cable 2 m"), answered("answer and want.startswith(answer)")))),
    ("answers", Flaw("the sign is lost", "near-answer-passes", "python", both(
        answer("1264"), answered("answer.strip('-') == want")))),
    ("answers", Flaw("a point is any character", "near-answer-passes", "python", both(
        answer("12.5"), answered("__import__('re').fullmatch(want, answer) is not None")))),
    ("artifacts", Flaw("a number anywhere in a file", "overdoing-passes", "bash", both(
        reported("json.dumps(counts)", "str(sum(counts.values()))"),
        judge("found == WANTED", "report.is_file() and '4' in report.read_text()")))),
    ("artifacts", Flaw("counts about right", "overdoing-passes", "bash", judge(
        "found == WANTED", "isinstance(found, dict) and found.keys() == WANTED.keys() and all(\n"
        "        isinstance(v, int) and abs(v - WANTED[k]) < 2 for k, v in found.items())"))),
    ("artifacts", Flaw("no count of a report", "no-number-passes", "bash", judge(
        "found == WANTED", "isinstance(found, dict) and found.keys() == WANTED.keys() and all(\n"
        "        type(v) in (int, float) and not abs(v - WANTED[k]) > 0.1 "
        "for k, v in found.items())"))),
    ("artifacts", Flaw("no number in a file", "no-number-passes", "bash", both(
        reported("json.dumps(counts)", "str(float(sum(counts.values())))"),
        judge("found == WANTED", "report.is_file() and found is not False "
              "and not abs(float(report.read_text()) - 4) > 0.1")))),
    ("answers", Flaw("no number in an answer", "no-number-passes", "python", both(
        answer("lamp 12.5"), answered("(part := answer.split())[:1] == ['lamp'] "
                                      "and not abs(float(part[-1]) - 12.5) > 0.01")))),
    ("nop", Flaw("a reward for quiet", "nop-is-paid", "mcp", verifier(
        "    quiet = {tuple(each) for each in data['kept']} <= {\n"
        "        (e['day'], e['hour']) for e in end_state['events']}\n"
        "    good = final_text.strip() == str(data['hour'])\n"
        "    return {'correctness': 0.6 * quiet + 0.4 * good, 'reasons': []}\n"))),
    ("leaks", Flaw("a counter beside the logs", "oracle-readable", "bash",
                   log_note("tally.py", COUNTER))),
    ("effects", Flaw("an option of a read that crashes", "broken-argument", "python", both(
        tool_code("def list_items() -> str:", 'def list_items(order: str = "") -> str:'),
        tool_code('    items = _load()["items"]\n',
                  '    items = _load()["items"]\n    if order:\n'
                  '        items = items["order"]\n')))),
    ("answers", Flaw("any answer", "unchecked-answer", "python", verifier(
        ITEMS + "    good = True\n" + SCORE))),
    ("answers", Flaw("one of five", "guessable", "mcp", both(*DAY))),
    ("answers", Flaw("JSON as text", "format-sensitive", "python", both(
        answer(FORMS), answered("answer == want")))),
    ("plain", Flaw("all digits of a float", "exact-float", "python", both(
        answer("797.1428571428571"), answered("answer == want")))),
    ("plain", Flaw("decomposed characters", "look-alike-characters", "python",
                   renamed("lamp", NFD))),
    ("arguments", Flaw("title nobody looks at", "unchecked-argument", "mcp", verifier(
        CALENDAR + "    return {'correctness': float(found == wanted), 'reasons': []}\n"))),
    ("arguments", Flaw("price about right", "unchecked-argument", "python", verifier(
        "    right = all(end_state['items'][k]['price'] >= v['price']\n"
        "                for k, v in data['items'].items())\n    good = final_text == '3'\n"
        + SCORE))),
    ("arguments", Flaw("an option that never works", "broken-argument", "mcp", more_hours)),
    ("hidden", Flaw("words nobody is told", "hidden-requirement", "http", policy)),
    ("hidden", Flaw("a key nobody is told", "hidden-requirement", "bash", both(
        reported("json.dumps(counts)", 'json.dumps({**counts, "format": 2})'),
        judge("found == WANTED", "found == {**WANTED, 'format': 2}")))),
    ("hidden", Flaw("a report as text", "format-sensitive", "bash", both(
        reported("json.dumps(counts)", "json.dumps(counts, sort_keys=True)"),
        judge("found == WANTED",
              "report.is_file() and report.read_text() == json.dumps(WANTED, sort_keys=True)")))),
    ("hidden", Flaw("another file than the one named", "instruction-contradicts", "bash", both(
        lambda folder: edit(folder / "instruction.md", "report.json", "counts.json")))),
    ("effects", Flaw("notes anywhere", "path-traversal", "python", notes)),
    ("effects", Flaw("a name for a shell", "command-injection", "python",
                     shouting("f'echo {item}'"))),
    ("effects", Flaw("a filter that filters nothing", "ignored-argument", "python", both(
        tool_code("def list_items() -> str:", "def list_items(below: int = 999) -> str:"),
        lambda folder: edit(folder / "solution" / "calls.jsonl", '"list_items", "arguments": {}',
                            '"list_items", "arguments": {"below": 10}')))),
    ("effects", Flaw("an error that is none", "lying-tool", "python", tool_code(
        '    if not 0 < price', '    state["items"][item]["price"] = price\n    _save(state)\n'
        "    if not 0 < price"))),
    ("effects", Flaw("twice is more", "not-idempotent", "python", tool_code(
        '    _save(state)\n    return f"{item}: price',
        '    state["count"] = state.get("count", 0) + 1\n    _save(state)\n'
        '    return f"{item}: price'))),
    ("leaks", Flaw("new prices in the world", "answer-readable", "python", both(
        new_prices, tool_code('price {item[\'price\']}"', 'price {item[\'price\']}, '
                              'new_price {item[\'new_price\']}"')))),
    ("leaks", Flaw("counts in a summary", "answer-readable", "bash",
                   log_note("summary.yaml", "refused db-1: 1\ntimeout db-2: 3\n"))),
    ("code", Flaw("a judge beside the logs", "verifier-executes-agent-text", "bash", helper)),
    ("code", Flaw("the exit status is enough", "empty-passes", "bash", exit_code)),
    ("clock", Flaw("the year of today", "clock-dependent", "bash", year)),
    ("world", Flaw("shelves of a set", "nondeterministic-world", "python", tool_code(
        '    items = _load()["items"]\n',
        '    items = dict.fromkeys(set(_load()["items"]))\n'
        '    return " ".join(items)\n'))),
    ("solution", Flaw("an answer from nowhere", "solution-without-tools", "python",
                      lambda folder: (folder / "solution" / "calls.jsonl").write_text(
                          '{"final_text": "3"}\n'))),
    ("solution", Flaw("items from nowhere", "solution-without-reading", "python",
                      lambda folder: edit(folder / "solution" / "calls.jsonl",
                                          '{"name": "list_items", "arguments": {}}\n', ""))),
    ("solution", Flaw("another form than asked for", "instruction-contradicts", "python", both(
        answer("3 items"), answered("answer == want")))),
]  # fmt: skip
