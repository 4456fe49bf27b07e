#!/usr/bin/env bash
# Fails for files above 512 KiB: weights, ledgers and recordings belong in a run folder, not in git.
set -euo pipefail
status=0
for file in "$@"; do
    size=$(stat -c %s -- "$file")
    if ((size > 512 * 1024)); then
        echo "$file: $size bytes, at most 524288 are kept in git" >&2
        status=1
    fi
done
exit $status
