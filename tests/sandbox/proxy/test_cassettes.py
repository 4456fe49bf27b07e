"""Record with a real API, replay without it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.proxy.cassette import Cassette
from sandbox.proxy.errors import CassetteCorrupt, CassetteMiss
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult, Reply
from sandbox.proxy.scrub import Scrubber
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config, with_proxy

ROOT = Path(__file__).parents[3]
SCRIPT: list[tuple[str, dict[str, Any]]] = [
    ("list_items", {}),
    ("add_item", {"name": "a"}),
    ("list_items", {}),
    ("list_items", {}),
    ("get_item", {"id": "0"}),
    ("get_item", {"id": "7"}),
    ("delete_item", {"id": "0"}),
    ("get_item", {"id": "0"}),
    ("list_items", {}),
]


def play(config: Any, script: list[tuple[str, dict[str, Any]]]) -> list[ProxyResult]:
    async def body(proxy: ToolProxy, token: str) -> list[ProxyResult]:
        return [await proxy.call(token, tool, arguments) for tool, arguments in script]

    return with_proxy(config, body)


def essence(results: list[ProxyResult]) -> list[tuple[Any, ...]]:
    return [(r.text, r.value, r.error, r.status, r.outcome, r.num_bytes) for r in results]


def test_replay_equals_the_recording_with_the_server_gone(tmp_path: Path) -> None:
    """The same answers in the same order, reads after writes too, and not one connection."""
    server = ApiServer()
    recorded = play(api_config(tmp_path, server, mode="record"), SCRIPT)
    config = api_config(tmp_path, server, mode="replay")
    server.stop()
    replayed = play(config, SCRIPT)
    assert essence(replayed) == essence(recorded)
    assert [r.text for r in replayed][2] == '{"items": ["a"]}'
    assert [r.text for r in replayed][8] == '{"items": [null]}'
    assert all(r.cassette_hit and r.mode == "replay" and r.num_attempts == 0 for r in replayed)
    assert replayed[0].cassette_digest == recorded[-1].cassette_digest is not None


def test_a_miss_is_typed_and_never_goes_live(tmp_path: Path, api: ApiServer) -> None:
    """Another request, another order, one more repetition: CASSETTE_MISS, infrastructure."""
    play(api_config(tmp_path, api, mode="record"), SCRIPT)
    api.forget()
    config = api_config(tmp_path, api, mode="replay")
    for script in (
        [("get_item", {"id": "1"})],
        [("get_item", {"id": "0"})],  # recorded, but after the write
        [("list_items", {}), ("list_items", {})],  # recorded once in this state
    ):
        last = play(config, script)[-1]
        assert (last.error, last.infra, last.cassette_hit) == ("CASSETTE_MISS", True, False)
    assert not api.hits


def test_latest_repeats_the_last_answer(tmp_path: Path, api: ApiServer) -> None:
    """Past the last occurrence the last answer repeats; in a state that was never recorded the
    last answer of that request stands in."""
    play(api_config(tmp_path, api, mode="record"), SCRIPT)
    config = api_config(tmp_path, api, mode="replay", upstream={"match": "latest"})
    texts = [r.text for r in play(config, [("list_items", {})] * 3)]
    assert texts == ['{"items": []}'] * 3
    assert play(config, [("get_item", {"id": "0"})])[0].error == "upstream_4xx"
    assert play(config, [("get_item", {"id": "1"})])[0].error == "CASSETTE_MISS"


def test_polling_replays_answer_by_answer(tmp_path: Path, api: ApiServer) -> None:
    """Equal requests in one state replay in the order they were recorded."""
    script = [("flaky", {"status": 500, "times": 0})] * 3
    recorded = play(api_config(tmp_path, api, mode="record"), script)
    assert [r.value["tries"] for r in recorded] == [1, 2, 3]
    assert essence(play(api_config(tmp_path, api, mode="replay"), script)) == essence(recorded)


@pytest.mark.parametrize("switch", ["config", "file", "runtime", "cluster"])
def test_the_kill_switch_forces_replay(tmp_path: Path, api: ApiServer, switch: str) -> None:
    """Whichever switch is on: a live tool replays, and what has nothing to replay is refused."""
    play(api_config(tmp_path, api, mode="record"), [("weather", {"city": "x"})])
    api.forget()
    file = tmp_path / "stop"
    config = api_config(
        tmp_path, api, mode="live", kill_switch=switch == "config", kill_switch_file=str(file)
    )

    async def cluster() -> bool:
        return switch == "cluster"

    async def body(proxy: ToolProxy, token: str) -> None:
        if switch == "file":
            file.touch()
        proxy.set_kill_switch(switch in ("runtime", "config"))
        hit = await proxy.call(token, "weather", {"city": "x"})
        assert (hit.mode, hit.error, hit.cassette_hit) == ("replay", None, True)
        miss = await proxy.call(token, "weather", {"city": "y"})
        assert miss.error == "CASSETTE_MISS"

    with_proxy(config, body, kill_switch=cluster)
    assert not api.hits


def test_infrastructure_failures_are_not_recorded(tmp_path: Path, api: ApiServer) -> None:
    """A cassette holds what the API said, not that it was down."""
    play(api_config(tmp_path, api, mode="record"), [("flaky", {"status": 500, "times": 9})])
    assert not (tmp_path / "cassette.jsonl").exists()


def test_recorded_latency_can_be_replayed(tmp_path: Path, api: ApiServer) -> None:
    """Off by default; "recorded" waits as long as the upstream took."""
    script = [("slow", {"seconds": 0.3})]
    play(api_config(tmp_path, api, mode="record"), script)
    config = api_config(tmp_path, api, mode="replay")
    assert play(config, script)[0].elapsed_ms < 200
    slow = config.model_copy(update={"replay_latency": "recorded"})
    assert play(slow, script)[0].elapsed_ms >= 300


def record_one(path: Path, number: int) -> None:
    Cassette(path, Scrubber()).record(
        upstream="u",
        canonical={"number": number},
        state="0",
        occurrence=0,
        reply=Reply(f"answer {number}".encode(), "text/plain"),
        latency_s=0.0,
    )


def test_a_torn_line_costs_one_record_only(tmp_path: Path) -> None:
    """A crash in the middle of a write: the records before and after it stay whole."""
    path = tmp_path / "c.jsonl"
    record_one(path, 1)
    with path.open("ab") as file:
        file.write(b'{"v":1,"kind":"call","upstr')
    record_one(path, 2)
    cassette = Cassette(path, Scrubber())
    assert cassette.num_torn == 1
    for number in (1, 2):
        key = cassette.request_key("u", {"number": number})
        assert cassette.play(key, "0", 0, "strict", "t").reply.body == f"answer {number}".encode()


def test_edited_and_foreign_records_are_refused(tmp_path: Path) -> None:
    """A body that does not fit its hash and another schema version are errors, with the line."""
    path = tmp_path / "c.jsonl"
    record_one(path, 1)
    good = path.read_text()
    path.write_text(good.replace("answer 1", "answer 2"))
    with pytest.raises(CassetteCorrupt, match=":1: the record is damaged"):
        _ = Cassette(path, Scrubber()).digest
    path.write_text(good + good.replace('"v":1', '"v":99'))
    with pytest.raises(CassetteCorrupt, match=":2: schema version 99"):
        _ = Cassette(path, Scrubber()).digest


WRITER = """
import sys
from pathlib import Path
from sandbox.proxy.cassette import Cassette
from sandbox.proxy.result import Reply
from sandbox.proxy.scrub import Scrubber
cassette = Cassette(Path(sys.argv[1]), Scrubber())
for number in range(int(sys.argv[2]), 10**9):
    reply = Reply(f"answer {number}".encode(), "text/plain")
    cassette.record(upstream="u", canonical={"number": number}, state="0", occurrence=0,
                    reply=reply, latency_s=0.0)
