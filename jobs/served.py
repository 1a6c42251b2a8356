"""`bench --serve URL`: load levels against a running application, over HTTP, from this process."""

import argparse
import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import ClientSession
from tqdm import tqdm

from jobs.figures import table
from jobs.levels import Level, Turn, summarise, turn_of
from jobs.load import LevelRun, Request, connected, models, run_level
from jobs.options import profile_from
from jobs.plotting import line_charts
from jobs.provenance import Provenance
from jobs.reports import write_json
from serving.config import Profile
from serving.errors import ConfigError
from tuning.prompts import Prompt

if TYPE_CHECKING:
    from jobs.beside import Beside

DEFAULT_CONCURRENCY = "1,4,16"
# Requests of a turn for each stream: the first ones begin all at once, and one's prompt is read in another's time.
_WAVES = 4
_TURNS_BESIDE = 4


@dataclass(frozen=True)
class Plan:
    """Levels of concurrency and what each request asks for; `requests` is None for enough for `num_turns` turns."""

    url: str
    levels: Sequence[int]
    requests: int | None
    max_tokens: int
    temperature: float
    seed: int
    speculation: dict[str, object] | None
    num_turns: int = 1

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--serve: must start with http:// or https://, got {self.url!r}")
        if self.requests is not None and self.requests < max(self.levels):
            raise ConfigError(
                f"--requests: must be at least the concurrency, got {self.requests} for {max(self.levels)} streams"
            )

    @property
    def max_draft(self) -> int | None:
        """What `speculation` leaves of K."""
        off: dict[str, object] = {"mode": "off", "max_draft": 0}
        wanted = (off if self.speculation == {"mode": "off"} else self.speculation or {}).get("max_draft")
        return wanted if isinstance(wanted, int) else None

    def requests_at(self, concurrency: int) -> int:
        return self.requests or max(8, self.num_turns * _WAVES * concurrency)

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
    profile = profile_from(args, args.beside) if args.beside else None
    model, levels = asyncio.run(_measure(args, plan, prompts, api_key, profile))
    meta = {**asdict(provenance), **asdict(plan), "prompts": len(prompts), "model": model, "beside": args.beside}
    write_json(args.json, {"meta": meta, "levels": [asdict(level) for level in levels]})
    _show(levels, plot)
    return _tell_failures(levels)


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
        num_turns=_TURNS_BESIDE if args.beside else 1,
    )


def speculation(value: str) -> dict[str, object]:
    """`off` or K as the request's parameter."""
    if value == "off":
        return {"mode": "off"}
    if not value.isdecimal():
        raise ConfigError(f"--speculation: must be off or a number of tokens, got {value!r}")
    return {"max_draft": int(value)}


def _beside(args: argparse.Namespace, profile: Profile, plan: Plan, prompts: Sequence[Prompt]) -> "Beside":
    import torch

    from jobs.arms import Work
    from jobs.beside import Beside
    from serving.build import build

    if args.threads:
        torch.set_num_threads(args.threads)
    engine = profile.engine.model_copy(update={"max_sessions": max(plan.levels)})
    built = build(profile.model_copy(update={"engine": engine}))
    work = Work(
        prompts=[built.tokenizer.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts],
        stop_ids=built.tokenizer.stop_ids,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        seed=plan.seed,
    )
    for request in work.requests():
        built.limits.check(request)
    return Beside(built, work, max_draft=plan.max_draft)


async def _measure(
    args: argparse.Namespace, plan: Plan, prompts: Sequence[Prompt], api_key: str | None, profile: Profile | None
) -> tuple[str, list[Level]]:
    async with connected(plan.url, api_key) as client:
        listed = await models(client, plan.url)
        model = args.model or listed[0]
        if profile is not None and profile.name not in listed:
            raise ConfigError(
                f"--beside: {plan.url} does not serve the profile {profile.name!r} (it has {', '.join(listed)}); "
                "name what it does"
            )
        beside = None if profile is None else _beside(args, profile, plan, prompts)
        return model, await _levels_of(client, plan, prompts, model, beside)


async def _levels_of(
    client: ClientSession, plan: Plan, prompts: Sequence[Prompt], model: str, beside: "Beside | None"
) -> list[Level]:
    total, found = sum(map(plan.requests_at, plan.levels)), list[Level]()
    with tqdm(total=total, unit="request", file=sys.stderr, dynamic_ncols=True) as bar:
        for level, concurrency in enumerate(plan.levels):
            bar.set_description(f"{concurrency} at once")
            requests = plan.bodies(prompts, model, concurrency)
            if beside is None:
                found.append(summarise(await run_level(client, requests, concurrency, bar.update)))
            else:
                engine = partial(beside.tpot_ms, level)
                found.append(await _in_turns(client, requests, concurrency, bar.update, engine))
    return found


async def _in_turns(
    client: ClientSession, requests: Sequence[Request], concurrency: int, on_done: Callable[[], object],
    engine: Callable[[Sequence[int], int], Sequence[float | None]],
) -> Level:  # fmt: skip
    """So many requests over HTTP, the same in this process, the next in the other order, and so on."""
    runs, turns = list[LevelRun](), list[Turn]()
    for numbers in turns_of(len(requests), concurrency):
        engine_goes_first = len(runs) % 2 == 1
        engine_ms = engine(numbers, concurrency) if engine_goes_first else []
        runs.append(await run_level(client, requests[numbers.start : numbers.stop], concurrency, on_done))
        turn = turn_of(runs[-1], engine_ms if engine_goes_first else engine(numbers, concurrency))
        turns += [turn] if turn else []
    samples = [sample for run in runs for sample in run.samples]
    return summarise(LevelRun(concurrency, sum(run.seconds for run in runs), samples), turns)


def turns_of(num_requests: int, concurrency: int) -> list[range]:
    """The requests of each turn: as many turns as there may be of enough requests, or one, of about the same size."""
    num_turns = max(1, num_requests // (_WAVES * concurrency))
    ends = [num_requests * turn // num_turns for turn in range(num_turns + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


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
