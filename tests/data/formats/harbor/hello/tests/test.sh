#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://example.org/uv/install.sh | sh
source $HOME/.local/bin/env
uvx -p 3.12 -w pytest==8.4.1 pytest /tests/test_state.py -rA
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
