"""Log probabilities that a client asked for, from the logits before anything changed them."""

import numpy as np
import torch
from torch import Tensor

from serving.models.rows import log_sum_exp
from serving.types import Ids, RowLogprobs


def row_logprobs(raw: Tensor, *, draft_ids: Ids, next_ids: Ids, num_top: int) -> RowLogprobs:
    """Of raw float32 logits [S, V]: the draft's tokens, the target's, and the `num_top` likeliest, likeliest first."""
    totals = log_sum_exp(raw)[:, None]
    draft = torch.from_numpy(np.append(draft_ids, 0).astype(np.int64)).to(raw.device)
    picks = torch.stack([torch.from_numpy(next_ids.astype(np.int64)).to(raw.device), draft], dim=1)
    picked = (raw.gather(1, picks) - totals).cpu().numpy()
    top = raw.topk(num_top, dim=1)
    return RowLogprobs(
        draft=picked[:-1, 1],
        next=picked[:, 0],
        top_ids=top.indices.to(torch.int32).cpu().numpy(),
        top=(top.values - totals).cpu().numpy(),
    )
