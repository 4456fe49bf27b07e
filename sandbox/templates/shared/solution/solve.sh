#!/bin/sh
# Oracle of plain Harbor; PARL plays solution/calls.jsonl.
exec python3 -I "$(dirname "$0")/solve.py"
