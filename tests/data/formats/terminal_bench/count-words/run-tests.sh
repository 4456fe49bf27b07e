#!/bin/bash
apt-get update && apt-get install -y curl
curl -LsSf https://example.org/uv/install.sh | sh
uv init && uv add pytest
uv run pytest $TEST_DIR/test_outputs.py -rA
