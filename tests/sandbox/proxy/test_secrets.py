"""Secrets: where they come from, where they go, and that they come back nowhere."""

import base64
import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sandbox.proxy.config import SecretConfig
from sandbox.proxy.errors import ProxyConfigError, SecretUnavailable
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.request import HttpRequest
from sandbox.proxy.scrub import MARK, Scrubber, ScrubFilter
from sandbox.proxy.secrets import SecretStore
from sandbox.proxy.server import quiet_logs
from sandbox.proxy.signing import Signable, SigV4
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config, with_proxy

SECRET = "sk-live/4+eC39%HqLyjW&Dar j"


def bound(**binding: Any) -> dict[str, Any]:
    base = {"host": "127.0.0.1", "allow_plain_http": True, **binding}
    return {"key": {"env": "PARL_TEST_SECRET", "bind": [base]}}


PLACES = [
    {"place": "header", "name": "Authorization", "format": "Bearer {secret}"},
    {"place": "header", "name": "X-Api-Key"},
    {"place": "query", "name": "appid"},
    {"place": "body", "name": "auth.key"},
    {
        "place": "sign",
        "signer": {
            "options": {"region": "us-east-1", "service": "execute-api", "access_key_id": "key"}
        },
    },
]


@pytest.mark.parametrize("binding", PLACES, ids=lambda b: f"{b['place']}-{b.get('name', '')}")
def test_a_secret_goes_up_and_never_comes_back(
    tmp_path: Path,
    api: ApiServer,
    binding: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The API gets it; result, audit, cassette, journal and logs hold no form of it, though the
    API answers with all it was sent, in plain, base64 and URL-encoded form."""
    monkeypatch.setenv("PARL_TEST_SECRET", SECRET)
    caplog.set_level(logging.DEBUG)
    quiet_logs(ScrubFilter(Scrubber([SECRET])))
    config = api_config(tmp_path, api, mode="record", secrets=bound(**binding))

    async def body(proxy: ToolProxy, token: str) -> list[str]:
        tools = ["echo_post"] if binding["place"] == "body" else ["echo", "echo_post"]
        if binding["place"] == "body":  # a request without a body has no room for it
            refused = await proxy.call(token, "echo", {"q": "x"})
            assert (refused.error, refused.infra) == ("secret_unavailable", True)
        results = [await proxy.call(token, tool, {"q": f"is it {SECRET}?"}) for tool in tools]
        assert [result.error for result in results] == [None] * len(tools)
        return [json.dumps(result.to_dict()) for result in results]

    written = with_proxy(config, body)
    sent = "".join(f"{path} {headers} {body.decode()}" for _, path, headers, body in api.seen)
    if binding["place"] == "sign":
        assert "AWS4-HMAC-SHA256" in sent
    elif binding["place"] == "query":
        assert quote(SECRET, safe="") in sent
    else:
        assert SECRET in sent
    written += [path.read_text() for path in (tmp_path / "state").glob("*.jsonl")]
    written += [(tmp_path / "cassette.jsonl").read_text(), caplog.text]
    everything = "\n".join(written)
    middle = SECRET[3:-3]
    for form in (
        middle,
        quote(middle, safe=""),
        quote_plus(middle),
        base64.b64encode(SECRET.encode()).decode()[4:-4],
        base64.b64encode(b"user:" + SECRET.encode()).decode()[12:-4],
    ):
        assert form not in everything
    if binding["place"] == "sign":
        signature = sent.partition("Signature=")[2][:64]
        assert len(signature) == 64 and signature not in everything


def test_a_secret_goes_only_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host, method and path must all match; without TLS it is not sent at all."""
    monkeypatch.setenv("PARL_TEST_SECRET", SECRET)
    binding = {"host": "*.example.com", "methods": ["GET"], "path": "/v1/*"}
    store = SecretStore(
        {"key": SecretConfig.model_validate({"env": "PARL_TEST_SECRET", "bind": [binding]})}
    )

    def request(method: str, host: str, path: str, scheme: str = "https") -> HttpRequest:
        return HttpRequest(method, scheme, host, None, path)

    assert store.names_for(request("GET", "api.example.com", "/v1/a")) == ("key",)
    for other in (
        request("POST", "api.example.com", "/v1/a"),
        request("GET", "example.com", "/v1/a"),
        request("GET", "api.example.com.evil.org", "/v1/a"),
        request("GET", "api.example.com", "/v1/a/b"),
        request("GET", "api.example.com", "/v2/a"),
    ):
        assert store.names_for(other) == ()
        assert store.inject(other)[0] == other
    with pytest.raises(SecretUnavailable, match="TLS only"):
        store.inject(request("GET", "api.example.com", "/v1/a", scheme="http"))


def test_two_secrets_for_one_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one wins must not depend on the order of a file."""
    monkeypatch.setenv("PARL_TEST_SECRET", SECRET)
    config = SecretConfig.model_validate(bound(host="h")["key"])
    store = SecretStore({"a": config, "b": config})
    with pytest.raises(SecretUnavailable, match="two secrets"):
        store.inject(HttpRequest("GET", "https", "h", None, "/"))


def test_sources_and_their_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """env, file and command; errors name the secret and its source, never a value."""
    monkeypatch.setenv("PARL_TEST_SECRET", SECRET)
    (tmp_path / "key").write_text(SECRET + "\n")
    good = {
        "env": {"env": "PARL_TEST_SECRET"},
        "file": {"file": str(tmp_path / "key")},
        "command": {"command": ["cat", str(tmp_path / "key")]},
    }
    for source in good.values():
        store = SecretStore({"s": SecretConfig.model_validate(source)})
        assert store.scrubber.text(f"<{SECRET}>") == f"<{MARK}>"
    (tmp_path / "short").write_text("pin1")
    (tmp_path / "two").write_text("line one is long\nline two\n")
    for source, message in [
        ({"env": "PARL_NO_SUCH"}, "PARL_NO_SUCH is not set"),
        ({"file": str(tmp_path / "none")}, "No such file"),
        ({"file": str(tmp_path / "short")}, "at least 8"),
        ({"file": str(tmp_path / "two")}, "control characters"),
        ({"command": ["false"]}, "exit code 1"),
        ({"command": ["/no/such/program", SECRET]}, "did not run: FileNotFoundError"),
    ]:
        with pytest.raises(ProxyConfigError, match=message) as caught:
            SecretStore({"s": SecretConfig.model_validate(source)})
        assert "secrets.s" in str(caught.value) and SECRET not in str(caught.value)


def test_a_refused_credential_is_infrastructure(
    tmp_path: Path, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """401 with our key is the operator's trouble; without a key it is an ordinary answer."""
    monkeypatch.setenv("PARL_TEST_SECRET", SECRET)

    async def body(proxy: ToolProxy, token: str) -> Any:
        return await proxy.call(token, "status", {"code": "401"})

    with_key = with_proxy(api_config(tmp_path, api, secrets=bound()), body)
    without = with_proxy(api_config(tmp_path, api), body)
    assert (with_key.error, with_key.infra) == ("credential_refused", True)
    assert (without.error, without.infra) == ("upstream_4xx", False)


# --- the scrubber -----------------------------------------------------------------------------

secrets = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), min_size=8
)
padding = st.binary(max_size=7)


