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
    sampling, vocab_size = request.sampling, logits.shape[1]
    if sampling.has_penalties:
        _penalise(logits, request)
    biases = [(token, bias) for token, bias in sampling.logit_bias if token < vocab_size]
    if biases:
        ids, values = zip(*biases, strict=True)
        logits[:, list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    num_held = min(request.num_rows, sampling.min_tokens - request.num_output)
    if num_held > 0:
        logits[:num_held, [token for token in sampling.held_ids if token < vocab_size]] = -math.inf


def _penalise(logits: Tensor, request: ScoreRequest) -> None:
    """frequency_penalty for each time a token is in the output so far, presence_penalty once.

    One subtraction a row and token, so that a row has the same bits whatever of its text was drafted.
    """
    committed = len(request.ids) - request.num_rows + 1
    known, base = np.unique(request.ids[request.prompt_len :], return_inverse=True)
    if not len(known):
        return
    num_output = committed - request.prompt_len
    counts = np.zeros((request.num_rows, len(known)), dtype=np.int64)
    counts[:] = np.bincount(base[:num_output], minlength=len(known))
    drafted = np.zeros_like(counts)
    drafted[np.arange(1, request.num_rows), base[num_output:]] = 1
    counts += drafted.cumsum(axis=0)
    penalty = request.sampling.frequency_penalty * counts + request.sampling.presence_penalty * (counts > 0)
    logits[:, known.tolist()] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)
