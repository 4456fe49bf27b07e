"""StopFilter: what may be told before a stop text, whatever the tokens and deltas."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.light.stop_texts import StopTexts
from engine.server.stops import StopFilter

TOKENS = [b"", b"a", b"b", b"ab", b"aab", b"ba", "é".encode(), "é".encode()[:1], b"bab"]
stops = st.lists(st.sampled_from(["ab", "aba", "b", "bb", "é", "aab", "babab"]), max_size=3)


@settings(max_examples=120)
@given(
    stops, st.lists(st.integers(0, len(TOKENS) - 1), max_size=20), st.integers(1, 5), st.booleans()
)
def test_nothing_of_a_match_is_told_and_nothing_else_is_lost(stops, ids, step, include):
    """Against the engine's own matcher: the text is what stands before the match, to the byte; no
    token that was let through early belongs to it."""
    matcher = StopTexts(stops) if stops else None
    sampled, found = [], None
    for token in ids:
        sampled.append(token)
        found = matcher.push(TOKENS[token]) if matcher else None
        if found is not None:
            break
    held = StopFilter(stops, TOKENS.__getitem__)
    told: list[int] = []
    for start in range(0, len(sampled), step):
        told += held.push(sampled[start : start + step])
    early = b"".join(TOKENS[i] for i in told)
    rest, half = held.finish(found, include=include)
    text = b"".join(TOKENS[i] for i in [*told, *rest]) + half
    whole = b"".join(TOKENS[i] for i in sampled)
    if found is None:
        assert text == whole
        return
    last = len(TOKENS[sampled[-1]])
    at = whole.find(found.encode(), max(0, len(whole) - last - len(found.encode()) + 1))
    assert text == whole[: at + len(found.encode()) if include else at]
    assert len(early) <= at
