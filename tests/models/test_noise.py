"""Counter-based noise: a pure function of its keys and the token id, and Gumbel."""

import math

import torch

from serving.models.noise import gumbel, noise_keys

IDS = torch.arange(10_000)


def noise_of(seed: int, position: int, ids: torch.Tensor = IDS) -> torch.Tensor:
    return gumbel(torch.tensor([noise_keys(seed, position)]), ids)[0]


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    noise = noise_of(1, 2)
    some = torch.tensor([7, 3, 9_999])
    assert torch.equal(noise_of(1, 2, some), noise[some])
    assert not torch.equal(noise_of(1, 3), noise)
    assert not torch.equal(noise_of(2, 2), noise)


def test_any_64_bit_seed_has_its_own_noise() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**40 + 1]
    assert len({noise_keys(seed, position) for seed in seeds for position in range(50)}) == len(seeds) * 50


def test_noise_has_the_moments_of_a_gumbel() -> None:
    draws = torch.cat([noise_of(7, position) for position in range(20)])
    assert abs(float(draws.mean()) - 0.5772) < 0.01
    assert abs(float(draws.var()) - math.pi**2 / 6) < 0.03
    assert torch.isfinite(draws).all()


def test_neighbouring_positions_and_tokens_are_independent() -> None:
    a, b = noise_of(7, 1), noise_of(7, 2)
    for x, y in ((a, b), (a[:-1], a[1:]), (a[:-64], a[64:])):
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 0.03
