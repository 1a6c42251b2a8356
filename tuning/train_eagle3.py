"""Train an EAGLE-3 head by training-time test (Li et al., arXiv 2503.01840, section 3) on the target's own text.

The head is unrolled: in the first step it reads the target's features, in each later one its own output of the step
before, one position earlier, so that it learns to go on from its own guesses as it must when it drafts. Where a guess
is wrong the paper goes on all the same; here a chain ends there, as a draft does: a step costs and weighs as often as
drafting gets to it. Embedding and head rows are the target's and stay frozen. B dialogues of N positions, M of them
reached by a step, H hidden size, Vd draft vocabulary.
"""

import json
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

from serving.models.eagle3 import Eagle3Head
from serving.models.eagle3_checkpoint import CARD
from tuning.train_features import Example, FeatureSet
from tuning.train_loop import Checkpoint, learning_rate_share, length_batches
from tuning.train_start import TargetHead, feature_scale
from tuning.train_unroll import Reached, Unroll


@dataclass(frozen=True)
class Eagle3Recipe:
    """Training of one head. `steps_ahead` is how far it is unrolled.

    `shards` threads share a batch: on a CPU others use too, a late thread then delays a batch once, not every product.
    `dtype` is that of products; weights, loss and the target's distribution are float32 in any case.
    """

    vocab_size: int = 8192
    epochs: int = 3
    learning_rate: float = 2.5e-4
    warm_up: float = 0.03
    steps_ahead: int = 4
    tokens_per_batch: int = 512
    max_length: int = 512
    prompt_weight: float = 0.1
    steps_per_checkpoint: int = 25
    shards: int = 1
    dtype: str = "float32"
    seed: int = 0


