"""The service without HTTP, on real boxes: what it remembers, shares and gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from infra.db.engine import open_ledger
from infra.leases import LeaseBook
from sandbox.backends.base import Level
from sandbox.config import SandboxConfig
from sandbox.server.config import ServerConfig
from sandbox.server.errors import Busy, KeyReused, NotFound, SessionClosed, TooManyCalls
from sandbox.server.memo import Memo
from sandbox.server.service import SandboxService
from sandbox.server.wire import CreateSession, FamilyTask
from tests.sandbox.conftest import best_level

ASKED = CreateSession(task=FamilyTask(family="lookup_calc", task_type="lookup"))


def with_service(tmp_path: Path, body: Any, **config: Any) -> None:
    """Run ``await body(service)`` on a started service; nothing is leased afterwards."""
    level = best_level()
    box = SandboxConfig.model_validate({"level": level.value, "unsafe_local": level is Level.C})
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    leases = LeaseBook(ledger)

    async def go() -> None:
        service = SandboxService(ServerConfig(sandbox=box, **config), leases)
        await service.start()
        try:
            await body(service)
        finally:
            await service.stop()

    asyncio.run(go())
    assert leases.held() == []
    ledger.close()


def test_the_same_create_at_the_same_time_makes_one_session(tmp_path: Path):
    """Eight copies of a request in flight; then another body with their key."""

    async def body(service: SandboxService) -> None:
        made = await asyncio.gather(*(service.create(ASKED, "k") for _ in range(8)))
        assert len({live.id for live, _ in made}) == 1
        assert sorted(repeated for _, repeated in made) == [False] + [True] * 7
        assert service.pool_status()["in_use"] == 1
        with pytest.raises(KeyReused):
            await service.create(ASKED.model_copy(update={"owner": "x"}), "k")

    with_service(tmp_path, body)


def test_a_create_that_failed_may_be_tried_again(tmp_path: Path):
    """No room, then room: the key is not burnt."""

    async def body(service: SandboxService) -> None:
        first, _ = await service.create(ASKED, None)
        with pytest.raises(Busy, match="all 1 sessions"):
            await service.create(ASKED, "k")
        await service.close(first, "client")
        second, repeated = await service.create(ASKED, "k")
        assert not repeated and second.id != first.id

    with_service(tmp_path, body, max_sessions=1)


def test_closed_sessions_are_forgotten_in_order(tmp_path: Path):
    """The last two are remembered; the key of a forgotten one is free."""

    async def body(service: SandboxService) -> None:
        ids = []
        for number in range(3):
            live, _ = await service.create(ASKED, f"k{number}")
            await service.close(live, "client")
            ids.append(live.id)
        with pytest.raises(NotFound, match="is remembered"):
            service.find_closed(ids[0])
        with pytest.raises(SessionClosed, match="closed \\(client\\)"):
            service.find(ids[1])
        assert [live.id for live in service.sessions(closed=True)] == ids[:0:-1]
        again, repeated = await service.create(ASKED, "k2")
        assert repeated and again.id == ids[2]
        new, repeated = await service.create(ASKED, "k0")
        assert not repeated and new.id not in ids

    with_service(tmp_path, body, num_remembered=2)


def test_boxes_nobody_uses_are_given_up(tmp_path: Path):
    """After ``pool_idle_s`` without a session; one in use stays."""

    async def body(service: SandboxService) -> None:
        live, _ = await service.create(ASKED, None)
        await asyncio.sleep(0.8)
        assert len(service.pool_status()["pools"]) == 1
        await service.close(live, "client")
        await _until(lambda: service.pool_status()["pools"] == [])

    with_service(tmp_path, body, pool_idle_s=0.1)


def test_a_create_that_takes_too_long_leaves_nothing(tmp_path: Path):
    """Busy at its deadline, and the slot is free."""

    async def body(service: SandboxService) -> None:
        with pytest.raises(Busy, match="no session within"):
            await service.create(ASKED, None)
        assert service.pool_status()["in_use"] == 0

    with_service(tmp_path, body, create_timeout_s=0.001)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.05)


def test_who_waits_for_a_memo_may_leave():
    """The work goes on for the one who asks again; a full memo says so."""

    async def go() -> None:
        memo: Memo[int] = Memo(1)
        release = asyncio.Event()
        runs = 0

        async def work() -> int:
            nonlocal runs
            runs += 1
            await release.wait()
            return 7

        def ask(key: str = "k") -> Coroutine[Any, Any, tuple[int, bool]]:
            return memo.once(key, "same", work)

        first = asyncio.ensure_future(ask())
        await asyncio.sleep(0)
        first.cancel()
        second = asyncio.ensure_future(ask())
        with pytest.raises(TooManyCalls):
            await ask("other")
        release.set()
        assert await second == (7, True) and runs == 1
        assert first.cancelled()

    asyncio.run(go())
