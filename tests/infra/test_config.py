"""Configuration: merging, overrides, one-line errors, and writing back."""

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from infra.config import ConfigModel, config_hash, dump_toml, load_config
from infra.errors import ConfigError


class Optim(ConfigModel):
    lr: float = Field(1e-5, gt=0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = float("inf")


class Stage(ConfigModel):
    name: str
    rounds: int = 1


class Config(ConfigModel):
    name: str = "run"
    port: int | None = None
    mode: Literal["fast", "exact"] = "exact"
    mix: dict[str, float] = Field({"lookup": 0.5, "add": 0.5})
    optim: Optim = Optim()
    judge: Optim | None = None
    stages: tuple[Stage, ...] = ()
    low: int = 0
    high: int = 10

    @model_validator(mode="after")
    def _ordered(self) -> "Config":
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must not exceed high = {self.high}")
        return self


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    """Sections merge; values, lists and free tables are replaced."""
    first = write(tmp_path / "a.toml", 'name = "a"\nmix = {x = 1}\n[optim]\nlr = 1\nclip = 2')
    second = write(tmp_path / "b.toml", "mix = {y = 2}\n[optim]\nclip = 3")
    config = load_config(Config, [first, second])
    assert (config.name, config.mix) == ("a", {"y": 2.0})
    assert (config.optim.lr, config.optim.clip) == (1.0, 3.0)


@pytest.mark.parametrize(
    "override, read",
    [
        ("optim.lr=3e-4", lambda c: c.optim.lr == 3e-4),
        ("name=words of text", lambda c: c.name == "words of text"),
        ("name=7", lambda c: c.name == "7"),
        ('name="7"', lambda c: c.name == "7"),
        ("name=", lambda c: c.name == ""),
        ("name=a=b", lambda c: c.name == "a=b"),
        ("mix.add=0.9", lambda c: c.mix == {"lookup": 0.5, "add": 0.9}),
        ("mix.'x y'=1", lambda c: c.mix["x y"] == 1.0),
        ("mix={sub=1}", lambda c: c.mix == {"sub": 1.0}),
        ("judge.lr=2", lambda c: c.judge == Optim(lr=2)),
        ('stages=[{name="s"}]', lambda c: c.stages == (Stage(name="s"),)),
        ("optim.clip=inf", lambda c: c.optim.clip == float("inf")),
    ],
)
def test_overrides(override: str, read: Any) -> None:
    """A value is TOML, or the bare text where that is what the field takes."""
    assert read(load_config(Config, [], [override]))


def test_override_edits_the_free_table_of_a_file(tmp_path: Path) -> None:
    """One entry changes, the others stay as the file says."""
    path = write(tmp_path / "a.toml", "mix = {x = 1, y = 2}")
    assert load_config(Config, [path], ["mix.y=3"]).mix == {"x": 1.0, "y": 3.0}


@pytest.mark.parametrize(
    "text, overrides, message",
    [
        (
            "optim.lrr = 1",
            [],
            "FILE: unknown key optim.lrr: did you mean lr? optim knows betas, clip, lr",
        ),
        ("qqq = 1", [], "FILE: unknown key qqq: the top level knows high, judge, low, mix, mode"),
        ("[optim]\nlr = -1", [], "FILE: optim.lr = -1: expected greater than 0"),
        ("port = 'x'", [], 'FILE: port = "x": expected a valid integer'),
        ("mode = 'slow'", [], "FILE: mode = \"slow\": expected 'fast' or 'exact'"),
        ("optim = 3", [], "FILE: optim = 3: expected a table"),
        ("[[stages]]\nrounds = 2", [], "FILE: stages[0].name is missing: expected a value of type"),
        ("low = 11", [], "FILE: low = 11 must not exceed high = 10"),
        ("", ["optim.lr=fast"], '--set optim.lr=fast: optim.lr = "fast": expected a valid number'),
        ("low = 1", ["name.x=1"], '--set name.x=1: name = {"x": 1}: expected a valid string'),
        ("name = 'n'", ["name.x=1"], "--set name.x=1: name is 'n', not a table"),
        ("", ["optim.lr"], "--set optim.lr: expected KEY=VALUE with a dotted key"),
        ("", ["=3"], "--set =3: expected KEY=VALUE"),
        ("", ["a b=3"], "--set a b=3: expected KEY=VALUE"),
        ("low='a'\nhigh='b'", [], "also wrong: high"),
    ],
)
def test_errors_name_source_key_value_and_expectation(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    """One line says where, which key, what it is and what it should be."""
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(Config, [path], overrides)
    line = str(caught.value)
    assert message.replace("FILE", str(path)) in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "content, place",
    [
        (b"a = 1\nb = [1,\n", ":3:1: not TOML"),
        (b"a = 1\nb = =\n", ":2:5: not TOML"),
        (b"a = 1\na = 2", ":2:6: not TOML: Cannot overwrite a value"),
        (b"a = '\xff'", ": byte 5 is not UTF-8"),
    ],
)
def test_broken_toml(tmp_path: Path, content: bytes, place: str) -> None:
    """A syntax error gives file, line and column."""
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(Config, [path])
    assert f"{path}{place}" in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    """A path that is not there is the user's mistake."""
    with pytest.raises(ConfigError, match="no such file; expected a TOML configuration"):
        load_config(Config, [tmp_path / "none.toml"])


FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CONFIGS = st.builds(
    Config,
    name=TEXT,
    port=st.none() | st.integers(-(2**63), 2**63 - 1),
    mix=st.dictionaries(TEXT, FLOATS, max_size=3),
    optim=st.builds(Optim, lr=st.floats(1e-9, 1e9), betas=st.tuples(FLOATS, FLOATS)),
    judge=st.none() | st.builds(Optim, clip=FLOATS),
    stages=st.lists(st.builds(Stage, name=TEXT), max_size=2).map(tuple),
)


@given(CONFIGS)
def test_dump_round_trips(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    """What was written loads as an equal model with the same hash."""
    path = tmp_path_factory.getbasetemp() / "dump.toml"
    path.write_text(dump_toml(config), newline="")
    loaded = load_config(Config, [path])
    assert loaded == config
    assert config_hash(loaded) == config_hash(config)


def test_hash_depends_on_every_value() -> None:
    """A changed default changes the hash as much as a changed key."""
    assert config_hash(Config()) != config_hash(Config(optim=Optim(clip=1.0)))
    assert config_hash(Config()) == config_hash(load_config(Config, [], ["name=run"]))


def test_null_that_toml_cannot_say() -> None:
    """A None over another default cannot be written, and the message says where."""

    class Odd(ConfigModel):
        limit: int | None = 5

    with pytest.raises(ConfigError, match="limit: TOML has no null"):
        dump_toml(Odd(limit=None))


def test_sections_are_frozen_and_documented() -> None:
    """A config cannot change under a run; the string below a field is its description."""
    with pytest.raises(ValueError, match="frozen"):
        Config().name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    assert Optim.model_fields["lr"].description == "Learning rate."
