"""lightengine.yaml, as the seed writes it (4.2), in the words of ServeConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infra.errors import ConfigError

Settings = list[tuple[str, Any]]
"""(dotted key of ServeConfig, value)."""
_PROFILES = {8: "k8v8", 4: "k8v4"}
_DTYPES = ("bfloat16", "float32")


def read_seed_yaml(path: Path) -> list[str]:
    """``--set`` overrides that say the same; ConfigError names a key or value that is not known."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: {line}; expected a lightengine.yaml") from error
    return translated(data, str(path))


def translated(data: Any, where: str) -> list[str]:
    """See ``read_seed_yaml``."""
    import json

    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected sections {', '.join(_SECTIONS)}")
    settings: Settings = []
    for section, values in data.items():
        if section not in _SECTIONS:
            raise ConfigError(f"{where}: unknown section {section!r}; {_known(_SECTIONS)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: {section} = {values!r}, expected keys and values")
        keys = _SECTIONS[section]
        for key, value in values.items():
            if key not in keys:
                raise ConfigError(f"{where}: unknown key {section}.{key}; {_known(keys)}")
            try:
                settings += keys[key](value)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{where}: {section}.{key} = {value!r}, expected {error.args[0]}"
                ) from error
    warm = data.get("kv_cache", {}).get("warm_compress", True)
    if not warm:
        settings = [(k, v) for k, v in settings if k != _PROFILE] + [(_PROFILE, "full")]
    return [f"{key}={json.dumps(value)}" for key, value in settings]


def _known(keys: Mapping[str, Any]) -> str:
    return f"expected one of {', '.join(keys)}"


_ATTENTION = "model.attention"
_PROFILE = f"{_ATTENTION}.profile"
_HYBRID = (f"{_ATTENTION}.mode", "hybrid")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def _path(value: Any) -> Settings:
    if not isinstance(value, str):
        raise ValueError("a folder or a .gguf file")
    return [("model.path", value)]


def _dtype(value: Any) -> Settings:
    if value not in _DTYPES:
        raise ValueError(" or ".join(_DTYPES))
    if value == "float32":
        return []
    # where this CPU cannot compute in bf16 the engine says so and takes float32
    return [
        ("engine.deterministic", False),
        ("engine.compute", "auto"),
        ("engine.weights", value),
        ("engine.kv_dtype", value),
    ]


def _hot(value: Any) -> Settings:
    return [_HYBRID, (f"{_ATTENTION}.hot", _whole(value))]


def _bits(value: Any) -> Settings:
    if value not in _PROFILES:
        raise ValueError("8 or 4")
    return [_HYBRID, (_PROFILE, _PROFILES[value])]


def _summary_weight(value: Any) -> Settings:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1")
    # the seed's summaries are plain means of a block's keys and values; trained ones need a file
    hybrid = f"{_ATTENTION}.hybrid"
    return [
        _HYBRID,
        (f"{hybrid}.summary_weight", float(value)),
        (f"{hybrid}.summaries", "mean"),
    ]


_SECTIONS: dict[str, dict[str, Callable[[Any], Settings]]] = {
    "model": {"path": _path, "dtype": _dtype},
    "kv_cache": {
        "hot_size": _hot,
        "warm_compress": lambda v: [_HYBRID] if _flag(v) else [],
        "cold_summary": lambda v: [("user.summaries", _flag(v))],
        "warm_quant_bits": _bits,
    },
    "attention": {
        "window_size": lambda v: [_HYBRID, (f"{_ATTENTION}.hybrid.window", _whole(v))],
        "sparse_topk": lambda v: [_HYBRID, (f"{_ATTENTION}.hybrid.topk", _whole(v))],
        "summary_weight": _summary_weight,
    },
    "runtime": {
        "max_batch_size": lambda v: [("router.max_running", _whole(v))],
        "prefill_chunk_size": lambda v: [("engine.max_rows", max(32, _whole(v)))],
    },
}
