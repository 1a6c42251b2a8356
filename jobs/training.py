"""What the jobs that train drafters share: text in the target's own words, measurement by the engine, progress."""

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from jobs.options import check_least
from jobs.reports import check_folder
from serving.build import Watch, build
from serving.compiling import cache_root
from serving.config import Eagle3Drafter, EngineConfig, ModelConfig, ModelDrafter, Profile
from serving.decode.offline import complete
from serving.errors import ConfigError
from serving.models.embedded import EMBEDDED_MODEL
from serving.models.loading import read_config
from serving.models.source import resolve_model
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest, Limits
from tuning.selfgen import Dialogue, SelfGeneration, generate, read_dialogues
from tuning.train_loop import Checkpoint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from tuning.train_features import FeatureFolder

_LONGEST = 1024
_PART = 64  # dialogues of --data that are read, kept and resumed together
_LEAST = {"tokens": 0, "limit": 1, "vocab_size": 1, "epochs": 1, "held_out": 0, "threads": 1, "seed": 0}


def add_training_options(
    p: argparse.ArgumentParser, *, vocab_size: int | None, epochs: int, learning_rate: float
) -> None:
    """The flags that these jobs have in common."""
    p.add_argument("--target", default=EMBEDDED_MODEL, help="embedded name, Hub id or folder (default: %(default)s)")
    p.add_argument("--out", type=Path, required=True, help="folder to write the drafter to")
    p.add_argument("--work", type=Path, help="text, labels, checkpoint, to resume with (default: in the cache)")
    p.add_argument("--tokens", type=int, default=500_000, help="answer tokens to self-generate (default: %(default)s)")
    p.add_argument("--data", type=Path, nargs="*", default=[], help="Parquet files of prompt_ids and output_ids to add")
    p.add_argument("--limit", type=int, help="train on so many dialogues at most")
    p.add_argument("--vocab-size", type=int, default=vocab_size, help="size of the reduced vocabulary")
    p.add_argument("--epochs", type=int, default=epochs)
    p.add_argument("--learning-rate", type=float, default=learning_rate)
    p.add_argument("--held-out", type=int, default=64, help="dialogues kept back to measure on (default: %(default)s)")
    p.add_argument("--threads", type=int, help="CPU threads (default: all)")
    p.add_argument("--seed", type=int, default=0)


def check_training_options(args: argparse.Namespace, **least: int) -> None:
    """Raise ConfigError, naming the flag, for values no training can have. `least` bounds a job's own flags below."""
    check_least(args, _LEAST | least)
    if not 0 < args.learning_rate < math.inf:
        raise ConfigError(f"--learning-rate: must be above 0 and finite, got {args.learning_rate}")
    check_folder("--out", args.out)
    if args.work:
        check_folder("--work", args.work)


def work_folder(args: argparse.Namespace, verb: str) -> Path:
    """--work, or a folder in the cache that no other target has."""
    name = f"{Path(args.target).name}-{resolve_model(args.target).key}"
    return args.work or cache_root() / verb / name


def checkpoint_in(work: Path, recipe: "DataclassInstance", target: str, **others: str) -> Checkpoint:
    """Of the training by `recipe` and `others`. Raises ConfigError where `work` has one that differs."""
    values = {name: str(value) for name, value in asdict(recipe).items()}
    checkpoint = Checkpoint(work / "checkpoint.pt", values | {"target": resolve_model(target).key} | others)
    checkpoint.check()
    return checkpoint


def held_out_of(args: argparse.Namespace, texts: Sequence[Sequence[Dialogue]]) -> tuple[list[Dialogue], list[Dialogue]]:
    """Held-out dialogues, and those to train on in an order drawn by --seed, of which none has a held-out prompt.

    Which are held out depends on the prompts alone: a head that is trained on from an earlier one, with more text or
    another seed, is not measured on what that has seen of the same text.
    """
    shuffled = in_order(args, texts)
    held_out = sorted(shuffled, key=_prompt_key)[: args.held_out]
    prompts = set(map(_prompt_key, held_out))
    return held_out, [dialogue for dialogue in shuffled if _prompt_key(dialogue) not in prompts][: args.limit]


def in_order(args: argparse.Namespace, texts: Sequence[Sequence[Dialogue]]) -> list[Dialogue]:
    """All dialogues of `texts`, in an order drawn by --seed."""
    dialogues = list(chain.from_iterable(texts))
    return [dialogues[i] for i in np.random.default_rng(args.seed).permutation(len(dialogues))]


