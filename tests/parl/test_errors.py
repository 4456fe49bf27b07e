"""Errors cross process borders in Ray and process pools."""

from __future__ import annotations

import pickle

from parl.errors import WaitTimeout


def test_a_wait_timeout_survives_pickling():
    """Owner, what and seconds; its base OSError would keep only two arguments."""
    error = pickle.loads(pickle.dumps(WaitTimeout("runner-1", "sandbox.call", 2.5)))
    assert (error.owner, error.what, error.timeout_s) == ("runner-1", "sandbox.call", 2.5)
    assert str(error).startswith("runner-1 waited 2.5 s for sandbox.call")
