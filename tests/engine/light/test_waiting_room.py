"""The batch router's rules: bounds, priorities, room for VIPs, nobody starves, nobody is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import ValidationError

from engine.errors import CapacityError, DeadlineExceeded, Overloaded
from engine.light.rate import RateClass, TokenBucket
from engine.light.waiting_room import RouterConfig, Ticket, WaitingRoom


def ticket(now: float, priority: int = 0, kv: int = 1, deadline: float = math.inf) -> Ticket:
    return Ticket(priority, kv, now, deadline)


def room(**changes: object) -> WaitingRoom:
    values = {"max_running": 2, "reserved": 0, "waiting_factor": 2, **changes}
    return WaitingRoom(RouterConfig.model_validate(values), kv_bytes_total=100)


def test_full_rooms_refuse_and_say_when() -> None:
    """Two run, four wait, the seventh hears 429 and nothing of the others changes."""
    waiting = room()
    tickets = [ticket(0) for _ in range(6)]
    for one in tickets:
        waiting.enter(one, 0)
    assert [one.future.done() for one in tickets] == [True] * 2 + [False] * 4
    with pytest.raises(Overloaded, match="2 requests run and 4 wait") as refused:
        waiting.enter(ticket(0), 0)
    assert refused.value.retry_after_s >= 1
    assert (waiting.num_running, waiting.num_waiting, waiting.counts.shed) == (2, 4, 1)
    waiting.leave(tickets[0], 1)
    assert tickets[2].future.done() and waiting.num_waiting == 3


def test_a_vip_takes_the_place_of_the_last() -> None:
    """And runs first; the one sent away gets Overloaded, not silence."""
    waiting = room()
    tickets = [ticket(number / 100) for number in range(6)]
    for one in tickets:
        waiting.enter(one, 0.1)
    vip = ticket(0.1, priority=5)
    waiting.enter(vip, 0.1)
    with pytest.raises(Overloaded):
        tickets[5].future.result(0)
    waiting.leave(tickets[0], 0.2)
    assert vip.future.done() and not tickets[2].future.done()


def test_reserved_places_are_for_vips() -> None:
    """Others wait while one place is free; a VIP does not."""
    waiting = room(reserved=1)
    first, second, vip = ticket(0), ticket(0), ticket(0, priority=1)
    for one in (first, second, vip):
        waiting.enter(one, 0)
    assert [one.future.done() for one in (first, second, vip)] == [True, False, True]
    with pytest.raises(ValidationError, match="leaves nothing for the others"):
        RouterConfig(max_running=1, reserved=1)


def test_a_deadline_ends_the_wait() -> None:
    """With a typed error that says nothing was computed."""
    waiting = room(max_running=1)
    waiting.enter(ticket(0), 0)
    late = ticket(0, deadline=2.0)
    waiting.enter(late, 0)
    waiting.admit(1.9)
    assert not late.future.done() and waiting.next_deadline() == 2.0
    waiting.admit(2.0)
    with pytest.raises(DeadlineExceeded, match=r"after 2\.0 s of waiting"):
        late.future.result(0)
    assert waiting.num_waiting == 0 and waiting.counts.expired == 1


def test_what_never_fits_is_refused_at_once() -> None:
    """Waiting would not help."""
    with pytest.raises(CapacityError, match="may need 101 bytes"):
        room().enter(ticket(0, kv=101), 0)


def test_small_ones_do_not_pass_a_large_one_for_ever() -> None:
    """The first in rank holds the line."""
    waiting = room(max_running=4)
    running = ticket(0, kv=60)
    waiting.enter(running, 0)
    large, small = ticket(1, kv=60), ticket(2, kv=1)
    waiting.enter(large, 1)
    waiting.enter(small, 2)
    assert not large.future.done() and not small.future.done()
    waiting.leave(running, 3)
    assert large.future.done() and small.future.done()


def test_growth_at_the_peak_and_back() -> None:
    """The seed's worker growth: more run once 80 % of the room is taken, as before when empty."""
    waiting = room(growth=1.5, growth_limit=2.0)
    tickets = [ticket(0) for _ in range(6)]
    for one in tickets:
        waiting.enter(one, 0)
    assert waiting.at_peak and waiting.limit == 3 and waiting.counts.peaks == 1
    for number, one in enumerate(tickets):
        waiting.leave(one, number)
    assert not waiting.at_peak and waiting.limit == 2


def test_a_closed_room_refuses_with_its_reason() -> None:
    waiting = room()
    waiting.closed = "KV cache is full"
    with pytest.raises(Overloaded, match="KV cache is full"):
        waiting.enter(ticket(0), 0)


