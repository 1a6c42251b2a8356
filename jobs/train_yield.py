"""Train the yield predictor that chooses between the suffix cache and a model drafter (profile `hybrid`).

Every position of recorded greedy generations is replayed against a suffix cache that knows only what came before, so
no model runs. Requests, never positions, are held out. The report has precision and recall, a calibration plot, the
importance of the features, and what each way of choosing would need: rounds, and speed by a model of costs.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jobs.figures import table
from jobs.options import check_least
from jobs.plotting import line_with_diagonal
from jobs.provenance import Provenance
from serving.build_drafter import kinds_of, suffix_cache
from serving.config import SuffixDrafter, load_profile
from serving.drafters.yield_predictor import YieldPredictor
from serving.errors import ConfigError
from serving.models.tokenizer import ChatTokenizer
from serving.trace import Trace, read_traces
from serving.types import Floats, Ids, as_ids
from tuning.replay import Costs, Played, Replayed, Yields, draft_yields, replay
from tuning.selfgen import Dialogue, read_dialogues
from tuning.train_yield import YieldRecipe, train_yield
from tuning.yield_report import Accuracy, Arms, calibration, importance

_MODELS = {"model", "eagle3"}  # sources that are models

SUMMARY = "train the predictor that chooses between suffix cache and model drafter"


@dataclass(frozen=True)
class Recorded:
    """A generation, and the yield of a model's drafts at each position where that is known."""

    dialogue: Dialogue
    task: str
    model_yields: Yields | None = None

    @property
    def is_held_out(self) -> bool:
        """One in five, by the prompt."""
        return hashlib.sha256(self.dialogue.prompt_ids.tobytes()).digest()[0] % 5 == 0

    def yields(self, default: int) -> Yields:
        """i32[T]: of the model's drafts, `default` everywhere where nothing is known."""
        unknown = np.full(len(self.dialogue.output_ids), default, dtype=np.int32)
        return unknown if self.model_yields is None else self.model_yields


_LEAST = {
    "limit": 1, "requests_a_cache": 1, "epochs": 1, "seed": 0, "model_yield": 0, "row_cost": 0, "model_cost": 0,
    "model_draft": 1,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs train-yield", description=__doc__)
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="predictor.npz, its card and the plot")
    p.add_argument(
        "--traces", type=Path, nargs="*", default=[], metavar="F",
        help="of `capture`; those of --every-position with a model drafter also say what the model yields",
    )  # fmt: skip
    p.add_argument(
        "--data", type=Path, nargs="*", default=[], metavar="F",
        help="Parquet files of prompt_ids and output_ids, or JSON lines of `generate`",
    )  # fmt: skip
    p.add_argument("--limit", type=int, metavar="N", help="at most N generations of each file of --data")
    p.add_argument("--profile", default="suffix", help="whose target and suffix cache; default: %(default)s")
    p.add_argument("--requests-a-cache", type=int, default=48, help="a tenant's requests; default: %(default)s")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--model-yield", type=int, default=1, help="accepted tokens of a model's draft where unknown")
    p.add_argument("--row-cost", type=float, default=0.06, help="of a drafted token, in plain passes")
    p.add_argument("--model-cost", type=float, default=0.5, help="of a model's draft, in plain passes")
    p.add_argument("--model-draft", type=int, default=4, help="tokens of a model's draft; default: %(default)s")
    return p


def main(argv: Sequence[str]) -> int:
    """Print the table of arms on held-out requests."""
    args = parser().parse_args(argv)
    check_least(args, _LEAST)
    profile = load_profile(args.profile)
    cache = getattr(profile.drafter, "cache", profile.drafter)
    if not isinstance(cache, SuffixDrafter):
        raise ConfigError(f"--profile: {args.profile!r} has no suffix cache")
    recorded = _recorded(args)
    kinds = kinds_of(ChatTokenizer.load(profile.target.model))
    bar = tqdm(total=len(recorded), desc="replay", unit="request", file=sys.stderr)
    replayed = []
    for one in replay(
        [one.dialogue for one in recorded],
        [one.yields(args.model_yield) for one in recorded],
        lambda: suffix_cache(cache),
        kinds,
        requests_a_cache=args.requests_a_cache,
    ):
        replayed.append(one)
        bar.update(1)
    bar.close()
    held_out = [one.is_held_out for one in recorded]
    if all(held_out) or not any(held_out):
        raise ConfigError(f"--traces, --data: {len(recorded)} generations are too few to hold some out")
    rows, yields = _samples([one for one, out in zip(replayed, held_out, strict=True) if not out])
    with tqdm(total=args.epochs, desc="training", unit="epoch", file=sys.stderr) as epochs:
        predictor = train_yield(
            rows, yields, YieldRecipe(epochs=args.epochs, seed=args.seed), on_epoch=lambda _, __: epochs.update(1)
        )
    pairs = [(a, b) for a, b, out in zip(recorded, replayed, held_out, strict=True) if out]
    report = _report(args, predictor, pairs)
    card = {
        **asdict(Provenance.of("train-yield", argv)),
        "cache": cache.model_dump(),
        "training": {"requests": held_out.count(False), "drafts": len(rows)},
        **report,
    }
    predictor.save(args.out, card)
    print(table([{"arm": name, **row} for name, row in report["arms"].items()]))
    print(json.dumps({"out": str(args.out), "tau": report["tau"], **report["held_out"]}))
    return 0


