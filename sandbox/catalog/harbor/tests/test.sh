#!/bin/sh
# Harbor entry point: the folders are arguments so that the test-suite can run it anywhere.
exec python3 -I "${2:-/tests}/harbor.py" "${1:-/app}" "${2:-/tests}" "${3:-/logs/verifier}"
