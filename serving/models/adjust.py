"""What changes logits before anything is picked: bias, penalties, and stops held back until min_tokens.

Row j of a request's S rows sees ids[: len(ids) - S + 1 + j]; the output tokens among them are what penalties count,
so a drafted token counts for the rows behind it, exactly as if it had been emitted.
"""

import math

import numpy as np
import torch
from torch import Tensor

from serving.protocols import ScoreRequest


def adjust(logits: Tensor, request: ScoreRequest) -> None:
    """Apply `request.sampling` to its float32 rows logits[S, V], in place. Ids outside the vocabulary are ignored."""
    sampling = request.sampling
    if sampling.logit_bias:
        ids, bias = zip(*sampling.logit_bias, strict=True)
        logits[:, list(ids)] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
    if sampling.has_penalties:
        _penalise(logits, request)
    num_held = min(request.num_rows, sampling.min_tokens - request.num_output)
    if num_held > 0 and sampling.held_ids:
        logits[:num_held, list(sampling.held_ids)] = -math.inf


def _penalise(logits: Tensor, request: ScoreRequest) -> None:
    """frequency_penalty for each time a token is in the output so far, presence_penalty once."""
    frequency, presence = request.sampling.frequency_penalty, request.sampling.presence_penalty
    committed = len(request.ids) - request.num_rows + 1
    known, counts = np.unique(request.ids[request.prompt_len : committed], return_counts=True)
    if len(known):
        penalty = torch.from_numpy((frequency * counts + presence).astype(np.float32)).to(logits.device)
        logits[:, known.tolist()] -= penalty
    seen = set(known.tolist())
    for row, token in enumerate(request.draft_ids.tolist(), start=1):
        logits[row:, token] -= frequency + (0.0 if token in seen else presence)
        seen.add(token)