def _report(
    args: argparse.Namespace, predictor: YieldPredictor, pairs: Sequence[tuple[Recorded, Replayed]]
) -> dict[str, Any]:
    costs = Costs(row=args.row_cost, model=args.model_cost, model_draft=args.model_draft)
    played = [_played(predictor, one, replayed, default=args.model_yield) for one, replayed in pairs]
    rows, yields = _samples([replayed for _, replayed in pairs])
    lengths = np.concatenate([replayed.lengths[replayed.lengths > 0] for _, replayed in pairs])
    predicted = np.clip(predictor.predict(rows), 0.0, lengths)
    points = calibration(predicted, yields)
    args.out.mkdir(parents=True, exist_ok=True)
    line_with_diagonal(points, args.out / "calibration.png", labels=("predicted yield", "accepted tokens"))
    arms = Arms.of(played, costs)
    by_task = {
        task: {name: outcome.row for name, outcome in Arms.of(chosen, costs).outcomes.items()}
        for task in sorted({one.task for one, _ in pairs})
        if (chosen := [p for p, (one, _) in zip(played, pairs, strict=True) if one.task == task])
    }
    return {
        "tau": arms.best_threshold,
        "costs": asdict(costs),
        "model_yields": "measured" if all(one.model_yields is not None for one, _ in pairs) else "partly assumed",
        "held_out": {"requests": len(pairs), **asdict(Accuracy.of(predicted, yields))},
        "calibration": [[round(a, 3), round(b, 3)] for a, b in points],
        "importance": importance(predictor.predict, rows, yields),
        "arms": {name: outcome.row for name, outcome in arms.outcomes.items()},
        "arms_by_task": by_task,
    }


def _played(predictor: YieldPredictor, one: Recorded, replayed: Replayed, *, default: int) -> Played:
    predicted = np.clip(predictor.predict(replayed.features), 0.0, replayed.lengths)
    return Played(replayed, predicted, one.yields(default))


def _samples(replayed: Sequence[Replayed]) -> tuple[Floats, Yields]:
    """Features f32[N, F] and yields i32[N] of all positions at which the cache has a draft."""
    rows = np.concatenate([one.features[one.lengths > 0] for one in replayed])
    return rows, np.concatenate([one.yields[one.lengths > 0] for one in replayed])


def _recorded(args: argparse.Namespace) -> list[Recorded]:
    """All generations in an order of chance, as they come to a server; the same for the same seed."""
    found = [_of_trace(trace) for path in args.traces for trace in read_traces(path)]
    for path in args.data:
        of_file = (
            _of_jsonl(path) if path.suffix == ".jsonl" else [Recorded(d, path.stem) for d in read_dialogues([path])]
        )
        found += of_file[: args.limit]
    if not found:
        raise ConfigError("--traces, --data: name at least one")
    order = np.random.default_rng(args.seed).permutation(len(found))
    return [found[index] for index in order.tolist() if len(found[index].dialogue.output_ids)]


def _of_trace(trace: Trace) -> Recorded:
    """Where each round emitted one token, a model's draft tells its yield there; another source's does not."""
    output = trace.output_ids
    dialogue = Dialogue(trace.prompt_ids, output)
    is_everywhere = all(len(step.emitted_ids) == 1 for step in trace.steps)
    sources = {step.source for step in trace.steps if step.draft_ids}
    if not is_everywhere or not sources or not sources <= _MODELS:
        return Recorded(dialogue, trace.task)
    return Recorded(dialogue, trace.task, draft_yields(trace.steps, output))


def _of_jsonl(path: Path) -> list[Recorded]:
    if not path.is_file():
        raise ConfigError(f"--data: {path} is no file")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Recorded(Dialogue(_ids(line["prompt_ids"]), _ids(line["output_ids"])), _task(line["id"]))
        for line in lines
        if "error" not in line
    ]


def _task(name: str) -> str:
    """The task in a workload's id, which ends in three numbers."""
    parts = name.rsplit("-", 3)
    return parts[0] if len(parts) == 4 else "default"


def _ids(values: Sequence[int]) -> Ids:
    return as_ids(values)
