"""Where the training of an EAGLE-3 head starts: at the linear map that best says what the target will say next.

The head reads the features of position p and the token at p + 1. A ridge regression from both to what the target's head
reads at p + 1 has a closed form, and is worth the first thousand steps of training. Its part for the features becomes
`fc`; its part for the token becomes the values of an attention that starts by looking at its own position alone. H
hidden size, F = 3 H features a position, Vd draft vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from serving.errors import ModelError
from serving.models.eagle3 import Eagle3Config, Eagle3Head
from serving.models.hf_decoder import final_logits
from serving.models.packed import Network
from tuning.train_features import FeatureSet

# Features of a text's first positions are of another size in many models, and nobody drafts there.
_FIRST = 4
# Positions to fit on for each number that the head reads.
_FIT_PER_INPUT = 16
_RIDGE = 1e-3
# The score a position starts with towards itself, against about 0 towards others.
_SELF_SCORE = 8.0
# Spread of what starts at random, in shares of 1 / sqrt(inputs): it must learn, yet not be heard at first.
_QUIET = 0.1
# Regression says the right thing too loudly: what its logits are multiplied by is the best of these.
# Wide, for some families divide or multiply their logits and a head does not.
_LOUDNESS: tuple[float, ...] = tuple(2.0 ** (i / 2) for i in range(-20, 9))
_LOUDNESS_TEXTS = 4


class TargetHead:
    """The target's final norm and its head's rows of the draft vocabulary."""

    def __init__(self, network: Network, target_ids: Tensor) -> None:
        self._norm = network.get_decoder().norm.float()
        self._rows = network.lm_head.weight.detach().float()[target_ids]
        self._config = network.config.get_text_config()

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head's rows read, of the last layer's output [n, H]."""
        with torch.no_grad():
            normed: Tensor = self._norm(hidden)
        return normed

    def probs(self, hidden: Tensor) -> Tensor:
        """[n, Vd]: the target's next-token distribution within the draft vocabulary, of hidden [n, H]."""
        with torch.no_grad():
            return torch.softmax(final_logits(F.linear(self.normed(hidden), self._rows), self._config), dim=-1)


def check_target(network: Network, model: str) -> None:
    """Raise ModelError where no head can be trained for `model`. `network` may be without weights."""
    text, decoder = network.config.get_text_config(), network.get_decoder()
    target = f"EAGLE-3 target {model!r} of type {network.config.model_type!r}"
    if getattr(decoder, "norm", None) is None:
        raise ModelError(f"{target}: its decoder has no 'norm' behind the last layer")
    if network.lm_head.bias is not None:
        raise ModelError(f"{target}: its head has a bias, a draft head has none")
    if getattr(text, "intermediate_size", None) is None:
        raise ModelError(f"{target}: its config has no 'intermediate_size'")
    Eagle3Config(text, 0, text.hidden_size).layers_of(text.num_hidden_layers)


def blank_head(network: Network, target_ids: Tensor) -> Eagle3Head:
    """A head as wide as the target, with the target's embedding and rows of its head; all else is yet to be set.

    It has a key head for every query head: the next token reaches the layer through its values alone, and grouped ones
    would be too narrow to carry it.
    """
    text = network.config.get_text_config()
    shape: dict[str, Any] = {
        name: getattr(text, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps",
                     "max_position_embeddings", "vocab_size")
        if getattr(text, name, None) is not None
    }  # fmt: skip
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta", 10_000.0)  # Gemma 3 has one a kind of layer
    layer = LlamaConfig(
        num_hidden_layers=1,
        num_key_value_heads=text.num_attention_heads,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        **shape,
    )
    config = Eagle3Config(layer, draft_vocab_size=len(target_ids), target_hidden_size=text.hidden_size)
    embedding = network.get_input_embeddings().weight.detach().float()
    rows = network.lm_head.weight.detach().float()[target_ids]
    return Eagle3Head(config, embedding=embedding, lm_head=rows, target_ids=target_ids)


def feature_scale(data: FeatureSet, *, dialogues: int = 100) -> Tensor:
    """f32[F]: the size (root mean square) of each feature.

    A layer's features differ a thousandfold in size, and one learning rate fits them only when they are divided by it.
    """
    total, count = torch.zeros(()), 0
    for index in range(min(len(data), dialogues)):
        features = data[index].features[_FIRST:]
        total = total + features.square().sum(dim=0)
        count += len(features)
    return (total / max(1, count)).sqrt().clamp_min(1e-6)


