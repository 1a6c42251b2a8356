"""Counter-based noise: a pure function, and Gumbel."""

import math

import torch

from serving.models.noise import gumbel


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    assert torch.equal(gumbel(1, 2, 100), gumbel(1, 2, 200)[:100])
    assert not torch.equal(gumbel(1, 2, 100), gumbel(1, 3, 100))
    assert not torch.equal(gumbel(1, 2, 100), gumbel(2, 2, 100))


def test_noise_has_the_moments_of_a_gumbel() -> None:
    draws = torch.cat([gumbel(7, position, 10_000) for position in range(20)])
    assert abs(float(draws.mean()) - 0.5772) < 0.01
    assert abs(float(draws.var()) - math.pi**2 / 6) < 0.03
    assert torch.isfinite(draws).all()
