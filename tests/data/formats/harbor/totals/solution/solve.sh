#!/bin/bash
set -e
python3 "$(dirname "$0")/totals.py" "$(region)" > out/totals.json
