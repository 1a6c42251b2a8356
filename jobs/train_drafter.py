"""Distil a small drafter for any target, from text that the target writes itself."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from serving.build import Built, build
from serving.compiling import cache_root
from serving.config import EngineConfig, ModelConfig, ModelDrafter, Profile
from serving.decode.offline import complete
from serving.errors import ConfigError
from serving.models.embedded import EMBEDDED_MODEL
from serving.models.loading import LoadOptions, load_packed_lm
from serving.models.packed import Network
from serving.types import GenerationRequest, Limits
from tuning.labels import SoftLabels, hard_labels, label
from tuning.selfgen import Dialogue, SelfGeneration, generate, read_dialogues
from tuning.train_drafter import (
    DrafterRecipe,
    PackedTeacher,
    Progress,
    draft_vocabulary,
    export,
    new_student,
    train,
)

SUMMARY = "distil a small drafter for any target, from text it writes itself"
log = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs train-drafter", description=__doc__)
    p.add_argument("--target", default=EMBEDDED_MODEL, help="embedded name, Hub id or folder (default: %(default)s)")
    p.add_argument("--out", type=Path, required=True, help="folder to write the drafter to")
    p.add_argument("--work", type=Path, help="data, labels and checkpoints, for resuming (default: in the cache)")
    p.add_argument("--tokens", type=int, default=500_000, help="answer tokens to self-generate (default: %(default)s)")
    p.add_argument("--data", type=Path, nargs="*", default=[], help="Parquet files of prompt_ids and output_ids to add")
    p.add_argument(
        "--labels", choices=("soft", "hard"), default="soft",
        help="the target's distribution (one more pass over the text) or the next token alone (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--layers", default="0,-1", help="target layers to start from (default: first and last)")
    p.add_argument("--vocab-size", type=int, default=12_288, help="size of the reduced vocabulary")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--learning-rate", type=float, default=1e-3)
    p.add_argument("--held-out", type=int, default=64, help="dialogues kept back to measure on (default: %(default)s)")
    p.add_argument("--threads", type=int, help="CPU threads (default: all)")
    p.add_argument("--seed", type=int, default=0)
    return p


def main(argv: list[str]) -> int:
    """Generate, label, train, export, measure. Every stage resumes where a killed run stopped."""
    args = parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    work = args.work or cache_root() / "train-drafter" / Path(args.target).name
    dialogues = _dialogues(args, work / "text")
    if len(dialogues) <= args.held_out:
        raise ConfigError(
            f"--held-out: {args.held_out} leaves nothing to train on; there are {len(dialogues)} dialogues"
        )
    held_out, training = dialogues[: args.held_out], dialogues[args.held_out :]
    if args.labels == "soft":
        labels = _soft_labels(args, training, work / "labels")
    else:
        labels = [hard_labels(dialogue) for dialogue in training]
    recipe = DrafterRecipe(
        base=args.target,
        layers=_layers(args.layers, args.target),
        vocab_size=args.vocab_size,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    started = time.monotonic()
    target_ids = draft_vocabulary(training, size=recipe.vocab_size, target_size=_vocab_size(args.target))
    student = new_student(recipe, target_ids)
    last = _train(student, recipe, target_ids, list(zip(training, labels, strict=True)), work)
    card: dict[str, Any] = {
        "command": "python -m jobs train-drafter " + " ".join(argv),
        "training_tokens": int(sum(len(d.output_ids) for d in training)),
        "train_seconds": round(time.monotonic() - started),
        "final_loss": None if last is None else round(last.loss, 4),
    }
    export(student, recipe, target_ids, args.out, card=card)
    card["held_out"] = measure(args.target, args.out, held_out)
    export(student, recipe, target_ids, args.out, card=card)
    print(json.dumps({"out": str(args.out), **card["held_out"]}))
    return 0


def measure(target: str, drafter: Path, held_out: list[Dialogue], *, max_draft: int = 4) -> dict[str, Any]:
    """Accepted length of the drafter on prompts it was not trained on, greedy and strict, by the engine itself."""
    profile = Profile(
        name="measure",
        target=ModelConfig(model=target),
        drafter=ModelDrafter(model=str(drafter), max_draft=max_draft),
        engine=EngineConfig(max_sessions=8, max_length=1024, guard=False),
    )
    built = build(profile)
    requests = [
        GenerationRequest(f"held-out-{i}", d.prompt_ids, Limits(200, built.tokenizer.stop_ids))
        for i, d in enumerate(held_out)
    ]
    list(complete(built.scheduler, requests))
    stats = built.scheduler.stats
    blocks = max(1, stats.emitted - stats.accepted - stats.drafts_empty)
    return {
        "prompts": len(held_out),
        "max_draft": max_draft,
        "accepted_length": round(stats.accepted / blocks, 3),
        "accepted_at": [round(count / blocks, 3) for count in stats.accepted_at],
    }


def _dialogues(args: argparse.Namespace, folder: Path) -> list[Dialogue]:
    paths = []
    if args.tokens:
        built = _generator(args.target)
        with _bar(args.tokens, "self-generation", "tok") as bar:
            plan = SelfGeneration(num_tokens=args.tokens, seed=args.seed)
            paths = list(generate(built, folder, plan, on_tokens=bar.update))
    dialogues = read_dialogues([*paths, *args.data])
    order = np.random.default_rng(args.seed).permutation(len(dialogues))
    return [dialogues[i] for i in order]


def _generator(target: str) -> Built:
    return build(
        Profile(
            name="selfgen",
            target=ModelConfig(model=target),
            engine=EngineConfig(max_sessions=32, max_length=1024),
        )
    )


def _soft_labels(args: argparse.Namespace, dialogues: list[Dialogue], folder: Path) -> list[SoftLabels]:
    longest = max(len(d.ids) for d in dialogues)
    options = LoadOptions(
        role="teacher", dtype="bfloat16", num_rows=1, max_length=longest, prefill_chunk=longest,
        vocab_size=_vocab_size(args.target),
    )  # fmt: skip
    teacher = PackedTeacher(load_packed_lm(args.target, options))
    with _bar(len(dialogues), "soft labels", "dialogue") as bar:
        return label(teacher, dialogues, folder, on_dialogues=bar.update)


def _train(
    student: Network,
    recipe: DrafterRecipe,
    target_ids: torch.Tensor,
    data: list[tuple[Dialogue, SoftLabels]],
    work: Path,
) -> Progress | None:
    last: list[Progress] = []
    bar: list[Any] = []

    def on_step(progress: Progress) -> None:
        if not bar:
            bar.append(_bar(progress.num_steps, "training", "step", initial=progress.step - 1))
        bar[0].set_postfix(loss=f"{progress.loss:.3f}", agreement=f"{progress.agreement:.3f}", refresh=False)
        bar[0].update(1)
        last[:] = [progress]

    train(student, recipe, target_ids, data, checkpoint=work / "checkpoint.pt", on_step=on_step)
    for opened in bar:
        opened.close()
    return last[0] if last else None


def _layers(text: str, target: str) -> tuple[int, ...]:
    from transformers import AutoConfig

    from serving.models.source import resolve_model

    count = AutoConfig.from_pretrained(resolve_model(target).location).get_text_config().num_hidden_layers
    try:
        layers = tuple(int(part) % count if -count <= int(part) < count else count for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers: must be integers separated by commas, got {text!r}") from None
    if count in layers:
        raise ConfigError(f"--layers: {text!r} names a layer outside 0..{count - 1}")
    return layers


def _vocab_size(target: str) -> int:
    from serving.models.tokenizer import ChatTokenizer

    return ChatTokenizer.load(target).vocab_size


def _bar(total: int, label_text: str, unit: str, *, initial: int = 0) -> "tqdm[Callable[[], None]]":
    return tqdm(total=total, desc=label_text, unit=unit, initial=initial, file=sys.stderr, dynamic_ncols=True)
