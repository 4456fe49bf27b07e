#!/bin/bash
# -I: nothing that the agent left beside the artifacts is imported.
exec python3 -I /tests/judge.py
