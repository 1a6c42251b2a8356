"""Paired benchmark in one process: profiles against transformers' own decoding, on the same weights and threads.

Every repeat runs all arms one after the other on the same prompts, so that a slow minute of the machine slows all of
them; ratios are taken within a repeat and their median is reported. Raw repeats are kept in the JSON.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from jobs.options import add_profile_options, add_prompt_options, profile_from, prompts_from
from jobs.plotting import bar_chart
from jobs.reference import StockGenerate
from serving.build import Built, build
from serving.config import Profile
from serving.decode.offline import complete
from serving.errors import ConfigError
from serving.models.draft_lm import is_draft_lm
from serving.models.packed import Network
from serving.types import GenerationRequest, Ids, Limits

SUMMARY = "paired benchmark of profiles against transformers' generate"
STOCK_ARMS = ("generate", "lookup", "assisted")


@dataclass(frozen=True)
class Measured:
    """One arm in one repeat: seconds, output ids, and what speculation counted."""

    seconds: float
    outputs: list[list[int]]
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(ids) for ids in self.outputs) / self.seconds


Arm = Callable[[], Measured]


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs bench", description=__doc__)
    p.add_argument("--profiles", default="plain,suffix", metavar="A,B", help="default: %(default)s")
    p.add_argument("--stock", default="generate,lookup", metavar="A,B", help=f"of {', '.join(STOCK_ARMS)}")
    p.add_argument("--assistant", metavar="MODEL", help="assistant_model of the `assisted` arm (a Hub id or folder)")
    p.add_argument("--json", type=Path, required=True, metavar="OUT.json")
    p.add_argument("--plot", type=Path, metavar="OUT.png", help="default: beside the JSON")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, help="CPU threads of every arm (default: all)")
    add_prompt_options(p)
    add_profile_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, write JSON and plot."""
    args = parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.repeats < 1:
        raise ConfigError(f"--repeats: must be at least 1, got {args.repeats}")
    profiles = [profile_from(args, name) for name in args.profiles.split(",") if name]
    if not profiles:
        raise ConfigError("--profiles: name at least one")
    prompts = prompts_from(args)
    built = {profile.name: build(profile) for profile in profiles}
    tokenizer = next(iter(built.values())).tokenizer
    ids = [tokenizer.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    arms = _stock_arms(args, profiles[0], ids, tokenizer.stop_ids)
    arms |= {name: _profile_arm(one, ids, args.max_tokens) for name, one in built.items()}
    repeats = _run(arms, args.repeats)
    rows = summarise(repeats)
    report = {"meta": _meta(argv, args, profiles, len(prompts)), "runs": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    speeds = {run["name"]: run["tokens_per_s"] for run in rows}
    bar_chart(speeds, args.plot or args.json.with_suffix(".png"), unit="tokens/s")
    print(table(rows))
    return 0


def summarise(repeats: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    """One row an arm: medians over repeats, ratios within each repeat. A ratio is None without its other side."""
    rows = []
    for name, measured in repeats.items():
        counts = measured[-1].counts
        rows.append(
            {
                "name": name,
                "tokens_per_s": round(statistics.median(one.tokens_per_s for one in measured), 2),
                "ratio_to_generate": _ratio(measured, repeats.get("generate")),
                "ratio_to_lookup": _ratio(measured, repeats.get("lookup")),
                "ratio_to_plain": _ratio(measured, repeats.get("plain")),
                "accepted_length": counts.get("accepted_length"),
                "target_passes_per_token": counts.get("target_passes_per_token"),
                "identical_to_plain": _identical(measured, repeats.get("plain")),
                "identical_to_generate": _identical(measured, repeats.get("generate")),
                "repeats": [{"seconds": one.seconds, "tokens_per_s": one.tokens_per_s} for one in measured],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    columns = (
        "name", "tokens_per_s", "ratio_to_generate", "ratio_to_lookup", "ratio_to_plain", "accepted_length",
        "target_passes_per_token", "identical_to_plain", "identical_to_generate",
    )  # fmt: skip
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _run(arms: dict[str, Arm], repeats: int) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {name: [] for name in arms}
    with tqdm(total=repeats * len(arms), unit="run", file=sys.stderr, dynamic_ncols=True) as bar:
        for _ in range(repeats):
            for name, arm in arms.items():
                bar.set_description(name)
                found[name].append(arm())
                bar.update(1)
    return found


def _stock_arms(args: argparse.Namespace, profile: Profile, ids: list[Ids], stop_ids: frozenset[int]) -> dict[str, Arm]:
    names = [name for name in args.stock.split(",") if name]
    for name in names:
        if name not in STOCK_ARMS:
            raise ConfigError(f"--stock: {name!r} is unknown; choose of {', '.join(STOCK_ARMS)}")
        if name != "generate" and profile.engine.max_sessions > 1 and args.batch not in (None, 1):
            raise ConfigError(f"--stock: transformers runs {name!r} at batch 1 only; drop it or --batch {args.batch}")
    if not names:
        return {}
    stock = StockGenerate(profile.target.model, profile.target.dtype, stop_ids=stop_ids)
    options: dict[str, dict[str, Any]] = {"generate": {}, "lookup": {"prompt_lookup_num_tokens": 10}}
    if "assisted" in names:
        options["assisted"] = {"assistant_model": _assistant(args, profile)}

    def arm(extra: dict[str, Any]) -> Arm:
        def run() -> Measured:
            started = time.perf_counter()
            outputs = stock.run(ids, max_tokens=args.max_tokens, batch=args.batch or 1, **extra)
            return Measured(time.perf_counter() - started, outputs)

        return run

    return {name: arm(options[name]) for name in names}


def _assistant(args: argparse.Namespace, profile: Profile) -> Network:
    from serving.models.loading import load_network

    if not args.assistant or is_draft_lm(args.assistant):
        raise ConfigError("--assistant: the `assisted` arm needs a whole causal LM with the target's tokenizer")
    return load_network(args.assistant, {"float32": torch.float32, "bfloat16": torch.bfloat16}[profile.target.dtype])


def _profile_arm(built: Built, ids: list[Ids], max_tokens: int) -> Arm:
    """Requests in order, at most `max_sessions` at once. Memories are salted anew, so no repeat learns from another."""
    calls = 0

    def run() -> Measured:
        nonlocal calls
        calls += 1
        requests = [
            GenerationRequest(f"{calls}-{i}", one, Limits(max_tokens, built.tokenizer.stop_ids), salt=f"repeat-{calls}")
            for i, one in enumerate(ids)
        ]
        started = time.perf_counter()
        done = {completion.request_id: completion for completion in complete(built.scheduler, requests)}
        seconds = time.perf_counter() - started
        receipts = [done[request.request_id].receipt for request in requests]
        passes, emitted = sum(r.target_passes for r in receipts), sum(r.emitted for r in receipts)
        drafts = passes - sum(r.drafts_empty for r in receipts)
        counts = {
            "accepted_length": round(sum(r.accepted for r in receipts) / drafts, 3) if drafts else 0.0,
            "target_passes_per_token": round(passes / emitted, 3),
        }
        return Measured(seconds, [done[request.request_id].output_ids for request in requests], counts)

    return run


def _ratio(measured: list[Measured], other: list[Measured] | None) -> float | None:
    if other is None:
        return None
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(measured, other, strict=True)]
    return round(statistics.median(ratios), 3)


def _identical(measured: list[Measured], other: list[Measured] | None) -> float | None:
    if other is None:
        return None
    pairs = list(zip(measured[-1].outputs, other[-1].outputs, strict=True))
    return round(sum(a == b for a, b in pairs) / len(pairs), 3)


def _cell(value: str | float | None) -> str:
    return "-" if value is None else str(value)


def _meta(
    argv: Sequence[str], args: argparse.Namespace, profiles: Sequence[Profile], num_prompts: int
) -> dict[str, Any]:
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": "python -m jobs bench " + " ".join(argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "prompts": num_prompts,
        "repeats": args.repeats,
        "revision": revision.stdout.strip() or None,
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        "profiles": [profile.model_dump() for profile in profiles],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        flags = info.read_text(encoding="utf-8")
        best = next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags), "")
        return f"{len(lines)} x {lines[0].split(':', 1)[1].strip()} ({best})" if lines else platform.processor()
    return platform.processor()