def start(head: Eagle3Head, target: TargetHead, data: FeatureSet, *, on_share: Callable[[float], None]) -> None:
    """Set the matrices and the last norm of a blank `head`. `on_share` hears how much of what it fits on was read."""
    fit = _fit(head, target, data, on_share)
    size, width, config = head.config.hidden_size, head.fc.in_features, head.config
    layer, attention = head.midlayer, head.midlayer.self_attn
    with torch.no_grad():
        for weight in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
            weight.normal_(std=1 / math.sqrt(weight.shape[-1]))
        layer.mlp.down_proj.weight.mul_(_QUIET)
        head.fc.weight.copy_(fit.weights[:width].T)
        # The token's part as a product of two matrices of the attention's width.
        left, singular, right = torch.linalg.svd(fit.weights[width:].T)
        rank = min(size, attention.v_proj.out_features)
        root = singular[:rank].sqrt()
        attention.o_proj.weight.mul_(_QUIET)
        attention.o_proj.weight[:, :rank] = left[:, :rank] * root
        attention.v_proj.weight.mul_(_QUIET)
        attention.v_proj.weight[:rank, :size] = root[:, None] * right[:rank]
        # Equal queries and keys of the token make a position find itself, and what was said before the same token.
        attention.q_proj.weight[:, :size] *= math.sqrt(2 * _SELF_SCORE / math.sqrt(config.head_dim))
        attention.q_proj.weight[:, size:] *= _QUIET
        attention.k_proj.weight[:, :size] = attention.q_proj.weight[:, :size]
        attention.k_proj.weight[:, size:] *= _QUIET
        head.norm.weight.copy_(fit.norm)


@dataclass(frozen=True)
class _Fit:
    """`weights` [F + H, H] from features and normed embedding to the head's output, `norm` [H] behind it."""

    weights: Tensor
    norm: Tensor


def _fit(head: Eagle3Head, target: TargetHead, data: FeatureSet, on_share: Callable[[float], None]) -> _Fit:
    size = head.config.hidden_size
    width = head.fc.in_features + size
    wanted = _FIT_PER_INPUT * width
    kept_back = min(_LOUDNESS_TEXTS, len(data) // 8)
    squares = torch.zeros(width, width, dtype=torch.float64)
    products = torch.zeros(width, size, dtype=torch.float64)
    sizes, count = torch.zeros(size, dtype=torch.float64), 0
    for index in range(len(data) - kept_back):
        read, hidden = _pairs(head, data, index)
        said = target.normed(hidden)
        squares += read.T @ read
        products += read.T @ said
        sizes += said.square().sum(dim=0)
        count += len(read)
        on_share(min(1.0, count / wanted))
        if count >= wanted:
            break
    norm = (sizes / max(1, count)).sqrt().clamp_min(1e-6)
    # By size, so that the ridge is the same share of every input.
    scale = squares.diagonal().sqrt().clamp_min(1e-12)
    squares.div_(scale).div_(scale[:, None]).diagonal().add_(_RIDGE)
    weights = torch.cholesky_solve(products / scale[:, None], torch.linalg.cholesky(squares)) / scale[:, None] / norm
    fit = _Fit(weights.float(), norm.float())
    texts = [_pairs(head, data, len(data) - 1 - index) for index in range(max(1, kept_back))]
    return _Fit(fit.weights, fit.norm * _best_loudness(head, target, fit, texts))


def _pairs(head: Eagle3Head, data: FeatureSet, index: int) -> tuple[Tensor, Tensor]:
    """What the head reads at each position of a text, [n, F + H], and the target's last output one position on."""
    example = data[index]
    with torch.no_grad():
        token = head.midlayer.input_layernorm(F.embedding(example.ids[1:-1], head.embedding))
    return torch.cat([example.features[:-1], token], dim=-1)[_FIRST:], example.hidden[1:][_FIRST:]


def _best_loudness(head: Eagle3Head, target: TargetHead, fit: _Fit, texts: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The factor of logits at which their cross-entropy to the target's distribution is least, on `texts`."""
    losses = torch.zeros(len(_LOUDNESS))
    with torch.no_grad():
        head.norm.weight.copy_(fit.norm)
        for read, hidden in texts:
            probs, logits = target.probs(hidden), head.logits(read @ fit.weights)
            losses += torch.stack([-(probs * F.log_softmax(logits * f, dim=-1)).sum() for f in _LOUDNESS])
    return _LOUDNESS[int(losses.argmin())] if losses.any() else 1.0  # a text may be too short to say
