import torch

from tests.models.eagle_heads import TARGET_HIDDEN, plain_output, tiny_head
from tests.models.test_eagle3 import random_ids
from tuning.train_unroll import Unroll


def test_step_s_equals_the_head_that_drafted_the_last_s_tokens_itself() -> None:
    head = tiny_head(2)
    ids, features = random_ids(14, 3), torch.randn(13, 3 * TARGET_HIDDEN)
    following = torch.from_numpy(ids[1:].astype("int64"))
    steps = Unroll(head, steps=4, max_length=64).outputs(features[None], following[None])
    for step, outputs in enumerate(steps):
        for position in range(step, 13):
            known = features[: position + 1 - step]
            expected = plain_output(head, known, ids[: position + 2])
            assert torch.allclose(outputs[0, position], expected, atol=1e-4), (step, position)
