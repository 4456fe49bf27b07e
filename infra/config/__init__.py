"""Configuration: frozen pydantic models, TOML files merged in order, ``--set a.b=c`` on top.

config = load_config(RunConfig, [Path("configs/demo.toml")], ["rounds.num_rounds=3"])
(run_dir / "config.toml").write_text(dump_toml(config))
"""

from infra.config.dump import config_hash, dump_toml, flat
from infra.config.load import load_config
from infra.config.model import ConfigModel

__all__ = ["ConfigModel", "config_hash", "dump_toml", "flat", "load_config"]
