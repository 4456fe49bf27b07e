#!/usr/bin/env bash
# docker-engine.sh: a Docker engine for the tests that need one. Root gets docker.io and iptables
# installed and dockerd started when none answers; it stays up. Where that cannot be (no root, or a
# kernel without what dockerd needs) one line says why, and those tests skip with the same reason.
set -euo pipefail

answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }
skip() {
    echo "docker tests will be skipped: $1"
    exit 0
}

if command -v docker >/dev/null 2>&1 && answers; then
    exit 0
fi
[[ $(id -u) -eq 0 ]] || skip "no engine answers, and starting one needs root"
here=$(dirname "$0")
"$here/system-package.sh" dockerd docker.io || skip "docker.io cannot be installed"
"$here/system-package.sh" iptables iptables || skip "iptables cannot be installed"
if answers; then
    exit 0
fi
log=${TMPDIR:-/tmp}/parl-dockerd.log
setsid nohup dockerd >"$log" 2>&1 </dev/null &
for _ in $(seq 60); do
    if answers; then
        echo "dockerd started (log: $log)"
        exit 0
    fi
    kill -0 $! 2>/dev/null || break
    sleep 0.5
done
skip "dockerd does not start: $(tail -n 1 "$log" | cut -c1-300)"
