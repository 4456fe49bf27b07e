"""Pipeline: one call from arguments to result, in the order of facts/sandboxes.md 2.

Policy first: schema, access rule, mode, quotas, money; then the idempotency key, the upstream
(which puts secrets in last), the cassette, the shape of the answer and the audit line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from sandbox.proxy.audit import AuditLog, Journal
from sandbox.proxy.canonical import canonical_json, digest, idempotency_key
from sandbox.proxy.config import UPSTREAM_MODES, Mode, ProxyConfig
from sandbox.proxy.episode import Episode
from sandbox.proxy.errors import (
    BadArguments,
    CallFailure,
    EffectForbidden,
    EpisodeQuota,
    NoSimulator,
    OutcomeUnknown,
    ProxyCrashed,
    RecordFailed,
    RecordLost,
    ResponseTooLarge,
    ToolFailed,
    Unreachable,
    UpstreamRefused,
)
from sandbox.proxy.limits import QuotaGate
from sandbox.proxy.result import Account, ProxyResult, Reply, failed_result
from sandbox.proxy.retry import with_retries
from sandbox.proxy.scrub import Scrubber
from sandbox.proxy.shaping import Shaped, shape
from sandbox.proxy.upstreams.base import Prepared, SendContext
from sandbox.proxy.world import WorldTool

KillSwitch = Callable[[], Awaitable[bool]]
_ERROR_TEXT_BYTES = 4096
_log = logging.getLogger("parl.proxy")


class Pipeline:
    """Stateless but for its collaborators; any number of calls may run at once."""

    def __init__(
        self,
        config: ProxyConfig,
        *,
        scrubber: Scrubber,
        quotas: QuotaGate,
        audit: AuditLog,
        journal: Journal,
        hmac_key: bytes,
        kill_switch: KillSwitch,
    ) -> None:
        self._config = config
        self._scrubber = scrubber
        self._quotas = quotas
        self._audit = audit
        self._journal = journal
        self._hmac_key = hmac_key
        self._kill_switch = kill_switch
        self._audit_broken = False

    async def run(
        self,
        episode: Episode,
        index: int,
        name: str,
        arguments: dict[str, Any],
        *,
        repairs: Sequence[str] = (),
        policy_version: int | None = None,
    ) -> ProxyResult:
        """The call's result; failures are results too. Writes the audit line."""
        begin = time.perf_counter()
        account = Account()
        try:
            shaped = await self._answer(episode, index, name, arguments, account)
            result = self._done(shaped, account, begin)
        except CallFailure as failure:
            result = failed_result(failure, account, _since(begin))
        except asyncio.CancelledError:
            lost = ProxyCrashed("the episode was closed while the call ran")
            self._record(
                episode,
                index,
                name,
                repairs,
                policy_version,
                account,
                failed_result(lost, account, _since(begin)),
            )
            raise
        except Exception:  # the boundary: one episode's bad luck must not end the node's proxy
            _log.exception("call of %s failed inside the proxy", name)
            result = failed_result(ProxyCrashed("a fault of the proxy"), account, _since(begin))
        result = replace(result, text=self._scrubber.text(result.text))
        return self._record(episode, index, name, repairs, policy_version, account, result)

    def _done(self, shaped: Shaped, account: Account, begin: float) -> ProxyResult:
        return ProxyResult(
            text=shaped.text,
            value=shaped.value,
            mode=account.mode,
            effect=account.effect,
            status=account.status,
            cassette_hit=account.cassette_hit,
            cassette_digest=account.cassette_digest,
            num_bytes=account.num_bytes,
            elapsed_ms=_since(begin),
            cost=account.cost,
            num_attempts=account.num_attempts,
            cut=shaped.cut,
            canary_leak=account.canary_leak,
        )

    async def _answer(
        self, episode: Episode, index: int, name: str, arguments: dict[str, Any], account: Account
    ) -> Shaped:
        if self._audit_broken:
            raise RecordFailed("the audit log cannot be written; nothing runs unrecorded")
        tool = episode.world.tool(name)
        account.kind, account.effect = tool.source.upstream.kind, tool.spec.effect
        text = _canonical_arguments(arguments, self._config.limits.max_request_bytes)
        account.argument_hash = digest(arguments)
        account.canary_leak = episode.canary is not None and episode.canary in text
        if episode.num_calls > self._config.quotas.max_calls_per_episode:
            raise EpisodeQuota(
                f"the episode's {self._config.quotas.max_calls_per_episode} calls are used up"
            )
        tool.check(arguments)
        prepared = tool.source.upstream.prepare(tool.listed, arguments)
        key = digest([tool.source.name, prepared.canonical])
        place = episode.place(key, reads=tool.spec.effect == "read")
        account.mode = mode = await self._mode(tool)
        if mode == "replay":
            reply = await self._replay(tool, prepared, place, account)
        elif mode == "simulate":
            reply = await self._simulate(episode, tool, arguments)
        else:
            reply = await self._upstream(episode, index, tool, prepared, arguments, place, account)
        return self._shaped(reply, episode, account)

    async def _mode(self, tool: WorldTool) -> Mode:
        """The tool's mode, or what the kill switch leaves of it."""
        if tool.mode not in UPSTREAM_MODES or not await self._kill_switch():
            return tool.mode
        if tool.source.upstream.kind == "python":
            return "simulate"
        if tool.source.cassette is not None:
            return "replay"
        if tool.source.simulates(tool.listed):
            return "simulate"
        raise NoSimulator("the kill switch is on and this tool has no cassette and no simulator")

    async def _replay(
        self, tool: WorldTool, prepared: Prepared, place: tuple[str, int], account: Account
    ) -> Reply:
        cassette = tool.source.cassette
        assert cassette is not None, "load_tools checks that replay has a cassette"
        account.cassette_digest = cassette.digest
        key = cassette.request_key(tool.source.name, prepared.canonical)
        take = cassette.play(key, *place, tool.source.config.match, tool.spec.name)
        account.cassette_hit = True
        if self._config.replay_latency == "recorded":
            await asyncio.sleep(take.latency_s)
        return take.reply

    async def _simulate(
        self, episode: Episode, tool: WorldTool, arguments: dict[str, Any]
    ) -> Reply:
        source = tool.source
        upstream = source.upstream if source.upstream.kind == "python" else source.simulator
        if upstream is None:
            raise NoSimulator(f"{tool.spec.name} has no simulator")
        context = SendContext(episode.id, self._timeout_s(tool), "", None)
        return await upstream.send(upstream.prepare(tool.listed, arguments), context)

    async def _upstream(
        self,
        episode: Episode,
        index: int,
        tool: WorldTool,
        prepared: Prepared,
        arguments: dict[str, Any],
        place: tuple[str, int],
        account: Account,
    ) -> Reply:
        """record, live_read and live."""
        reads = tool.spec.effect == "read"
        if account.mode == "live_read" and not reads:
            raise EffectForbidden(f"{tool.spec.name} may change something; only reads are allowed")
        header = tool.config.idempotency_header
        repeatable = reads or tool.spec.idempotent or header is not None
        key = idempotency_key(self._hmac_key, episode.id, index, tool.spec.name, arguments)
        account.idempotency_key = key
        if not repeatable and self._journal.was_sent(key):
            raise OutcomeUnknown("this call was sent before and its answer is lost")
        await self._quotas.admit(episode.id, episode.world.name, tool, prepared.key)
        account.cost = tool.config.cost
        if not repeatable:
            await asyncio.to_thread(self._journal.sending, key, episode.id, tool.spec.name)
        context = SendContext(episode.id, self._timeout_s(tool), key, header)

        async def attempt() -> Reply:
            account.num_attempts += 1
            return await tool.source.upstream.send(prepared, context)

        async def admit() -> None:
            await self._quotas.admit_again(episode.world.name, tool, prepared.key)

        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._config.limits.deadline_s):
                reply = await with_retries(
                    attempt, self._config.retry, reads=reads, repeatable=repeatable, admit=admit
                )
        except TimeoutError:
            limit = f"no answer within {self._config.limits.deadline_s:g} s"
            if reads:
                raise Unreachable(limit) from None
            raise OutcomeUnknown(f"{limit}; the call may have taken effect") from None
        if account.mode == "record":
            self._to_cassette(tool, prepared, place, reply, time.perf_counter() - begin, account)
        return reply

    def _to_cassette(
        self,
        tool: WorldTool,
        prepared: Prepared,
        place: tuple[str, int],
        reply: Reply,
        latency_s: float,
        account: Account,
    ) -> None:
        cassette = tool.source.cassette
        assert cassette is not None, "load_tools checks that record has a cassette"
        try:
            cassette.record(
                upstream=tool.source.name,
                canonical=prepared.canonical,
                state=place[0],
                occurrence=place[1],
                reply=reply,
                latency_s=latency_s,
            )
        except RecordFailed as error:
            raise RecordLost(str(error)) from None
        account.cassette_digest = cassette.digest

    def _shaped(self, reply: Reply, episode: Episode, account: Account) -> Shaped:
        account.num_bytes, account.status = len(reply.body), reply.status
        if len(reply.body) > (most := self._config.limits.max_body_bytes):  # a simulator's
            raise ResponseTooLarge(f"the answer is over {most} bytes; ask for less")
        if reply.failed:
            raise ToolFailed(shape(reply, _ERROR_TEXT_BYTES).text)
        if reply.status is not None and reply.status >= 400:
            text = shape(reply, _ERROR_TEXT_BYTES).text
            raise UpstreamRefused(f"status {reply.status}: {text}", reply.status)
        return shape(reply, self._config.limits.max_text_bytes, episode.canary)

    def _timeout_s(self, tool: WorldTool) -> float:
        return tool.config.timeout_s or self._config.limits.timeout_s

    def _record(
        self,
        episode: Episode,
        index: int,
        name: str,
        repairs: Sequence[str],
        policy_version: int | None,
        account: Account,
        result: ProxyResult,
    ) -> ProxyResult:
        version = episode.policy_version if policy_version is None else policy_version
        try:
            self._audit.record(
                episode=episode.id,
                policy_version=version,
                call_index=index,
                tool=name[:200],
                repairs=repairs,
                account=account,
                result=result,
            )
            self._audit_broken = False
        except RecordFailed as error:
            # the next call is refused before it does anything, and its line is the next try
            self._audit_broken = True
            _log.error("audit: %s", error)
            failure = (
                RecordLost(str(error)) if result.outcome == "done" else RecordFailed(str(error))
            )
            return failed_result(failure, account, result.elapsed_ms)
        return result


def _canonical_arguments(arguments: dict[str, Any], max_bytes: int) -> str:
    try:
        text = canonical_json(arguments)
    except (ValueError, RecursionError):
        raise BadArguments("the arguments are no finite JSON") from None
    if len(text) > max_bytes:
        raise BadArguments(f"the arguments are over {max_bytes} bytes")
    return text


def _since(begin: float) -> float:
    return 1e3 * (time.perf_counter() - begin)
