#!/bin/bash
echo "{\"ERROR\": $(cat /app/logs-in/*.log | grep -c ERROR)}" > /app/report.json
