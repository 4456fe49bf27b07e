"""Names that VllmRuntime and its code inside vLLM's worker share."""

BACKEND = "parl_file"
DRAW = "parl_draw"
"""In SamplingParams.extra_args: (run_seed, round, task, sample, stream)."""
