"""Task folders with one flaw each: the example of `parl task new`, broken on purpose."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from sandbox.templates.new import write_task
from tests.sandbox.check.planting import (
    Flaw,
    agent_module,
    another_read,
    answer_from_agent_files,
    answer_in_data,
    answers_in_data,
    append,
    both,
    compose,
    copy_solution,
    damaged_cassette,
    dockerfile,
    edit,
    follow_links,
    judge,
    judge_first,
    link_out,
    log_note,
    manifest,
    nameless_answer,
    no_attacks,
    no_solution,
    packed_report,
    passing_attack,
    random_world,
    readable_oracle,
    refunds,
    replay,
    replay_without_cassette,
    reward_from_workdir,
    service,
    test_script,
    tool_code,
    unpin,
    verifier,
    writable_tests,
)

CLOSED = "    raise ToolError('closed')\n"
BUSY = 'return self.answer(503, {"error": "busy"})\n        '
OK = "    return {'correctness': 1.0, 'reasons': []}\n"
RIGHT = "    right = end_state['items'] == data['items']\n"
FLAWS = [
    # -- what the agent's image and files give away
    Flaw("unpinned image", "unpinned-image", "python", unpin),
    Flaw("tests in the image", "tests-in-image", "python", dockerfile("COPY tests/ /app/tests/")),
    Flaw("oracle in the image", "oracle-in-image", "python",
         dockerfile("COPY solution/solve.py /app/")),
    Flaw("context above environment", "leaky-image", "python", dockerfile("COPY ../ /app/")),
    Flaw("copy of the solution", "oracle-in-image", "python", copy_solution),
    Flaw("history in the image", "git-history", "python",
         dockerfile("RUN git clone https://example.org/x.git /app/x")),
    Flaw("tests mounted", "tests-in-image", "bash",
         compose("services:\n  main:\n    build: .\n    volumes: ['../tests:/tests']\n")),
    Flaw("privileged", "privileged-container", "bash",
         compose("services:\n  main:\n    build: .\n    privileged: true\n")),
    Flaw("answer in tools.py", "oracle-in-agent-files", "python",
         lambda folder: append(folder / "tools" / "tools.py", "\n\nEXPECTED_ANSWER = '3'\n")),
    Flaw("verifier readable in the box", "oracle-readable", "python", readable_oracle, False),
    Flaw("answer in the agent's data", "answer-readable", "python", answer_in_data, False),
    Flaw("answer without a name", "answer-readable", "http", nameless_answer, False),
    Flaw("passes until it fails", "passes-by-default", "bash", test_script(
        "echo 1 > /logs/verifier/reward.txt\ntimeout 5 python3 -I /tests/judge.py\n"
        "[ $? -eq 1 ] && echo 0 > /logs/verifier/reward.txt\nexit 0\n")),
    Flaw("what is needed is cut off", "truncated-output", "python", tool_code(
        '    return "\\n".join(', '    return "no change\\n" * 4000 + "\\n".join('), False),
    Flaw("all answers in the agent's data", "answer-readable", "python", answers_in_data, False),
    Flaw("answer in the instruction", "passing-echo", "python", verifier(
        "    return {'correctness': float('digits only' in final_text), 'reasons': []}\n"), False),
    # -- secrets and pins
    Flaw("secret in tools.py", "secret-literal", "python",
         lambda folder: append(folder / "tools" / "tools.py",
                               '\n\nAPI_KEY = "9f8e7d6c5b4a39281706"\n')),
    Flaw("secret in the environment", "secret-literal", "python",
         manifest('workdir = "/app"', 'workdir = "/app"\nenv = { SHOP_TOKEN = "t0k3n-0815" }')),
    Flaw("secret in a header", "secret-literal", "mcp",
         manifest('name = "calendar"', 'name = "calendar"\n'
                  'headers = { Authorization = "Bearer abcdefghijklmnop" }')),
    Flaw("unpinned dependency", "unpinned-dependency", "python",
         dockerfile("RUN pip install requests")),
    # -- the verifier
    Flaw("constant verifier", "constant-verifier", "python", verifier(OK)),
    Flaw("passing nop", "passing-nop", "python", verifier(
        "    return {'correctness': float(final_text.strip() in ('', '3')), 'reasons': []}\n"),
        False),
    Flaw("low threshold", "threshold-too-low", "python",
         manifest("pass_threshold = 1.0", "pass_threshold = 0.0")),
    Flaw("flaky by luck", "nondeterministic-verifier", "python", verifier(
        "    import random\n" + RIGHT +
        "    return {'correctness': float(right and random.random() < 0.8), 'reasons': []}\n")),
    Flaw("flaky, hidden", "nondeterministic-verifier", "python", verifier(
        "    import os\n" + RIGHT +
        "    return {'correctness': float(right and id(object()) % 64 != 0), 'reasons': []}\n"
        .replace("id(object()) % 64 != 0", "os.getpid() % 2 == 0")), False),
    Flaw("depends on the day", "nondeterministic-verifier", "python", verifier(
        "    import datetime as d\n" + RIGHT +
        "    now = getattr(d.datetime, 'now')()\n"
        "    return {'correctness': float(right and now.year < 2027), 'reasons': []}\n"), False),
    Flaw("depends on the hash seed", "nondeterministic-verifier", "python", verifier(
        RIGHT + "    first = list({'a', 'b', 'c', 'd', 'e'})[0]\n"
        "    return {'correctness': float(right and first in 'abc'), 'reasons': []}\n"), False),
    Flaw("depends on the cpus", "nondeterministic-verifier", "python", verifier(
        "    import os\n" + RIGHT +
        "    return {'correctness': float(right and os.cpu_count() > 1), 'reasons': []}\n"),
        False),
    Flaw("verifier asks the network", "verifier-network", "python", verifier(
        "    import urllib.request\n" + RIGHT +
        "    return {'correctness': float(right), 'reasons': []}\n")),
    Flaw("test.sh downloads", "verifier-network", "bash",
         test_script("pip install pytest==8.4.1\npytest /tests/judge.py\n")),
    Flaw("believes the end state", "verifier-trusts-agent", "python", verifier(
        "    return {'correctness': float(end_state.get('passed') is True), 'reasons': []}\n")),
    Flaw("believes a file", "verifier-trusts-agent", "python", reward_from_workdir, False),
    Flaw("copies the reward", "verifier-trusts-agent", "bash",
         test_script("cp /app/reward.txt /logs/verifier/reward.txt\n")),
    Flaw("runs the agent's tests", "mutable-tests", "bash",
         test_script("bash /app/run_tests.sh\n")),
    Flaw("collects the agent's tests", "mutable-tests", "bash",
         test_script("cd /app && python3 -m pytest && echo 1 > /logs/verifier/reward.txt\n")),
    Flaw("tests anybody can write", "mutable-tests", "python", writable_tests),
    Flaw("tests as artifacts", "mutable-tests", "bash",
         manifest('["/app/report.json"]', '["/app/report.json", "/tests"]')),
    Flaw("judges by luck in the shell", "nondeterministic-verifier", "bash",
         test_script("echo $((RANDOM % 2)) > /logs/verifier/reward.txt\n")),
    Flaw("greps the agent's report", "verifier-trusts-agent", "bash",
         test_script("grep -q 'ALL TESTS PASSED' /app/report.json && echo 1 > "
                     "/logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"), False),
    Flaw("answer told in a note", "answer-readable", "python",
         lambda folder: edit(folder / "environment" / "data.json", '{"items"',
                             '{"note": "The answer is 3.", "items"'), False),
    Flaw("report beside the logs", "answer-readable", "bash",
         log_note(".old.bak", '{"refused db-1": 1, "timeout db-2": 3}'), False),
    Flaw("report in a gzip", "answer-readable", "bash", packed_report, False),
    Flaw("report in base64", "answer-readable", "bash",
         log_note("blob", base64.b64encode(b'{"refused db-1": 1, "timeout db-2": 3}').decode()),
         False),
    Flaw("report in words", "answer-readable", "bash",
         log_note("README", "Fixture.\nExpected: timeout db-2 = 3, refused db-1 = 1\n"), False),
    Flaw("a write called a read", "effect-mislabeled", "python",
         lambda folder: edit(folder / "tools" / "tools.py",
                             '@tool(effect="write", idempotent=True)', '@tool(effect="read")'),
         False),
    Flaw("shell secret", "secret-literal", "bash",
         lambda folder: append(folder / "solution" / "solve.sh", "export TOKEN=ab12cd\n")),
    Flaw("shared verifier", "shared-verifier", "python",
         manifest('environment_mode = "separate"', 'environment_mode = "shared"')),
    Flaw("evaluates the answer", "verifier-executes-agent-text", "python", verifier(
        "    return {'correctness': float(eval(final_text) == 3), 'reasons': []}\n")),
    Flaw("sources a file of the agent", "verifier-executes-agent-text", "bash", test_script(
        "set -a; [ -f /app/report.env ] && . /app/report.env; set +a\n"
        "exec python3 -I /tests/judge.py\n")),
    Flaw("sources a relative file", "verifier-executes-agent-text", "bash", test_script(
        "cd /app\nsource ./env.sh\nexec python3 -I /tests/judge.py\n")),
    Flaw("python path of the agent", "verifier-executes-agent-text", "bash", test_script(
        "PYTHONPATH=/app python3 /tests/judge.py\n")),
    Flaw("runs the agent's script inside", "verifier-executes-agent-text", "bash", judge_first(
        "import runpy\n\nAPP = Path('/app')\nrunpy.run_path(str(APP / 'count.py'))\n")),
    Flaw("executes the agent's file", "verifier-executes-agent-text", "bash", judge_first(
        "exec(open('/app/count.py').read())\n")),
    Flaw("imports from the agent's folder", "verifier-executes-agent-text", "bash", agent_module),
    Flaw("accepts a list of everything", "answer-spray", "python", verifier(
        "    return {'correctness': float('3' in final_text.split()), 'reasons': []}\n"), False),
    Flaw("crashes without an answer", "verifier-error", "python", verifier(
        RIGHT + "    return {'correctness': float(right and int(final_text) == 3),\n"
        "            'reasons': [str(int(final_text))]}\n"), False),
    Flaw("number anywhere in the answer", "answer-spray", "python", verifier(
        RIGHT + "    good = right and '3' in final_text\n"
        "    return {'correctness': float(good), 'reasons': []}\n"), False),
    Flaw("tolerance that a NaN meets", "answer-spray", "python", verifier(
        RIGHT + "    try:\n        far = abs(float(final_text) - 3) > 0.01\n"
        "    except ValueError:\n        far = True\n"
        "    return {'correctness': float(right and not far), 'reasons': []}\n"), False),
    Flaw("an empty report passes", "empty-passes", "bash", judge(
        "found == WANTED", "isinstance(found, dict) and all(WANTED.get(k) == v for k, v in "
        "found.items())"), False),
    Flaw("a bonus out of range", "verifier-error", "python", verifier(
        RIGHT + "    good = right and final_text.strip() == '3'\n"
        "    bonus = 0.2 if len(final_text) > 1 else 0.0\n"
        "    return {'correctness': good + bonus if good else 0.0, 'reasons': []}\n"), False),
    Flaw("answer computed from the agent's files", "verifier-trusts-agent", "bash",
         answer_from_agent_files, False),
    Flaw("follows links", "follows-links", "python", follow_links, False),
    # -- the task itself
    Flaw("public network", "agent-network", "python",
         manifest('network_mode = "no-network"\nworkdir', 'network_mode = "public"\nworkdir')),
    Flaw("unknown key", "invalid-task", "python",
         manifest("pass_threshold = 1.0", "pass_treshold = 1.0"), False),
    Flaw("no solution", "no-solution", "python", no_solution, False),
    Flaw("wrong solution", "oracle-fails", "python",
         lambda folder: edit(folder / "solution" / "calls.jsonl", "2820", "2821"), False),
    Flaw("attack that pays", "attack-passes", "python", passing_attack, False),
    Flaw("world by luck", "nondeterministic-world", "python", random_world, False),
    Flaw("setup fails", "setup-fails", "python",
         lambda folder: edit(folder / "tools" / "tools.py", "    _save(data)",
                             "    _save(data['missing'])"), False),
    Flaw("missing cassette", "missing-cassette", "python", replay_without_cassette, False),
    Flaw("damaged cassette", "invalid-task", "python", damaged_cassette, False),
    Flaw("cassette with a gap", "incomplete-cassette", "python", replay({"item": "bolt"}), False),
    Flaw("link out of the task", "linked-file", "python", link_out),
    Flaw("empty instruction", "empty-instruction", "python",
         lambda folder: (folder / "instruction.md").write_text("\n")),
    Flaw("min_tokens too high", "min-tokens-too-high", "python",
         manifest("min_tokens = 60", "min_tokens = 6000"), False),
    Flaw("too few turns", "oracle-over-budget", "python",
         manifest("max_turns = 12", "max_turns = 2"), False),
    Flaw("no turn to spare", "tight-turns", "python",
         manifest("max_turns = 12", "max_turns = 3"), False),
    Flaw("a read that counts views", "effect-mislabeled", "python",
         lambda folder: edit(folder / "tools" / "tools.py", '    items = _load()["items"]\n',
                             '    state = _load()\n    items = state["items"]\n'
                             '    state["views"] = state.get("views", 0) + 1\n    _save(state)\n'),
         False),
    Flaw("two tools of one name", "invalid-task", "python",
         lambda folder: append(folder / "tools" / "tools.py", "\n\n@tool(effect='read')\n"
                               "def list_items() -> str:\n    \"\"\"Again.\"\"\"\n"
                               "    return ''\n"), False),
    Flaw("alias of another tool", "invalid-task", "python",
         lambda folder: append(folder / "task.toml", "\n[metadata.parl.tools.list_items]\n"
                               'aliases = ["set_price"]\n'), False),
    # -- the day, luck, and results that are only partly right
    Flaw("tool closed at weekends", "luck-in-world", "python", tool_code(
        '    items = _load()["items"]\n',
        "    if datetime.date.today().weekday() > 4:\n    " + CLOSED
        + '    items = _load()["items"]\n', "import datetime\n")),
    Flaw("tool closed at weekends, hidden", "clock-dependent", "python", tool_code(
        '    items = _load()["items"]\n',
        "    if time.strftime('%a') in ('Sat', 'Sun'):\n    " + CLOSED
        + '    items = _load()["items"]\n', "import time\n"), False),
    Flaw("service closed at weekends", "clock-dependent", "http", service(
        "        parts = urlsplit", "        now = getattr(datetime.datetime, 'now')()\n"
        "        if getattr(now, 'isoweekday')() > 5:\n            " + BUSY + "parts = urlsplit",
        "import datetime\n"), False),
    Flaw("service busy by the clock", "luck-in-world", "http", service(
        "        parts = urlsplit", "        if time.time_ns() // 1000 % 1000 < 1:\n            "
        + BUSY + "parts = urlsplit", "import time\n")),
    Flaw("service busy by luck", "luck-in-world", "http", service(
        "        parts = urlsplit", "        if random.random() < 0.001:\n            "
        + BUSY + "parts = urlsplit", "import random\n")),
    Flaw("one answer in 300 fails", "unstable-read", "http", service(
        '        if url.path == "/health"',
        "        type(self).count = getattr(self, 'count', 0) + 1\n"
        "        if self.count % 300 == 0:\n            " + BUSY + 'if url.path == "/health"'),
        False),
    Flaw("half a result by hash order", "nondeterministic-verifier", "python", both(
        no_attacks, verifier(
            "    probe = next(iter({'bolt M6', 'cable 2 m', 'lamp'}))\n"
            "    right = end_state['items'][probe] == data['items'][probe]\n"
            "    return {'correctness': float(right and final_text.strip() == '3'),\n"
            "            'reasons': []}\n")), False),
    Flaw("a read nobody plays writes", "effect-mislabeled", "python", another_read(
        "    state = _load()\n    if item not in state['items']:\n"
        "        raise ToolError('no such item')\n    found = state['items'][item]\n"
        "    found['price'] = round(found['price'], -1)\n    _save(state)\n"
        "    return str(found['price'])"), False),
    Flaw("a read nobody plays is broken", "broken-tool", "python", another_read(
        "    return str(_load()['prices'][item])"), False),
    Flaw("too much is fine", "overdoing-passes", "http", refunds(
        "any(states.get(i) != 'refunded' for i in data['refunded'])"), False),
    Flaw("too little is fine", "partial-passes", "http", refunds(
        "states[data['refunded'][0]] != 'refunded'"), False),
    Flaw("more entries are fine", "overdoing-passes", "bash", judge(
        "found == WANTED", "isinstance(found, dict) and all(found.get(k) == v for k, v in "
        "WANTED.items())"), False),
    Flaw("half an answer passes", "partial-passes", "python", both(
        no_attacks, manifest("pass_threshold = 1.0", "pass_threshold = 0.5")), False),
    Flaw("cassette of broken arguments", "incomplete-cassette", "python",
         replay("{oops"), False),
    Flaw("a pipe in the folder", "special-file", "python",
         lambda folder: os.mkfifo(folder / "environment" / "pipe"), False),
]  # fmt: skip


def plant(flaw: Flaw, parent: Path) -> Path:
    """A fresh example with the flaw in it."""
    folder = write_task(parent / "planted", "acme/planted", flaw.family)
    flaw.plant(folder)
    return folder
