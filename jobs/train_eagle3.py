"""Train an EAGLE-3 head for any target, on text that the target writes itself and its features of it."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from serving.config import Eagle3Drafter
from serving.errors import ConfigError, ModelError
from serving.models.digest import model_digest
from serving.models.eagle3 import Eagle3Config, Eagle3Head
from serving.models.eagle3_checkpoint import CARD, load_eagle3
from serving.models.loading import LoadOptions, load_network, load_packed_lm, read_config, skeleton_of
from serving.models.source import resolve_model
from tuning.selfgen import Dialogue, text_key
from tuning.train_drafter import draft_vocabulary
from tuning.train_eagle3 import Eagle3Progress, Eagle3Recipe, export, train
from tuning.train_features import FeatureFolder, FeatureSet
from tuning.train_loop import Checkpoint
from tuning.train_start import TargetHead, blank_head, check_target, start

SUMMARY = "train an EAGLE-3 head for any target, on text it writes itself"


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    default = Eagle3Recipe()
    p = argparse.ArgumentParser(prog="python -m jobs train-eagle3", description=__doc__)
    add_training_options(p, vocab_size=None, epochs=default.epochs, learning_rate=default.learning_rate)
    p.add_argument(
        "--steps-ahead", type=int, default=default.steps_ahead, metavar="N",
        help="steps of training-time test, the first one included (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--shards", type=int, default=default.shards, metavar="N",
        help="threads that share a batch, for machines that are used by others too (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=default.dtype,
        help="of products; bfloat16 pays where the processor multiplies it (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--from", dest="start", metavar="HEAD",
        help="name or folder of a head that this job made for the target, to train on from (default: a linear fit)",
    )  # fmt: skip
    return p


def main(argv: list[str]) -> int:
    """Generate, read features, start, train, export, measure. Every stage resumes where a killed run stopped."""
    args = parser().parse_args(argv)
    check_training_options(args, steps_ahead=1, shards=1)
    check_target(skeleton_of(read_config(args.target)), args.target)
    earlier = _earlier_head(args)
    if args.vocab_size is None:
        args.vocab_size = Eagle3Recipe.vocab_size if earlier is None else len(earlier.target_ids)
    recipe = Eagle3Recipe(
        vocab_size=args.vocab_size, epochs=args.epochs, learning_rate=args.learning_rate,
        steps_ahead=args.steps_ahead, shards=args.shards, dtype=args.dtype, seed=args.seed,
    )  # fmt: skip
    work = work_folder(args, "train-eagle3")
    checkpoint = checkpoint_in(work, recipe, args.target, **{"from": model_digest(args.start) if args.start else ""})
    if args.threads:
        torch.set_num_threads(args.threads)
    check_held_out(args)
    target_key = resolve_model(args.target).key
    folder = FeatureFolder(work / "features", target_key, _trained_layers(args.target))
    texts = texts_of(args, work / "text", folder)
    held_out, training = held_out_of(args, texts)
    checkpoint = checkpoint.of_text(text_key(training, target_key))
    data = _features(args.target, texts, folder).of(training)
    started = time.monotonic()
    network = load_network(args.target, torch.float32).cpu()
    head = blank_head(network, _vocabulary(args, training)) if earlier is None else earlier
    target = TargetHead(network, head.target_ids)
    del network
    if earlier is None and not checkpoint.exists:
        _start(head, target, data, seed=recipe.seed)
    last = _train(head, target, recipe, data, checkpoint)
    card: dict[str, Any] = {
        "command": "python -m jobs train-eagle3 " + " ".join(argv),
        "training_tokens": int(sum(len(dialogue.output_ids) for dialogue in training)),
        "train_seconds": round(time.monotonic() - started),
        "final_loss": None if last is None else round(last.loss, 4),
    }
    export(head, args.out, base=args.target, recipe=recipe, card=card)
    card["held_out"] = measure(args.target, Eagle3Drafter(model=str(args.out)), held_out)
    export(head, args.out, base=args.target, recipe=recipe, card=card)
    print(json.dumps({"out": str(args.out), **card["held_out"]}))
    return 0


def _earlier_head(args: argparse.Namespace) -> Eagle3Head | None:
    """What --from names, to be trained. Raises ConfigError where it is no head of this job for this target."""
    if args.start is None:
        return None
    folder = Path(resolve_model(args.start).location)
    if folder.resolve() == args.out.resolve():
        raise ConfigError(f"--out: must not be the head of --from, {args.out}: a killed training could not be resumed")
    try:
        base = json.loads((folder / CARD).read_text(encoding="utf-8"))["base"]
        is_for_target = resolve_model(base).key == resolve_model(args.target).key
    except (OSError, ValueError, KeyError, TypeError, ModelError):
        raise ConfigError(f"--from: {args.start} must hold the {CARD} that train-eagle3 wrote") from None
    if not is_for_target:
        raise ConfigError(f"--from: {args.start} is a head for {base!r}, --target is {args.target!r}")
    head = load_eagle3(args.start, target=args.target, dtype=torch.float32)
    if args.vocab_size not in (None, len(head.target_ids)):
        raise ConfigError(f"--vocab-size: must be the {len(head.target_ids)} of --from, got {args.vocab_size}")
    return head.requires_grad_(True)


def _vocabulary(args: argparse.Namespace, training: list[Dialogue]) -> Tensor:
    return draft_vocabulary(training, size=args.vocab_size, target_size=vocab_size_of(args.target))


def _trained_layers(target: str) -> tuple[int, ...]:
    text = read_config(target).get_text_config()
    return (*Eagle3Config(text, 0, text.hidden_size).layers_of(text.num_hidden_layers), text.num_hidden_layers)


def _features(target: str, texts: list[list[Dialogue]], folder: FeatureFolder) -> FeatureSet:
    """The target's features of all texts; those that are not in `folder` are read."""
    lacking = [text for text in texts if folder.lacks(text)]
    if lacking:
        longest = max(len(dialogue.ids) for text in lacking for dialogue in text)
        options = LoadOptions(
            role="target", dtype="bfloat16", num_rows=1, max_length=longest, prefill_chunk=longest,
            vocab_size=vocab_size_of(target), feature_layers=folder.layers,
        )  # fmt: skip
        model = load_packed_lm(target, options)
        with progress_bar(sum(map(len, lacking)), "features", "dialogue") as bar:
            for text in lacking:
                folder.read(model, text)
                bar.update(len(text))
    return folder.all(texts)


def _start(head: Eagle3Head, target: TargetHead, data: FeatureSet, *, seed: int) -> None:
    torch.manual_seed(seed)
    with progress_bar(100, "first fit", "%") as bar:
        start(head, target, data, on_share=lambda share: bar.update(int(100 * share) - bar.n))


def _train(
    head: Eagle3Head, target: TargetHead, recipe: Eagle3Recipe, data: FeatureSet, checkpoint: Checkpoint
) -> Eagle3Progress | None:
    last: list[Eagle3Progress] = []
    with progress_bar(0, "training", "step") as bar:

        def on_step(progress: Eagle3Progress) -> None:
            bar.total = progress.num_steps
            agreement = "/".join(f"{share:.2f}" for share in progress.agreement)
            bar.set_postfix(loss=f"{progress.loss:.3f}", agreement=agreement, refresh=False)
            bar.update(progress.step - bar.n)
            last[:] = [progress]

        train(head, target, recipe, data, checkpoint=checkpoint, on_step=on_step)
    return last[0] if last else None
