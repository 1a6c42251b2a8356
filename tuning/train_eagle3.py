"""Train an EAGLE-3 head by training-time test (Li et al., arXiv 2503.01840, section 3) on the target's own text.

The head is unrolled: in the first step it reads the target's features, in each later one its own output of the step
before, one position earlier, so that it learns to go on from its own guesses as it must when it drafts. Embedding and
head rows are the target's and stay frozen. B dialogues of N positions, H hidden size, Vd draft vocabulary.
"""

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from serving.errors import ModelError
from serving.models.eagle3 import Eagle3Config, Eagle3Head
from serving.models.eagle3_checkpoint import CARD
from serving.models.hf_decoder import final_logits
from serving.models.packed import Network
from tuning.train_features import Example, FeatureSet
from tuning.train_loop import Checkpoint, learning_rate_share, length_batches
from tuning.train_unroll import Unroll

# Spread of new weights, in shares of 1 / sqrt(inputs): features of the lower layers, and the next token's embedding.
_FEATURE_STD = 0.1
_EMBEDDING_STD = 1.0
# What a head takes over from a layer of its target.
_LAYER_PARTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@dataclass(frozen=True)
class Eagle3Recipe:
    """Training of one head. `steps_ahead` is how far it is unrolled, each step weighing `step_decay` of the last.

    `shards` threads share a batch: on a CPU others use too, a late thread then delays a batch once, not every product.
    """

    vocab_size: int = 8192
    epochs: int = 3
    learning_rate: float = 2e-3
    warm_up: float = 0.03
    steps_ahead: int = 3
    step_decay: float = 0.8
    tokens_per_batch: int = 1024
    max_length: int = 512
    prompt_weight: float = 0.1
    steps_per_checkpoint: int = 25
    shards: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Eagle3Progress:
    """One optimiser step: loss in nats a position, and agreement with the target on answers, by step ahead."""

    step: int
    num_steps: int
    loss: float
    agreement: tuple[float, ...]


@dataclass(frozen=True)
class _Batch:
    """Padded examples; entry p pairs the feature of position p with the token at p + 1 and predicts the one behind."""

    features: Tensor
    next_ids: Tensor
    probs: Tensor
    weights: Tensor


class TargetHead:
    """The target's final norm and its head's rows of the draft vocabulary."""

    def __init__(self, network: Network, target_ids: Tensor) -> None:
        self._norm = network.get_decoder().norm.float()
        self._rows = network.lm_head.weight.detach().float()[target_ids]
        self._config = network.config.get_text_config()

    def probs(self, hidden: Tensor) -> Tensor:
        """[n, Vd]: the target's next-token distribution within the draft vocabulary, of hidden [n, Ht]."""
        with torch.no_grad():
            return torch.softmax(final_logits(F.linear(self._norm(hidden), self._rows), self._config), dim=-1)


def check_target(network: Network, model: str) -> None:
    """Raise ModelError where no head can start from the last layer of `model`. `network` may be without weights."""
    last, text = network.get_decoder().layers[-1], network.config.get_text_config()
    parts, target = dict(last.named_modules()), f"EAGLE-3 target {model!r} of type {network.config.model_type!r}"
    for name in _LAYER_PARTS:
        if name not in parts:
            raise ModelError(f"{target}: its layers have no {name!r}, which a head starts from")
    activation = getattr(text, "hidden_activation", None) or text.hidden_act
    if activation != "silu":
        raise ModelError(f"{target}: its MLP's activation must be 'silu', got {activation!r}")
    if any(name.endswith("bias") for name, _ in last.mlp.named_parameters()):
        raise ModelError(f"{target}: its MLP has biases, a head's has none")


def new_head(network: Network, target_ids: Tensor) -> Eagle3Head:
    """A head of the target's layer shape that starts from the target's last layer and its last feature.

    It has a key head for every query head: the next token reaches the layer through its values alone, and grouped ones
    would be too narrow to carry it.
    """
    text = network.config.get_text_config()
    shape = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps",
             "rope_parameters", "max_position_embeddings", "vocab_size")  # fmt: skip
    layer = LlamaConfig(
        num_hidden_layers=1,
        num_key_value_heads=text.num_attention_heads,
        **{name: getattr(text, name) for name in shape if hasattr(text, name)},
    )
    config = Eagle3Config(layer, draft_vocab_size=len(target_ids), target_hidden_size=text.hidden_size)
    embedding = network.get_input_embeddings().weight.detach().float()
    rows = network.lm_head.weight.detach().float()[target_ids]
    head = Eagle3Head(config, embedding=embedding, lm_head=rows, target_ids=target_ids)
    size, last = text.hidden_size, network.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.normal_(std=_FEATURE_STD / math.sqrt(size))
        head.fc.weight[:, -size:] += torch.eye(size)
        group = text.num_attention_heads // text.num_key_value_heads
        for name, repeats in (("q_proj", 1), ("k_proj", group), ("v_proj", group)):
            weight = getattr(head.midlayer.self_attn, name).weight
            heads = getattr(last.self_attn, name).weight.unflatten(0, (-1, config.head_dim))
            weight[:, :size].normal_(std=_EMBEDDING_STD / math.sqrt(size))
            weight[:, size:] = heads.repeat_interleave(repeats, 0).flatten(0, 1)
        head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(network.model.norm.weight)
    return head


