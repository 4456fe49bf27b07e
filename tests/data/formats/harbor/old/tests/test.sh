#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/sorted.txt 2>/dev/null)" = "$(printf 'apple\nfig\npear')" ] && [ -f /app/built.txt ]
then echo '{"reward": 1.0}' > /logs/verifier/reward.json
else echo '{"reward": 0.0}' > /logs/verifier/reward.json
fi
