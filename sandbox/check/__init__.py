"""The author's check: what must hold before a task may train a policy (facts/sandboxes.md 1.2).

    report = asyncio.run(check_folder(Path("my-task"), CheckSettings(repeat=10)))
    report.passed, report.findings      # every finding has a rule name, a place and a sentence
    certificate = issue(report, load_key())

Steps in order: schema, lint, build, oracle, nop, agents (random and echo), attacks, tamper,
determinism, cassettes, leaks, timing. A step that cannot run says why; only a folder without a
failed step gets a certificate.
"""