def partly_quoted(text: str, draws: list[bool], lower: bool) -> str:
    """Any mixture of raw and percent-encoded characters, in either case of hex digits."""
    out = []
    for index, char in enumerate(text):
        encoded = "".join(f"%{byte:02x}" if lower else f"%{byte:02X}" for byte in char.encode())
        out.append(encoded if draws[index % len(draws)] else char)
    return "".join(out)


@given(secrets, padding, padding, st.lists(st.booleans(), min_size=1), st.booleans())
@example("a+b/c d%2e&=~", b"user:", b"@host", [True, False], True)
def test_no_form_of_a_secret_survives(
    secret: str, before: bytes, after: bytes, draws: list[bool], lower: bool
) -> None:
    """Plain, JSON, percent-encoded in part, twice, form-encoded, base64 and base64url inside a
    longer text at any offset, hexadecimal."""
    assume(len(set(secret)) > 2)
    raw = secret.encode()
    scrubber = Scrubber([secret])
    longer = before + raw + after
    forms = {
        "plain": secret,
        "json": json.dumps(secret)[1:-1],
        "json, utf-8": json.dumps(secret, ensure_ascii=False)[1:-1],
        "quote": quote(secret, safe=""),
        "form": quote_plus(secret),
        "mixed": partly_quoted(secret, draws, lower),
        "twice": quote(quote(secret, safe=""), safe=""),
        "hex": raw.hex(),
    }
    for name, form in forms.items():
        assert form not in scrubber.text(f"<{form}>"), name
        assert form.encode() not in scrubber.data(f"<{form}>".encode()), name
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(longer).decode()
        clean = scrubber.text(encoded)
        assert MARK in clean
        # what is left around the mark must not give the secret away: at most its edge bits
        left, _, right = clean.partition(MARK)
        assert len(left) * 6 // 8 <= len(before) + 1 and len(right) * 6 // 8 <= len(after) + 4


@given(st.text(), secrets)
def test_text_without_the_secret_is_left_alone(text: str, secret: str) -> None:
    """Scrubbing twice changes nothing, and a text without a secret comes back as it was."""
    scrubber = Scrubber(["0123456789abcdef" * 2])
    assert scrubber.text(text) == text
    once = Scrubber([secret]).text(text + secret)
    assert secret in MARK or secret not in once


def test_scrubbing_is_linear() -> None:
    """1 MB of percent signs, the worst case of the slow path, in well under a second."""
    scrubber = Scrubber([SECRET, "another-secret-value", "third%secret%value"])
    begin = datetime.now(UTC)
    scrubber.text("%73%6B%2D" * 110_000)
    scrubber.text("\\" * 1_000_000)
    assert (datetime.now(UTC) - begin).total_seconds() < 5


@pytest.mark.parametrize(
    ("signer", "request_", "when", "signature"),
    [
        (
            SigV4(
                "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "us-east-1", "service"
            ),
            Signable("GET", "example.amazonaws.com", "/", (), {}, b""),
            datetime(2015, 8, 30, 12, 36, tzinfo=UTC),
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
        ),
        (
            SigV4("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
                  "us-east-1", "s3"),
            Signable("GET", "examplebucket.s3.amazonaws.com", "/test.txt", (),
                     {"range": "bytes=0-9"}, b""),
            datetime(2013, 5, 24, tzinfo=UTC),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            SigV4("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
                  "us-east-1", "s3"),
            Signable("GET", "examplebucket.s3.amazonaws.com", "/",
                     (("prefix", "J"), ("max-keys", "2")), {}, b""),
            datetime(2013, 5, 24, tzinfo=UTC),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
    ids=["get-vanilla", "s3-get-object", "s3-list"],
)  # fmt: skip
def test_sigv4_gives_the_published_signatures(
    signer: SigV4, request_: Signable, when: datetime, signature: str
) -> None:
    """Worked examples of AWS: the SigV4 test suite and the S3 API reference."""
    header = signer.sign(request_, when)["authorization"]
    assert header.endswith(f"Signature={signature}")
