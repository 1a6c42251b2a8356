"""Distil a small drafter for any target, from text that the target writes itself."""

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from jobs.training import (
    add_training_options,
    check_held_out,
    check_training_options,
    checkpoint_in,
    held_out_of,
    measure,
    progress_bar,
    texts_of,
    vocab_size_of,
    work_folder,
)
from serving.config import ModelDrafter
from serving.errors import ConfigError
from serving.models.loading import LoadOptions, load_packed_lm, read_config
from serving.models.packed import Network
from serving.models.source import resolve_model
from tuning.labels import SoftLabels, hard_labels, label
from tuning.selfgen import Dialogue, text_key
from tuning.train_drafter import (
    DrafterRecipe,
    PackedTeacher,
    Progress,
    draft_vocabulary,
    export,
    new_student,
    train,
)
from tuning.train_loop import Checkpoint

SUMMARY = "distil a small drafter for any target, from text it writes itself"
log = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs train-drafter", description=__doc__)
    add_training_options(p, vocab_size=12_288, epochs=4, learning_rate=1e-3)
    p.add_argument(
        "--labels", choices=("soft", "hard"), default="soft",
        help="the target's distribution (one more pass over the text) or the next token alone (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--layers", default="0,-1", help="target layers to start from (default: first and last)")
    return p


def main(argv: list[str]) -> int:
    """Generate, label, train, export, measure. Every stage resumes where a killed run stopped."""
    args = parser().parse_args(argv)
    check_training_options(args)
    recipe = DrafterRecipe(
        base=args.target,
        layers=_layers(args.layers, args.target),
        vocab_size=args.vocab_size,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    work, target_key = work_folder(args, "train-drafter"), resolve_model(args.target).key
    checkpoint = checkpoint_in(work, recipe, args.target, labels=args.labels)
    if args.threads:
        torch.set_num_threads(args.threads)
    check_held_out(args)
    held_out, training = held_out_of(args, texts_of(args, work / "text"))
    checkpoint = checkpoint.of_text(text_key(training, target_key))
    if args.labels == "soft":
        labels = _soft_labels(args, training, work / "labels")
    else:
        labels = [hard_labels(dialogue) for dialogue in training]
    started = time.monotonic()
    target_ids = draft_vocabulary(training, size=recipe.vocab_size, target_size=vocab_size_of(args.target))
    student = new_student(recipe, target_ids)
    last = _train(student, recipe, target_ids, list(zip(training, labels, strict=True)), checkpoint)
    card: dict[str, Any] = {
        "command": "python -m jobs train-drafter " + " ".join(argv),
        "training_tokens": int(sum(len(d.output_ids) for d in training)),
        "train_seconds": round(time.monotonic() - started),
        "final_loss": None if last is None else round(last.loss, 4),
    }
    export(student, recipe, target_ids, args.out, card=card)
    card["held_out"] = measure(args.target, ModelDrafter(model=str(args.out)), held_out)
    export(student, recipe, target_ids, args.out, card=card)
    print(json.dumps({"out": str(args.out), **card["held_out"]}))
    return 0


def _soft_labels(args: argparse.Namespace, dialogues: list[Dialogue], folder: Path) -> list[SoftLabels]:
    longest = max(len(d.ids) for d in dialogues)
    options = LoadOptions(
        role="teacher", dtype="bfloat16", num_rows=1, max_length=longest, prefill_chunk=longest,
        vocab_size=vocab_size_of(args.target),
    )  # fmt: skip
    teacher = PackedTeacher(load_packed_lm(args.target, options))
    with progress_bar(len(dialogues), "soft labels", "dialogue") as bar:
        return label(teacher, dialogues, folder, teacher_key=resolve_model(args.target).key, on_dialogues=bar.update)


def _train(
    student: Network,
    recipe: DrafterRecipe,
    target_ids: torch.Tensor,
    data: list[tuple[Dialogue, SoftLabels]],
    checkpoint: Checkpoint,
) -> Progress | None:
    last: list[Progress] = []
    bar: list[Any] = []

    def on_step(progress: Progress) -> None:
        if not bar:
            bar.append(progress_bar(progress.num_steps, "training", "step", initial=progress.step - 1))
        bar[0].set_postfix(loss=f"{progress.loss:.3f}", agreement=f"{progress.agreement:.3f}", refresh=False)
        bar[0].update(1)
        last[:] = [progress]

    train(student, recipe, target_ids, data, checkpoint=checkpoint, on_step=on_step)
    for opened in bar:
        opened.close()
    return last[0] if last else None


def _layers(text: str, target: str) -> tuple[int, ...]:
    count = read_config(target).get_text_config().num_hidden_layers
    try:
        layers = tuple(int(part) % count if -count <= int(part) < count else count for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers: must be integers separated by commas, got {text!r}") from None
    if count in layers:
        raise ConfigError(f"--layers: {text!r} names a layer outside 0..{count - 1}")
    return layers
