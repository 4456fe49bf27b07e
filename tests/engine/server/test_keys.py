"""API keys: where they come from, and who they let in."""

from __future__ import annotations

import pytest

from engine.server.config import ListenSection
from engine.server.errors import KeysError, Unauthorized
from engine.server.keys import KEYS_ENV, load_keys

A, B = "a" * 16, "b" * 32
LOCAL, ANYWHERE = ListenSection(), ListenSection(host="0.0.0.0")


def test_names_of_keys_from_a_file(tmp_path):
    """Comments and empty lines are skipped; a line without a name is called key."""
    file = tmp_path / "keys"
    file.write_text(f"# ours\nvip {A}\n\n{B}\n")
    file.chmod(0o600)
    keys = load_keys(ListenSection(host="0.0.0.0", keys_file=str(file)), {})
    assert keys.user_of(f"Bearer {A}") == "vip"
    assert keys.user_of(f"bearer {B}") == "key"
    for wrong in ("", A, f"Basic {A}", f"Bearer {A}x", "Bearer "):
        with pytest.raises(Unauthorized):
            keys.user_of(wrong)


def test_names_of_keys_from_the_environment():
    keys = load_keys(ANYWHERE, {KEYS_ENV: f"vip={A}, {B}"})
    assert (keys.user_of(f"Bearer {A}"), keys.user_of(f"Bearer {B}")) == ("vip", "key")


def test_no_keys_on_loopback_let_everybody_in():
    assert load_keys(LOCAL, {}).user_of("") == "anonymous"


@pytest.mark.parametrize(
    ("listen", "environ", "reason"),
    [
        (ANYWHERE, {}, "beyond loopback"),
        (LOCAL, {KEYS_ENV: "short"}, "5 characters"),
        (LOCAL, {KEYS_ENV: f"a={A},b={A}"}, "the same key"),
        (LOCAL, {KEYS_ENV: "a b=" + A}, "name 'a b'"),
        (LOCAL, {KEYS_ENV: "a=" + A + "é"}, "letters, digits"),
    ],
)
def test_keys_that_will_not_do(listen, environ, reason):
    with pytest.raises(KeysError, match=reason) as caught:
        load_keys(listen, environ)
    assert A not in str(caught.value)


def test_a_file_that_others_can_read(tmp_path):
    file = tmp_path / "keys"
    file.write_text(A)
    file.chmod(0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        load_keys(ListenSection(keys_file=str(file)), {})