"""


def test_a_killed_recorder_leaves_a_cassette_that_replays(tmp_path: Path) -> None:
    """kill -9 of two processes that append to one file: every whole line is a good record."""
    path = tmp_path / "c.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(start)], cwd=ROOT)
        for start in (0, 10**6)
    ]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 60_000):
        time.sleep(0.01)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
    cassette = Cassette(path, Scrubber())
    assert len(cassette.digest) == 64 and cassette.num_torn <= 1
    assert sum(1 for _ in path.open()) > 50
    number = json.loads(path.open().readline())["request"]["number"]
    key = cassette.request_key("u", {"number": number})
    body = cassette.play(key, "0", 0, "strict", "t").reply.body
    assert body == f"answer {number}".encode()


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    """Equal records, equal digest, whatever the file is called; one more record changes it."""
    for name in ("a", "b"):
        record_one(tmp_path / name, 1)
    first, second = (Cassette(tmp_path / name, Scrubber()) for name in ("a", "b"))
    assert first.digest == second.digest
    record_one(tmp_path / "b", 2)
    assert Cassette(tmp_path / "b", Scrubber()).digest != first.digest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.binary(max_size=64), JSON, st.integers(0, 3))
def test_any_reply_replays_byte_for_byte(body: bytes, arguments: Any, occurrence: int) -> None:
    """Whatever bytes an upstream answered, under whatever arguments."""
    path = (
        Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"parl-cassette-{os.getpid()}"
    )
    path.unlink(missing_ok=True)
    canonical = {"arguments": arguments}
    reply = Reply(body, "application/octet-stream", 200, {"etag": "x"}, failed=True)
    cassette = Cassette(path, Scrubber())
    cassette.record(
        upstream="u",
        canonical=canonical,
        state="s",
        occurrence=occurrence,
        reply=reply,
        latency_s=1,
    )
    cassette.close()
    again = Cassette(path, Scrubber())
    key = again.request_key("u", json.loads(json.dumps(canonical)))
    assert again.play(key, "s", occurrence, "strict", "t").reply == reply
    with pytest.raises(CassetteMiss):
        again.play(key, "s", occurrence + 1, "strict", "t")
    assert again.play(key, "t", 9, "latest", "t").reply == reply
