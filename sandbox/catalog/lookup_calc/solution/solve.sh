#!/bin/sh
# Oracle for plain Harbor: answers from the store. PARL's own oracle is solution/calls.jsonl.
exec python3 -I "$(dirname "$0")/solve.py" "${1:-/app}"