def _prompt_key(dialogue: Dialogue) -> bytes:
    return hashlib.sha256(dialogue.prompt_ids.tobytes()).digest()


def check_held_out(args: argparse.Namespace) -> None:
    """Raise ConfigError, before a token is written, where none may be left to train on."""
    least = len(_added(args)) + _plan(args).least_dialogues
    if least <= args.held_out:
        raise ConfigError(
            f"--held-out: {args.held_out} may leave nothing to train on: --tokens {args.tokens} and --data may be no "
            f"more than {least} dialogues; keep back fewer, or ask for more tokens"
        )


def texts_of(args: argparse.Namespace, folder: Path, features: "FeatureFolder | None" = None) -> list[list[Dialogue]]:
    """What --tokens has the target write (kept in `folder`) and --data holds, in parts of a few dialogues.

    What is written leaves its features in `features`. Raises ConfigError before a token is written where one of --data
    is too long for the target.
    """
    added = _added(args)
    written = _self_generated(args, folder, features) if args.tokens else []
    return [*written, *(added[start : start + _PART] for start in range(0, len(added), _PART))]


def _added(args: argparse.Namespace) -> list[Dialogue]:
    """What --data holds. Raises ConfigError for a dialogue with more tokens than the target has positions."""
    added, positions = read_dialogues(args.data), _positions(args.target)
    longest = max((len(dialogue.ids) for dialogue in added), default=0)
    if longest > positions:
        raise ConfigError(
            f"--data: a dialogue of {longest} tokens exceeds the {positions} positions of {args.target!r}"
        )
    return added


def measure(target: str, drafter: ModelDrafter | Eagle3Drafter, held_out: list[Dialogue]) -> dict[str, Any]:
    """Accepted length of the drafter on prompts it was not trained on, greedy and strict, by the engine itself."""
    profile = Profile(
        name="measure",
        target=ModelConfig(model=target),
        drafter=drafter,
        engine=EngineConfig(max_sessions=8, max_length=max_length_of(target), guard=False),
    )
    built = build(profile)
    requests = [
        GenerationRequest(f"held-out-{i}", d.prompt_ids, Limits(min(200, room), built.tokenizer.stop_ids))
        for i, d in enumerate(held_out)
        if (room := built.limits.max_length - len(d.prompt_ids)) > 0
    ]
    list(complete(built.scheduler, requests))
    stats = built.scheduler.stats
    blocks = max(1, stats.emitted - stats.accepted - stats.drafts_empty)
    return {
        "prompts": len(requests),
        "max_draft": drafter.max_draft,
        "accepted_length": round(stats.accepted / blocks, 3),
        "accepted_at": [round(count / blocks, 3) for count in stats.accepted_at],
    }


def _plan(args: argparse.Namespace) -> SelfGeneration:
    return SelfGeneration(args.tokens, resolve_model(args.target).key, seed=args.seed)


def _self_generated(args: argparse.Namespace, folder: Path, features: "FeatureFolder | None") -> list[list[Dialogue]]:
    profile = Profile(
        name="selfgen",
        target=ModelConfig(model=args.target),
        engine=EngineConfig(max_sessions=32, max_length=max_length_of(args.target)),
    )
    watch = None if features is None else Watch(features.layers, features.take)
    built = build(profile, watch=watch)
    with progress_bar(args.tokens, "self-generation", "tok") as bar:
        parts = list(generate(built, folder, _plan(args), on_tokens=bar.update, keeper=features))
    return [read_dialogues([part]) for part in parts]


def max_length_of(target: str) -> int:
    """Tokens of the longest sequence that is written here: as many as the target has positions, within reason."""
    return min(_LONGEST, _positions(target))


def _positions(target: str) -> int:
    return int(getattr(read_config(target).get_text_config(), "max_position_embeddings", None) or sys.maxsize)


def vocab_size_of(target: str) -> int:
    """Tokens of the target's tokenizer."""
    return ChatTokenizer.load(target).vocab_size


def progress_bar(total: int, label_text: str, unit: str, *, initial: int = 0) -> "tqdm[Callable[[], None]]":
    """On stderr."""
    return tqdm(total=total, desc=label_text, unit=unit, initial=initial, file=sys.stderr, dynamic_ncols=True)
