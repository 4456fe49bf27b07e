#!/bin/sh
# Oracle for plain Harbor: plays calls.jsonl with the world's own tools and writes the answer.
exec python3 -I "$(dirname "$0")/solve.py" "${1:-/app}" "${2:-/opt/parl/tool.py}"
