"""`bench --serve URL`: load levels against a running application, over HTTP, from this process."""

import argparse
import asyncio
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from tqdm import tqdm

from jobs.figures import table
from jobs.levels import Baseline, Level, read_baseline, summarise
from jobs.load import LevelRun, Request, connected, first_model, run_level
from jobs.plotting import line_charts
from jobs.provenance import Provenance
from jobs.reports import write_json
from serving.errors import ConfigError
from tuning.prompts import Prompt

DEFAULT_CONCURRENCY = "1,4,16"


@dataclass(frozen=True)
class Plan:
    """Levels of concurrency and what each request asks for; `requests` is None for the level's own default."""

    url: str
    levels: Sequence[int]
    requests: int | None
    max_tokens: int
    temperature: float
    seed: int
    speculation: dict[str, object] | None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--serve: must start with http:// or https://, got {self.url!r}")
        if self.requests is not None and self.requests < max(self.levels):
            raise ConfigError(
                f"--requests: must be at least the concurrency, got {self.requests} for {max(self.levels)} streams"
            )

    def requests_at(self, concurrency: int) -> int:
        return self.requests or max(8, 4 * concurrency)

    def bodies(self, prompts: Sequence[Prompt], model: str, concurrency: int) -> list[Request]:
        """The requests of one level; each cycle through the prompts has its own salt, so its memory starts empty."""
        salt, found = uuid.uuid4().hex, list[Request]()
        for i in range(self.requests_at(concurrency)):
            cycle, index = divmod(i, len(prompts))
            body: dict[str, object] = {
                "model": model,
                "messages": [{"role": "user", "content": prompts[index].text}],
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed + index,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": f"bench-{salt}-{cycle}",
            }
            extra = {} if self.speculation is None else {"speculation": self.speculation}
            found.append(Request(prompts[index].id, body | extra))
        return found


def run(args: argparse.Namespace, prompts: Sequence[Prompt], provenance: Provenance, plot: Path) -> int:
    """Measure every level, print a table, write JSON and plot; exit status 1 if any request failed."""
    plan = plan_from(args)
    api_key = _api_key(args.api_key_env)
    if args.against_name is not None and args.against is None:
        raise ConfigError("--against-name: needs --against BENCH.json")
    report = asyncio.run(_measure(args, plan, prompts, api_key))
    meta = {**asdict(provenance), **asdict(plan), "prompts": len(prompts), "model": report.model}
    meta["against"] = report.baseline and {"report": str(args.against), **asdict(report.baseline)}
    write_json(args.json, {"meta": meta, "levels": [asdict(level) for level in report.levels]})
    _show(report.levels, plot)
    return _tell_failures(report.levels)


def plan_from(args: argparse.Namespace) -> Plan:
    """The plan of the flags. Raises ConfigError naming the flag."""
    return Plan(
        url=args.serve,
        levels=_levels(args.concurrency or DEFAULT_CONCURRENCY),
        requests=args.requests,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        speculation=None if args.speculation is None else speculation(args.speculation),
    )


def speculation(value: str) -> dict[str, object]:
    """`off` or K as the request's parameter."""
    if value == "off":
        return {"mode": "off"}
    if not value.isdecimal():
        raise ConfigError(f"--speculation: must be off or a number of tokens, got {value!r}")
    return {"max_draft": int(value)}


@dataclass(frozen=True)
class _Report:
    model: str
    levels: Sequence[Level]
    baseline: Baseline | None


async def _measure(args: argparse.Namespace, plan: Plan, prompts: Sequence[Prompt], api_key: str | None) -> _Report:
    async with connected(plan.url, api_key) as client:
        listed = await first_model(client)
        model = args.model or listed
        baseline = read_baseline(args.against, args.against_name or model) if args.against else None
        levels = [summarise(one, baseline) for one in await _levels_of(client, plan, prompts, model)]
    return _Report(model, levels, baseline)


async def _levels_of(client: httpx.AsyncClient, plan: Plan, prompts: Sequence[Prompt], model: str) -> list[LevelRun]:
    total, found = sum(map(plan.requests_at, plan.levels)), list[LevelRun]()
    with tqdm(total=total, unit="request", file=sys.stderr, dynamic_ncols=True) as bar:
        for concurrency in plan.levels:
            bar.set_description(f"{concurrency} at once")
            requests = plan.bodies(prompts, model, concurrency)
            found.append(await run_level(client, requests, concurrency, bar.update))
    return found


def _levels(text: str) -> list[int]:
    parts = [part for part in text.split(",") if part]
    if not parts or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ConfigError(f"--concurrency: must be numbers from 1 up, separated by commas, got {text!r}")
    return [int(part) for part in parts]


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError(f"--api-key-env: the environment variable {name} is not set")
    return os.environ[name]


def _show(levels: Sequence[Level], plot: Path) -> None:
    lines: dict[str, Sequence[float | None]] = {
        "tokens/s": [level.tokens_per_s for level in levels],
        "TPOT (ms, median)": [level.tpot_ms.p50 if level.tpot_ms else None for level in levels],
    }
    line_charts([level.concurrency for level in levels], lines, plot, x_label="streams at once")
    print(table([level.row for level in levels]))


def _tell_failures(levels: Sequence[Level]) -> int:
    failed, total = sum(level.errors for level in levels), sum(level.requests for level in levels)
    if not failed:
        return 0
    first = next(level.first_error for level in levels if level.first_error)
    print(f"bench: {failed} of {total} requests failed; the first: {first}", file=sys.stderr)
    return 1
