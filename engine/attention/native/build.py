"""Compile attend.cpp for this machine, once: into a folder of the user, named by source and flags.

Nothing is built at install: a wheel travels between machines, the instruction set does not. The
compiler is ``$CXX`` or ``c++``; the folder ``$PARL_CACHE``, ``$XDG_CACHE_HOME/parl`` or
``~/.cache/parl``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

SOURCES = ("attend.cpp", "soft.inc", "rows.inc", "scan.inc")
COMMON = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", *_AVX2)
_AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"})
_AVX2_FLAGS = frozenset({"avx2", "fma", "f16c"})
INSTRUCTIONS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512": (_AVX512_FLAGS | _AVX2_FLAGS, _AVX512),
    "avx2": (_AVX2_FLAGS, _AVX2),
    "plain": (frozenset(), ()),
}
"""What the processor must name in /proc/cpuinfo and what the compiler is told, best first."""
TIMEOUT_S = 900


class BuildError(RuntimeError):
    """The library cannot be had on this machine; the message says why."""


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this processor, by their Linux names; none elsewhere."""
    info = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return frozenset()
    for line in info.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def best_instructions() -> str:
    flags = cpu_flags()
    return next(name for name, (needed, _) in INSTRUCTIONS.items() if needed <= flags)


def supported_instructions() -> list[str]:
    flags = cpu_flags()
    return [name for name, (needed, _) in INSTRUCTIONS.items() if needed <= flags]


def library(instructions: str) -> Path:
    """The shared library, built now if it is not there yet. BuildError without a compiler, or when
    it fails."""
    options = (*COMMON, *INSTRUCTIONS[instructions][1])
    return compile_once(Path(__file__).parent, SOURCES, options, f"attend-{instructions}")


def compile_once(
    folder: Path, sources: tuple[str, ...], options: tuple[str, ...], stem: str
) -> Path:
    """The shared library of ``sources`` (the first is compiled, it includes the others), as
    ``library`` says."""
    digest = hashlib.sha256(" ".join(options).encode())
    for name in sources:
        digest.update((folder / name).read_bytes())
    target = _cache() / f"{stem}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(folder / sources[0], options, target)
    return target


def _cache() -> Path:
    if named := os.environ.get("PARL_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "parl"


def _compile(source: Path, options: tuple[str, ...], target: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"there is no C++ compiler '{compiler[0]}'; install one or set CXX")
    # another process may build the same file: each writes its own, the last rename wins
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [*compiler, *options, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            if done.returncode:
                first = (done.stderr.strip() or "no message").splitlines()[0]
                raise BuildError(f"'{compiler[0]}' failed on {source.name}: {first}")
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{target} cannot be built: {error}") from error
    log.info("native library built", library=str(target))
