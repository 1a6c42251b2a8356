import torch

from tests.models.eagle_heads import TARGET_HIDDEN, plain_output, tiny_head
from tests.models.test_eagle3 import random_ids
from tuning.train_unroll import Unroll


def test_step_s_equals_the_head_that_drafted_the_last_s_tokens_itself() -> None:
    head = tiny_head(2)
    ids, features = random_ids(14, 3), torch.randn(13, 3 * TARGET_HIDDEN)
    following = torch.from_numpy(ids[1:].astype("int64"))
    unroll = Unroll(head, max_length=64)
    reached = unroll.first(features[None], following[None])
    for step in range(4):
        assert reached is not None
        assert reached.places[0].tolist() == list(range(step, 13))
        for at, position in enumerate(range(step, 13)):
            expected = plain_output(head, features[: position + 1 - step], ids[: position + 2])
            assert torch.allclose(reached.out[0, at], expected, atol=1e-4), (step, position)
        reached = unroll.next(reached, torch.ones_like(reached.is_real))


def test_a_chain_that_ends_changes_no_other() -> None:
    """Two texts, of which other numbers of chains go on at each step: what is reached is as if all did."""
    head, noise = tiny_head(2), torch.Generator().manual_seed(0)
    following = torch.stack([torch.from_numpy(random_ids(13, seed).astype("int64")) for seed in (3, 4)])
    features, unroll = torch.randn(2, 13, 3 * TARGET_HIDDEN), Unroll(head, max_length=64)
    every = some = unroll.first(features, following)
    for _ in range(3):
        goes_on = torch.rand(some.places.shape, generator=noise) < torch.tensor([[0.8], [0.4]])
        behind = [
            set((row[keep] + 1).tolist()) - {13} for row, keep in zip(some.places, goes_on & some.is_real, strict=True)
        ]
        following_every, following_some = unroll.next(every, torch.ones_like(every.is_real)), unroll.next(some, goes_on)
        assert following_every is not None
        assert following_some is not None
        every, some = following_every, following_some
        for row in range(2):
            places = some.places[row, some.is_real[row]]
            assert set(places.tolist()) == behind[row]
            assert torch.allclose(
                some.out[row, some.is_real[row]], every.out[row, places - every.places[row, 0]], atol=1e-5
            )


def test_nothing_is_behind_a_text_whose_chains_all_end() -> None:
    unroll = Unroll(tiny_head(2), max_length=64)
    reached = unroll.first(torch.randn(1, 5, 3 * TARGET_HIDDEN), torch.ones(1, 5, dtype=torch.int64))
    assert unroll.next(reached, torch.zeros_like(reached.is_real)) is None
    assert unroll.next(reached, torch.arange(5)[None] == 4) is None  # behind the last place there is none
