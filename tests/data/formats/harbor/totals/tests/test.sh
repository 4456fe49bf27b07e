#!/bin/bash
# Grades with the library of the image, not with files of the agent.
mkdir -p /logs/verifier
python3 /tests/grade.py > /logs/verifier/grade.log 2>&1
if [ $? -ne 0 ]; then echo '{"reward": 0}' > /logs/verifier/reward.json; fi
cat /logs/verifier/grade.log