@dataclass(frozen=True)
class Eagle3Progress:
    """One optimiser step: loss in nats an entry that a step reached; agreement with the target on answers, by step."""

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
    scale = feature_scale(data)
    with torch.no_grad():
        head.fc.weight.mul_(scale)
    parameters = list(head.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    lengths = [min(length, recipe.max_length) for length in data.lengths]
    batches = list(length_batches(
        lengths, tokens_per_batch=recipe.tokens_per_batch, epochs=recipe.epochs, seed=recipe.seed
    ))  # fmt: skip
    done = checkpoint.restore(head, optimiser)
    objective = Objective(head, target, recipe, scale)
    with ThreadPoolExecutor(recipe.shards, initializer=torch.set_num_threads, initargs=_threads(recipe)) as pool:
        for step in range(done, len(batches)):
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate * learning_rate_share(step, len(batches), recipe.warm_up)
            shards = [batches[step][i :: recipe.shards] for i in range(recipe.shards)]
            examples = [[data[i] for i in shard] for shard in shards if shard]
            # One by itself has all threads to itself.
            results = list((pool.map if len(examples) > 1 else map)(objective.gradients, examples))
            num_entries = max(1, sum(result.num_entries for result in results))
            for parameter, *gradients in zip(parameters, *(result.gradients for result in results), strict=True):
                parameter.grad = torch.stack(gradients).sum(dim=0) / num_entries
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if (step + 1) % recipe.steps_per_checkpoint == 0 or step == len(batches) - 1:
                checkpoint.save(head, optimiser, step + 1)
            agreed, said = np.sum([result.agreed for result in results], axis=0).T
            loss = sum(result.loss for result in results) / max(1, sum(result.num_reached for result in results))
            on_step(Eagle3Progress(step + 1, len(batches), loss, tuple((agreed / np.maximum(said, 1)).tolist())))
    with torch.no_grad():
        head.fc.weight.div_(scale)
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
    """Sums over a shard's entries; `agreed` has a pair a step: answers' tokens agreed on, and how many there were.

    Its drafts start at `num_entries`, and their tokens are `num_reached` in all.
    """

    gradients: tuple[Tensor, ...]
    loss: float
    num_entries: int
    num_reached: int
    agreed: list[tuple[int, int]]


class Objective:
    """The loss of a batch over `steps_ahead` steps, and its gradients. The head's `fc` is for features over `scale`.

    A step reaches the entries behind those whose draft the text goes on with: the rest of a draft that has gone wrong
    is never looked at. Loss and gradients are sums over entries, to be divided by the number of those that the whole
    batch starts at: so a prompt's entries count for as little in a batch without answers.
    """

    def __init__(self, head: Eagle3Head, target: TargetHead, recipe: Eagle3Recipe, scale: Tensor) -> None:
        self._head = head
        self._scale = scale
        self._recipe = recipe
        self._parameters = list(head.parameters())
        self._unroll = Unroll(head, max_length=recipe.max_length)
        self._target = target
        self._is_known = torch.zeros(head.embedding.shape[0], dtype=torch.bool)
        self._is_known[head.target_ids] = True

    def gradients(self, examples: Sequence[Example]) -> _Shard:
        batch = self._pad(examples)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._recipe.dtype == "bfloat16"):
            loss, num_reached, agreed = self.loss(batch)
        gradients = torch.autograd.grad(loss, self._parameters)
        return _Shard(gradients, float(loss.detach()), int((batch.weights > 0).sum()), num_reached, agreed)

    def loss(self, batch: _Batch) -> tuple[Tensor, int, list[tuple[int, int]]]:
        """Weighted cross-entropy to the target's distribution, summed over entries and steps; `_Shard.num_reached` and
        `_Shard.agreed`.
        """
        total, agreed = torch.zeros(()), [(0, 0)] * self._recipe.steps_ahead
        num_reached = 0
        reached: Reached | None = self._unroll.first(batch.features, batch.next_ids)
        for step in range(self._recipe.steps_ahead):
            if reached is None:
                break
            nats, agreed[step], is_right = self._step_loss(batch, reached)
            total, num_reached = total + nats.sum(), num_reached + len(nats)
            if step + 1 < self._recipe.steps_ahead:
                reached = self._unroll.next(reached, is_right)
        return total, num_reached, agreed

    def _step_loss(self, batch: _Batch, reached: Reached) -> tuple[Tensor, tuple[int, int], Tensor]:
        """Each entry's loss in a step, `_Shard.agreed`, and where the text goes on with the draft, bool[B, M]."""
        weights = batch.weights.gather(1, reached.places) * reached.is_real
        used = weights > 0
        rows, columns = used.nonzero(as_tuple=True)
        places = reached.places[rows, columns]
        probs, weights = batch.probs[rows, places], weights[rows, columns]
        logits = self._head.logits(reached.out[rows, columns]).float()
        loss = -(probs * F.log_softmax(logits, dim=-1)).sum(dim=-1) * weights
        drafts = logits.detach().argmax(dim=-1)
        agrees, answers = drafts == probs.argmax(dim=-1), weights == 1.0
        is_right = torch.zeros_like(used)
        following = batch.next_ids[rows, (places + 1).clamp_max(batch.next_ids.shape[1] - 1)]
        is_right[rows, columns] = self._head.target_ids[drafts] == following
        return loss, (int(agrees[answers].sum()), int(answers.sum())), is_right

    def _pad(self, examples: Sequence[Example]) -> _Batch:
        lengths = [max(0, min(len(example.ids), self._recipe.max_length) - 2) for example in examples]
        size = (len(examples), max(1, *lengths))
        batch = _Batch(
            features=torch.zeros(*size, examples[0].features.shape[1]),
            next_ids=torch.zeros(*size, dtype=torch.int64),
            probs=torch.zeros(*size, len(self._head.target_ids)),
            weights=torch.zeros(*size),
        )
        for row, (example, n) in enumerate(zip(examples, lengths, strict=True)):
            batch.features[row, :n] = example.features[:n] / self._scale
            batch.next_ids[row, :n] = example.ids[1 : n + 1]
            batch.probs[row, :n] = self._target.probs(example.hidden[1 : n + 1])
            # The entry that predicts the answer's first token; the first of all where there is no such entry.
            first = min(max(0, example.num_prompt - 2), n)
            batch.weights[row, :first] = self._recipe.prompt_weight
            # What the target says is a label; a token outside the draft vocabulary cannot be drafted anyway.
            batch.weights[row, first:n] = self._is_known[example.ids[first + 2 : n + 2]].float()
        return batch


def _threads(recipe: Eagle3Recipe) -> tuple[int]:
    return (max(1, torch.get_num_threads() // recipe.shards),)
