"""Everything a run is made of, as one TOML file. Sections of other rooms live in those rooms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from infra.config import ConfigModel
from parl.learner.config import LearnerConfig
from reward_models.config import RewardConfig
from sandbox.config import DockerSection


class RunSection(ConfigModel):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Names the run folder and the ledger row; a run id is name plus a number."""
    seed: int = Field(default=0, ge=0, lt=2**40)
    dir: str = "runs"
    """Parent of run folders."""
    ledger: str = ""
    """SQLAlchemy URL; empty = sqlite ledger.db in the run folder."""
    durable: bool = False
    """fsync every ledger transaction (power loss); a killed process loses nothing either way."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Serve Prometheus metrics here; None = off, 0 = any free port."""


class TasksSection(ConfigModel):
    family: str = "lookup_calc"
    """A shipped family, or "folder:PATH": a task folder or a folder of them."""
    mix: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict[str, float]
    )
    """Share of each task type among the prompts of a round (largest remainder); empty = alike."""
    allow_uncertified: bool = False
    """Train on task folders that no valid certificate of `parl task check` vouches for."""
    min_tokens: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict[str, int])
    """Fewest sampled tokens of a correct solution by task type, with this run's tokenizer; it
    replaces the author's estimate."""


class ChatSection(ConfigModel):
    words: tuple[str, ...] = ()
    """Whole strings that get a token of their own beside bytes and markers."""
    declare_tools: Literal["json", "names", "none"] = "json"
    system: str | None = None


class RolloutSection(ConfigModel):
    num_prompts: int = Field(default=16, ge=1)
    """Prompts (groups) a round."""
    num_samples: int = Field(default=8, ge=2)
    """Episodes a prompt: K of the group baseline."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    max_turns: int = Field(default=8, ge=1)
    max_tokens: int = Field(default=160, ge=1)
    """Sampled tokens an episode, over all turns."""
    max_tokens_per_turn: int = Field(default=64, ge=1)
    episode_timeout_s: float = Field(default=120.0, gt=0)
    round_timeout_s: float = Field(default=600.0, gt=0)
    max_attempts: int = Field(default=5, ge=1)
    """Tries of one episode when the infrastructure fails; then the round stops with the cause."""


class SandboxSection(ConfigModel):
    level: Literal["auto", "A", "B", "C", "docker", "ray"] = "auto"
    """auto = the best of A and B that works here; docker and ray (gVisor) only by name; C (no
    isolation) also needs unsafe_local."""
    unsafe_local: bool = False
    pool_size: int = Field(default=24, ge=1)
    """Warm boxes per rollout worker."""
    call_timeout_s: float = Field(default=10.0, gt=0)
    repairs: Literal["off", "strict", "cost", "anneal"] = "cost"
    """How far broken calls are mended in training (sandbox.calls.policy); each repair costs
    reward.repairs.cost."""
    eval_repairs: Literal["off", "strict", "cost"] = "off"
    """... in evaluation: off shows what the policy itself can do."""
    allow_live: bool = False
    """Proxied tools may reach real APIs (modes record, live_read, live); else they replay or
    simulate and any other mode is an error."""
    proxy_socket: str = ""
    """Control socket of the node's `python -m sandbox.proxy`; empty = a proxy in each worker."""
    docker: DockerSection = DockerSection()
    """Level docker: local names of the base images that Dockerfiles of task folders name, folders
    tasks may write, networks."""
    proxy_file: str = ""
    """proxy.toml of the operator (secrets, quotas, network) for the proxy in each worker."""


class WarmStartSection(ConfigModel):
    """Supervised start from oracle transcripts: clean ones first, then sloppy ones."""

    clean_steps: int = Field(default=60, ge=0)
    sloppy_steps: int = Field(default=100, ge=0)
    batch_size: int = Field(default=64, ge=1)
    sloppy_share: float = Field(default=0.9, ge=0, le=1)
    """Share of sloppy transcripts in the second part."""
    early_sloppy_share: float = Field(default=0.25, ge=0, le=1)
    """Share of sloppy transcripts in the first part, so that the second comes as no shock."""
    filler: float = Field(default=0.7, ge=0, le=1)
    """A sloppy transcript thinks aloud before a call with this probability."""
    redundant: float = Field(default=0.4, ge=0, le=1)
    """... asks again for something it knows with this probability."""
    guess: float = Field(default=0.3, ge=0, le=1)
    """... answers too early with a guess with this probability."""
    num_demonstrations: int = Field(default=1024, ge=1)
    """Training instances that transcripts are written for; batches draw from them."""
    muon_lr: float = Field(default=0.015, ge=0, allow_inf_nan=False)
    adamw_lr: float = Field(default=3e-3, ge=0, allow_inf_nan=False)
    sloppy_rate: float = Field(default=0.3, ge=0)
    """Rates of the sloppy part over those of the clean part."""
    decay_share: float = Field(default=0.5, ge=0, le=1)
    """Each part decays linearly to zero over this last share of its steps."""


class RoundsSection(ConfigModel):
    num_rounds: int = Field(default=60, ge=0)
    eval_episodes: int = Field(default=512, ge=0)
    """Held-out episodes before and after the rounds; 0 = no evaluation."""
    checkpoint_every: int = Field(default=5, ge=1)
    """Rounds between checkpoints; those in between are replayed from the ledger on resume."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest committed checkpoints that stay on disk; a resume needs only the last one."""
    permute_rewards: bool = False
    """Control experiment: shuffle rewards inside each group before advantages."""
    advantage: str = "group_mean"


class RaySection(ConfigModel):
    address: str = ""
    """Empty = start a local cluster; else an address Ray understands ("auto", host:port)."""
    num_cpus: int | None = Field(default=None, ge=1)
    num_runners: int = Field(default=2, ge=1)
    cpus_per_runner: float = Field(default=0.25, ge=0)
    num_engines: int = Field(default=1, ge=1)
    cpus_per_engine: float = Field(default=0.5, ge=0)
    num_learners: int = Field(default=0, ge=0)
    """0 = the learner lives in the driver process."""
    engine_threads: int = Field(default=1, ge=1)
    learner_threads: int = Field(default=1, ge=1)


class RunConfig(ConfigModel):
    """``parl rl run --config FILE --set a.b=c``."""

    run: RunSection = RunSection()
    backend: Literal["ray", "local"] = "ray"
    """local = everything in this process (debugging, tests)."""
    tasks: TasksSection = TasksSection()
    chat: ChatSection = ChatSection()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxSection = SandboxSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    warm_start: WarmStartSection = WarmStartSection()
    rounds: RoundsSection = RoundsSection()
    ray: RaySection = RaySection()

    @model_validator(mode="after")
    def _codes_are_reported(self) -> RunConfig:
        attention = self.model.attention
        coded = attention.mode == "hybrid" and attention.profile != "full"
        if coded and self.learner.replay_codes and not self.engine.report_codes:
            raise ValueError(
                "learner.replay_codes = true, but engine.report_codes = false: there would be "
                "nothing to read; set both to the same"
            )
        return self