def train(
    head: Eagle3Head,
    target: TargetHead,
    recipe: Eagle3Recipe,
    data: FeatureSet,
    *,
    checkpoint: Checkpoint,
    on_step: Callable[[Eagle3Progress], None],
) -> None:
    """Train in place; saves to `checkpoint` now and then and goes on from there if it is there."""
    parameters = list(head.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    lengths = [min(length, recipe.max_length) for length in data.lengths]
    batches = list(length_batches(
        lengths, tokens_per_batch=recipe.tokens_per_batch, epochs=recipe.epochs, seed=recipe.seed
    ))  # fmt: skip
    done = checkpoint.restore(head, optimiser)
    objective = _Objective(head, target, recipe)
    with ThreadPoolExecutor(recipe.shards, initializer=torch.set_num_threads, initargs=_threads(recipe)) as pool:
        for step in range(done, len(batches)):
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate * learning_rate_share(step, len(batches), recipe.warm_up)
            shards = [batches[step][i :: recipe.shards] for i in range(recipe.shards)]
            results = list(pool.map(objective.gradients, [[data[i] for i in shard] for shard in shards if shard]))
            for parameter, *gradients in zip(parameters, *(result.gradients for result in results), strict=True):
                parameter.grad = torch.stack(gradients).mean(dim=0)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if (step + 1) % recipe.steps_per_checkpoint == 0 or step == len(batches) - 1:
                checkpoint.save(head, optimiser, step + 1)
            agreement = np.mean([result.agreement for result in results], axis=0)
            loss = float(np.mean([result.loss for result in results]))
            on_step(Eagle3Progress(step + 1, len(batches), loss, tuple(agreement.tolist())))
    head.eval()


def export(head: Eagle3Head, folder: Path, *, base: str, recipe: Eagle3Recipe, card: dict[str, Any]) -> None:
    """Write the head in the authors' layout, bfloat16, without the matrices that are the target's (`CARD` says so)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in head.state_dict().items()}
    tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
    save_file(tensors, folder / "model.safetensors")
    config = head.config.layer.to_dict() | {
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": head.config.target_hidden_size,
        "architectures": ["LlamaForCausalLMEagle3"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    described = {"base": base, "recipe": asdict(recipe), **card}
    (folder / CARD).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Shard:
    gradients: tuple[Tensor, ...]
    loss: float
    agreement: list[float]


class _Objective:
    """The loss of a batch over `steps_ahead` steps, and its gradients."""

    def __init__(self, head: Eagle3Head, target: TargetHead, recipe: Eagle3Recipe) -> None:
        self._head = head
        self._recipe = recipe
        self._parameters = list(head.parameters())
        self._unroll = Unroll(head, steps=recipe.steps_ahead, max_length=recipe.max_length)
        self._target = target
        self._is_known = torch.zeros(head.embedding.shape[0], dtype=torch.bool)
        self._is_known[head.target_ids] = True

    def gradients(self, examples: Sequence[Example]) -> _Shard:
        batch = self._pad(examples)
        loss, agreement = self.loss(batch)
        gradients = torch.autograd.grad(loss, self._parameters)
        return _Shard(gradients, float(loss.detach()), agreement)

    def loss(self, batch: _Batch) -> tuple[Tensor, list[float]]:
        """Weighted cross-entropy to the target's distribution, summed over steps; and top-1 agreement by step."""
        total = torch.zeros(())
        agreement = []
        for step, out in enumerate(self._unroll.outputs(batch.features, batch.next_ids)):
            used = batch.weights > 0
            used[:, :step] = False  # nothing was drafted before them
            loss, agreed = self._step_loss(out[used], batch, used)
            total = total + self._recipe.step_decay**step * loss
            agreement.append(agreed)
        return total, agreement

    def _step_loss(self, out: Tensor, batch: _Batch, used: Tensor) -> tuple[Tensor, float]:
        probs, weights = batch.probs[used], batch.weights[used]
        logits = self._head.logits(out)
        loss = -(probs * F.log_softmax(logits, dim=-1)).sum(dim=-1) * weights
        answers = weights == 1.0
        agreed = (logits.detach()[answers].argmax(dim=-1) == probs[answers].argmax(dim=-1)).float().mean()
        return loss.sum() / weights.sum(), float(agreed)

    def _pad(self, examples: Sequence[Example]) -> _Batch:
        lengths = [min(len(example.ids), self._recipe.max_length) - 1 for example in examples]
        size = (len(examples), max(lengths))
        batch = _Batch(
            features=torch.zeros(*size, examples[0].features.shape[1]),
            next_ids=torch.zeros(*size, dtype=torch.int64),
            probs=torch.zeros(*size, len(self._head.target_ids)),
            weights=torch.zeros(*size),
        )
        for row, (example, n) in enumerate(zip(examples, lengths, strict=True)):
            batch.features[row, :n] = example.features[:n]
            batch.next_ids[row, :n] = example.ids[1 : n + 1]
            batch.probs[row, :n] = self._target.probs(example.hidden[1 : n + 1])
            # The entry that predicts the answer's first token; the first of all where there is no such entry.
            first = min(max(0, example.num_prompt - 2), n)
            batch.weights[row, :first] = self._recipe.prompt_weight
            # What the target says is a label; a token outside the draft vocabulary cannot be drafted anyway.
            batch.weights[row, first : n - 1] = self._is_known[example.ids[first + 2 : n + 1]].float()
        return batch


def _threads(recipe: Eagle3Recipe) -> tuple[int]:
    return (max(1, torch.get_num_threads() // recipe.shards),)
