"""The bias rule, the sequence loss, and the alarms."""

from __future__ import annotations

import pytest
import torch

from engine.model.balance import LoadWindow, move_bias, sequence_aux_loss


def test_bias_moves_against_the_load():
    """One step of the rate each, nothing where the load is the mean."""
    bias = torch.zeros(4)
    move_bias(bias, torch.tensor([10, 2, 6, 6]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_centred_bias_chooses_the_same_and_does_not_drift():
    """Both variants differ by a constant, which no top-k sees."""
    generator = torch.Generator().manual_seed(0)
    plain, centred = torch.zeros(16), torch.zeros(16)
    for _ in range(200):
        loads = torch.randint(0, 100, (16,), generator=generator) ** 3
        move_bias(plain, loads, 1e-3)
        move_bias(centred, loads, 1e-3, centred=True)
    difference = plain - centred
    assert float(difference.std()) < 1e-5 and float(difference.mean()) > 0.01
    assert abs(float(centred.mean())) < 1e-6


def naive_loss(scores: torch.Tensor, chosen: torch.Tensor, sequence: torch.Tensor) -> float:
    """facts 3, in loops."""
    num_experts, top_k = scores.shape[1], chosen.shape[1]
    total, sequences = 0.0, sorted(set(sequence.tolist()))
    for number in sequences:
        rows = [n for n in range(len(sequence)) if sequence[n] == number]
        for i in range(num_experts):
            times = sum(int((chosen[n] == i).any()) for n in rows)
            f = num_experts / (top_k * len(rows)) * times
            p = sum(float(scores[n, i] / scores[n].sum()) for n in rows) / len(rows)
            total += f * p
    return total / len(sequences)


def test_sequence_loss():
    """Equals the loops, is 1 for an even router, and its gradient lowers the crowded expert."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(23, 6, generator=generator, requires_grad=True)
    chosen = scores.detach().topk(2, dim=-1).indices
    sequence = torch.arange(23) % 3
    loss = sequence_aux_loss(scores, chosen, sequence)
    assert float(loss.detach()) == pytest.approx(
        naive_loss(scores.detach(), chosen, sequence), rel=1e-5
    )
    even = torch.full((6, 6), 0.5)
    turns = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6], dim=1)
    assert float(sequence_aux_loss(even, turns, torch.zeros(6).long())) == pytest.approx(1.0)
    crowded = torch.rand(8, 6, generator=generator, requires_grad=True)
    always = torch.tensor([[0, 1]]).expand(8, 2)
    sequence_aux_loss(crowded, always, torch.zeros(8).long()).backward()
    assert crowded.grad is not None
    assert (crowded.grad[:, :2] > 0).all() and (crowded.grad[:, 2:] < 0).all()


def test_window_forgets_old_batches():
    """It holds the last ``window`` tokens or a little more, and knows the floor of luck."""
    window = LoadWindow(1, 4, 2, window=100)
    for step in range(5):
        loads = torch.zeros(1, 4, dtype=torch.int64)
        loads[0, step % 4 : step % 4 + 1] = 80
        window.add(loads, 40)
    assert window.num_tokens == 120 and window.is_full
    assert window.loads.tolist() == [[80, 0, 80, 80]]
    big = LoadWindow(1, 384, 8)
    big.add(torch.full((1, 384), 10), 4096)
    assert big.floor() == pytest.approx(0.107, abs=5e-4) and float(big.cv()) == 0.0
    assert not big.is_full and big.alarms() == []
    big.add(torch.full((1, 384), 10), 524_288)
    assert big.floor() == pytest.approx(0.0095, abs=1e-4) and big.alarms() == []


def test_alarms():
    """An expert without tokens, and a router that sends everything to a few."""
    window = LoadWindow(3, 64, 2, window=1000)
    loads = torch.full((3, 64), 31)
    loads[1, 7] = 0
    loads[2] = 1
    loads[2, :2] = 969
    window.add(loads, 1000)
    alarms = window.alarms()
    assert [(alarm.layer, alarm.kind) for alarm in alarms] == [(1, "dead"), (2, "collapse")]
    assert "1 of 64 experts got none of 1000 tokens, first [7]" in alarms[0].detail
    assert "equal experts of 64" in alarms[1].detail
