"""What the jobs that train drafters share: text in the target's own words, measurement by the engine, progress."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from serving.build import Built, build
from serving.config import Eagle3Drafter, EngineConfig, ModelConfig, ModelDrafter, Profile
from serving.decode.offline import complete
from serving.errors import ConfigError
from serving.models.embedded import EMBEDDED_MODEL
from serving.models.source import resolve_model
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest, Limits
from tuning.selfgen import Dialogue, SelfGeneration, generate, read_dialogues


def add_training_options(p: argparse.ArgumentParser, *, vocab_size: int, epochs: int, learning_rate: float) -> None:
    """The flags that these jobs have in common."""
    p.add_argument("--target", default=EMBEDDED_MODEL, help="embedded name, Hub id or folder (default: %(default)s)")
    p.add_argument("--out", type=Path, required=True, help="folder to write the drafter to")
    p.add_argument("--work", type=Path, help="data, labels and checkpoints, for resuming (default: in the cache)")
    p.add_argument("--tokens", type=int, default=500_000, help="answer tokens to self-generate (default: %(default)s)")
    p.add_argument("--data", type=Path, nargs="*", default=[], help="Parquet files of prompt_ids and output_ids to add")
    p.add_argument("--limit", type=int, help="train on so many dialogues at most")
    p.add_argument("--vocab-size", type=int, default=vocab_size, help="size of the reduced vocabulary")
    p.add_argument("--epochs", type=int, default=epochs)
    p.add_argument("--learning-rate", type=float, default=learning_rate)
    p.add_argument("--held-out", type=int, default=64, help="dialogues kept back to measure on (default: %(default)s)")
    p.add_argument("--threads", type=int, help="CPU threads (default: all)")
    p.add_argument("--seed", type=int, default=0)


def dialogues_of(args: argparse.Namespace, folder: Path) -> tuple[list[Dialogue], list[Dialogue]]:
    """Held-out and training dialogues, as `dialogues_for` has them."""
    shuffled = dialogues_for(args, folder)
    if len(shuffled) <= args.held_out:
        raise ConfigError(
            f"--held-out: {args.held_out} leaves nothing to train on; there are {len(shuffled)} dialogues"
        )
    return shuffled[: args.held_out], shuffled[args.held_out :][: args.limit]


def dialogues_for(args: argparse.Namespace, folder: Path) -> list[Dialogue]:
    """What --tokens has the target write (kept in `folder`) and --data holds, in an order drawn by --seed."""
    paths: list[Path] = []
    if args.tokens:
        built = _generator(args.target)
        with progress_bar(args.tokens, "self-generation", "tok") as bar:
            plan = SelfGeneration(args.tokens, resolve_model(args.target).key, seed=args.seed)
            paths = list(generate(built, folder, plan, on_tokens=bar.update))
    dialogues = read_dialogues([*paths, *args.data])
    order = np.random.default_rng(args.seed).permutation(len(dialogues))
    return [dialogues[i] for i in order]


def measure(target: str, drafter: ModelDrafter | Eagle3Drafter, held_out: list[Dialogue]) -> dict[str, Any]:
    """Accepted length of the drafter on prompts it was not trained on, greedy and strict, by the engine itself."""
    profile = Profile(
        name="measure",
        target=ModelConfig(model=target),
        drafter=drafter,
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
        "max_draft": drafter.max_draft,
        "accepted_length": round(stats.accepted / blocks, 3),
        "accepted_at": [round(count / blocks, 3) for count in stats.accepted_at],
    }


def _generator(target: str) -> Built:
    return build(
        Profile(
            name="selfgen",
            target=ModelConfig(model=target),
            engine=EngineConfig(max_sessions=32, max_length=1024),
        )
    )


def vocab_size_of(target: str) -> int:
    """Tokens of the target's tokenizer."""
    return ChatTokenizer.load(target).vocab_size


def progress_bar(total: int, label_text: str, unit: str, *, initial: int = 0) -> "tqdm[Callable[[], None]]":
    """On stderr."""
    return tqdm(total=total, desc=label_text, unit=unit, initial=initial, file=sys.stderr, dynamic_ncols=True)
