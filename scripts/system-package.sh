#!/usr/bin/env bash
# system-package.sh COMMAND PACKAGE [--always]: makes sure that COMMAND is there. Root gets Debian's
# PACKAGE when it is missing; anybody else is told what to install. --always installs PACKAGE even
# where COMMAND exists (a command that needs more than itself). Touches no apt configuration.
set -euo pipefail

command_name=$1
package=$2
always=${3:-}

# /usr/lib/postgresql/*/bin is where Debian keeps server programs that are not on PATH
present() {
    command -v "$command_name" >/dev/null 2>&1 ||
        compgen -G "/usr/lib/postgresql/*/bin/$command_name" >/dev/null
}

if [[ -z $always ]] && present; then
    exit 0
fi
if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null 2>&1; then
    echo "$command_name is missing: install it (Debian: sudo apt-get install $package) and run again" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "installing $package"
install() { apt-get install -y -q --no-install-recommends "$package" </dev/null >>"$log" 2>&1; }
# the package list of a bare machine is empty or old
if ! { apt-get update -q </dev/null >"$log" 2>&1 && install; } && ! install; then
    tail -n 20 "$log" >&2
    echo "apt-get install $package failed (its last lines are above)" >&2
    exit 1
fi
if ! present; then
    echo "$package is installed but $command_name is still not found" >&2
    exit 1
fi
