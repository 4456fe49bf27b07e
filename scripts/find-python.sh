#!/usr/bin/env bash
# Prints a Python >= 3.11 that can make virtual environments. As root it installs Debian's when
# there is none; otherwise it says in one line what to install.
set -euo pipefail

usable() {
    # ensurepip is what Debian packages apart; without it venv makes an environment without pip
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local name
    # 3.11 first: what CI runs and what the tests are written against
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if usable "$name"; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

if find_python; then
    exit 0
fi
here=$(dirname "$0")
# python3-venv pulls python3 in; Debian 12 and later ship 3.11 or newer
if "$here/system-package.sh" python3 python3-venv --always >&2 && find_python; then
    exit 0
fi
echo "no Python >= 3.11 with venv found: apt-get install python3-venv (3.11 or newer), or set PYTHON" >&2
exit 1