class Rooms(RuleBasedStateMachine):
    """Any order of arrivals, ends, leaves and time."""

    @initialize(
        running=st.integers(1, 4), reserved=st.integers(0, 3), growth=st.sampled_from([1.0, 1.5])
    )
    def begin(self, running: int, reserved: int, growth: float) -> None:
        self.config = RouterConfig(
            max_running=running,
            reserved=min(reserved, running - 1),
            max_waiting=7,
            growth=growth,
            aging_s=1.0,
        )
        self.room = WaitingRoom(self.config, kv_bytes_total=20)
        self.now = 0.0
        self.known: list[Ticket] = []

    @rule(
        priority=st.integers(-1, 3),
        kv=st.integers(0, 20),
        deadline=st.one_of(st.just(math.inf), st.floats(0.1, 9)),
    )
    def arrive(self, priority: int, kv: int, deadline: float) -> None:
        new = Ticket(priority, kv, self.now, self.now + deadline)
        try:
            self.room.enter(new, self.now)
        except Overloaded:
            assert self.room.num_waiting == self.room.room
        else:
            self.known.append(new)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.known))
        self.known.remove(one)
        self.room.leave(one, self.now)

    @rule(seconds=st.floats(0.1, 5))
    def later(self, seconds: float) -> None:
        self.now += seconds
        self.room.admit(self.now)

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "room"):
            return
        running = self.room._running
        most = int(self.config.max_running * self.config.growth_limit)
        assert len(running) <= most and self.room.num_waiting <= self.room.room
        assert sum(one.kv_bytes for one in running) <= 20
        for one in self.room._waiting:
            assert not one.future.done() and one.deadline > self.now
        counts = self.room.counts
        assert counts.began == counts.ended + len(running)

    def teardown(self) -> None:
        """Everybody who was let in begins, or was told why not, once the others end."""
        if not hasattr(self, "room"):
            return
        for _ in range(1000):
            begun = list(self.room._running)
            if not begun and not self.room._waiting:
                break
            assert begun, "somebody waits and nobody runs"
            self.room.leave(begun[0], self.now)
        assert all(one.future.done() for one in self.known)


TestRooms = Rooms.TestCase
TestRooms.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_nobody_waits_for_ever_behind_vips() -> None:
    """A VIP a second, each running a second: with aging the plain one has its turn."""
    waiting = room(max_running=1, aging_s=2.0, max_waiting=50, waiting_factor=50)
    running = ticket(0, priority=3)
    waiting.enter(running, 0)
    plain = ticket(0)
    waiting.enter(plain, 0)
    for second in range(1, 20):
        vip = ticket(second, priority=3)
        waiting.enter(vip, second)
        waiting.leave(running, second)
        if plain.future.done():
            assert second >= 6
            return
        running = next(iter(waiting._running))
    raise AssertionError("it starved")


@given(
    rate=st.floats(1, 1000),
    burst=st.floats(1, 1000),
    takes=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1500)), max_size=30),
)
def test_a_bucket_never_gives_more_than_its_rate(
    rate: float, burst: float, takes: list[tuple[float, float]]
) -> None:
    """Over any time: at most burst + rate x time, and one request that is larger than the burst.
    What is refused works after the time that was told."""
    bucket = TokenBucket(RateClass(tokens_per_s=rate, burst_tokens=burst), 0.0)
    now = given_out = 0.0
    largest = 0.0
    for pause, tokens in takes:
        now += pause
        wait_s = bucket.take(tokens, now)
        if wait_s:
            now += wait_s * (1 + 1e-9) + 1e-9
            assert bucket.take(tokens, now) == 0.0
        given_out += tokens
        largest = max(largest, tokens)
        assert given_out <= (burst + rate * now) * (1 + 1e-6) + max(0.0, largest - burst) + 1e-3


def test_tokens_given_back_can_be_used() -> None:
    bucket = TokenBucket(RateClass(tokens_per_s=1, burst_tokens=10), 0.0)
    assert bucket.take(10, 0.0) == 0.0
    assert bucket.take(5, 0.0) == pytest.approx(5.0)
    bucket.give_back(8, 0.0)
    assert bucket.take(5, 0.0) == 0.0


def test_a_kept_place_is_for_priority_however_long_others_wait() -> None:
    """A full room whose last has aged beyond the newcomer's priority: the free place is its all the
    same; without one it is sent away like anybody."""
    config = RouterConfig(max_running=3, reserved=1, waiting_factor=1, aging_s=1.0)
    room = WaitingRoom(config, 1000)
    for _ in range(5):
        room.enter(Ticket(0, 1, 0.0), 0.0)
    assert (room.num_running, room.num_waiting) == (2, 3)
    first = Ticket(1, 1, 9.0)
    room.enter(first, 9.0)
    assert first.future.done() and (room.num_running, room.num_waiting) == (3, 3)
    with pytest.raises(Overloaded):
        room.enter(Ticket(1, 1, 9.0), 9.0)
