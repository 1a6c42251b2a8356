"""Distil a small draft LM from any target: a few of its layers, its embedding, a part of its head.

The student reads ids alone and learns the target's distribution (soft labels, cross-entropy over the reduced
vocabulary) on the target's own text. Embedding and head rows are the target's and stay frozen, so only the layers and
the final norm are trained and stored. V target vocabulary, Vd reduced vocabulary, H hidden size.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from serving.models.draft_lm import base_matrices
from serving.models.loading import load_network
from serving.models.packed import Network
from serving.models.packed_lm import PackedLM
from serving.types import Ids
from tuning.labels import SoftLabels
from tuning.selfgen import Dialogue
from tuning.train_loop import Checkpoint, learning_rate_share, length_batches


@dataclass(frozen=True)
class DrafterRecipe:
    """Shape and training of one drafter. `tokens_per_batch` counts packed positions, padding included."""

    base: str
    layers: tuple[int, ...]
    vocab_size: int = 12_288
    epochs: int = 4
    learning_rate: float = 1e-3
    warm_up: float = 0.04
    weight_decay: float = 0.01
    tokens_per_batch: int = 4096
    max_length: int = 512
    prompt_weight: float = 0.2
    steps_per_checkpoint: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """One optimiser step: loss in nats a position, top-1 agreement with the target on the answers."""

    step: int
    num_steps: int
    loss: float
    agreement: float


class PackedTeacher:
    """The target as a PackedLM."""

    def __init__(self, model: PackedLM) -> None:
        self._model = model

    def top_logprobs(self, ids: Ids, top: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """The `top` likeliest next tokens after each position of `ids`."""
        logits = self._model.all_logits(ids)
        best = logits.topk(top, dim=-1)
        logprobs = best.values - logits.logsumexp(dim=-1, keepdim=True)
        return best.indices.int().cpu().numpy(), logprobs.half().cpu().numpy()


def draft_vocabulary(dialogues: list[Dialogue], *, size: int, target_size: int) -> Tensor:
    """i64[Vd], ascending: the ids that answers use most, then the lowest ids (which BPE learnt first)."""
    counts = np.bincount(np.concatenate([d.output_ids for d in dialogues]), minlength=target_size)
    order = np.argsort(-counts, kind="stable")[: min(size, target_size)]
    return torch.from_numpy(np.sort(order))


def new_student(recipe: DrafterRecipe, target_ids: Tensor) -> Network:
    """The student before training: chosen target layers, frozen embedding, a frozen head of Vd rows."""
    network = load_network(recipe.base, torch.float32).cpu()
    chosen = [network.model.layers[index] for index in recipe.layers]
    for index, layer in enumerate(chosen):
        layer.self_attn.layer_idx = index
    network.model.layers = torch.nn.ModuleList(chosen)
    network.config.num_hidden_layers = len(chosen)
    if getattr(network.config, "layer_types", None):
        network.config.layer_types = [network.config.layer_types[index] for index in recipe.layers]
    _, head = base_matrices(recipe.base)
    network.lm_head = torch.nn.Linear(head.shape[1], len(target_ids), bias=False)
    network.lm_head.weight.data.copy_(head[target_ids])
    network.requires_grad_(False)
    network.model.layers.requires_grad_(True)
    network.model.norm.requires_grad_(True)
    return network


def train(
    student: Network,
    recipe: DrafterRecipe,
    target_ids: Tensor,
    data: list[tuple[Dialogue, SoftLabels]],
    *,
    checkpoint: Checkpoint,
    on_step: Callable[[Progress], None],
) -> None:
    """Train in place; saves to `checkpoint` now and then and goes on from there if it is there."""
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    inverse = torch.full((student.config.vocab_size,), -1, dtype=torch.int64)
    inverse[target_ids] = torch.arange(len(target_ids))
    lengths = [min(len(dialogue.ids), recipe.max_length) for dialogue, _ in data]
    batches = list(length_batches(
        lengths, tokens_per_batch=recipe.tokens_per_batch, epochs=recipe.epochs, seed=recipe.seed
    ))  # fmt: skip
    done = checkpoint.restore(student, optimiser)
    student.train()
    for step, batch in enumerate(batches):
        if step < done:
            continue
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * learning_rate_share(step, len(batches), recipe.warm_up)
        loss, agreement = _loss(student, [data[i] for i in batch], inverse, recipe)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if (step + 1) % recipe.steps_per_checkpoint == 0 or step == len(batches) - 1:
            checkpoint.save(student, optimiser, step + 1)
        on_step(Progress(step + 1, len(batches), float(loss.detach()), agreement))
    student.eval()


def export(student: Network, recipe: DrafterRecipe, target_ids: Tensor, folder: Path, *, card: dict[str, Any]) -> None:
    """Write the drafter as `serving.models.draft_lm` reads it, layers in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in student.named_parameters()
        if name.startswith(("model.layers.", "model.norm."))
    }
    tensors["target_ids"] = target_ids.int()
    save_file(tensors, folder / "model.safetensors")
    student.config.tie_word_embeddings = False
    student.config.save_pretrained(folder)
    described = {"base": recipe.base, "recipe": asdict(recipe), **card}
    (folder / "draft.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _loss(
    student: Network, batch: list[tuple[Dialogue, SoftLabels]], inverse: Tensor, recipe: DrafterRecipe
) -> tuple[Tensor, float]:
    """Weighted soft cross-entropy of one padded batch, and top-1 agreement on the answers."""
    longest = max(min(len(d.ids), recipe.max_length) for d, _ in batch)
    top = batch[0][1].ids.shape[1]
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.zeros(len(batch), longest, top, dtype=torch.int64)
    weights = torch.zeros(len(batch), longest, top)
    position = torch.zeros(len(batch), longest)
    for row, (dialogue, soft) in enumerate(batch):
        n = min(len(dialogue.ids), recipe.max_length)
        ids[row, :n] = torch.from_numpy(dialogue.ids[:n].astype(np.int64))
        labels[row, :n] = inverse[torch.from_numpy(soft.ids[:n].astype(np.int64))]
        weights[row, :n] = torch.from_numpy(soft.logprobs[:n].astype(np.float32)).exp()
        first = len(dialogue.prompt_ids) - 1  # the position that predicts the answer's first token
        position[row, :first] = recipe.prompt_weight
        position[row, first:n] = 1.0
    known = labels >= 0
    # Padding stands behind the text, so causal attention never sees it: no mask is needed.
    hidden = student.model(input_ids=ids, use_cache=False).last_hidden_state
    used = position > 0
    logits = student.lm_head(hidden[used])
    logprobs = F.log_softmax(logits, dim=-1)
    picked = logprobs.gather(1, labels[used].clamp(min=0))
    targets = weights[used] * known[used]
    loss = -(targets * picked).sum(dim=-1) * position[used]
    answers = position[used] == 1.0
    agreement = (logits[answers].argmax(dim=-1) == labels[used][answers, 0]).float().mean()
    return loss.sum() / position.sum(), float(agreement)
