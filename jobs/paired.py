"""`bench` in this process: profiles against transformers' own decoding, on the same weights, dtype and threads."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from jobs.arms import Work, assistant_of, profile_arm, stock_arms
from jobs.comparison import Run, measure, orders, summarise
from jobs.figures import table
from jobs.hybrid_arms import ORACLE, build_oracle, hybrid_parts
from jobs.options import profile_from
from jobs.plotting import bar_chart
from jobs.provenance import Provenance
from jobs.reports import write_json
from serving.build import build
from serving.config import Profile
from serving.errors import ConfigError
from tuning.prompts import Prompt

STOCK_ARMS = ("generate", "lookup", "assisted")


@dataclass(frozen=True)
class Plan:
    """What is compared: profiles of one target, stock arms, so many repeats; `assisted` needs an assistant.

    `hybrid` is the profile whose best choices in hindsight are an arm, if any.
    """

    profiles: Sequence[Profile]
    stock: Sequence[str]
    assistant: str | None
    repeats: int
    threads: int | None
    hybrid: Profile | None = None

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ConfigError("--profiles: name at least one")
        if self.repeats < 1:
            raise ConfigError(f"--repeats: must be at least 1, got {self.repeats}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads: must be at least 1, got {self.threads}")
        unknown = [name for name in self.stock if name not in STOCK_ARMS]
        if unknown:
            raise ConfigError(f"--stock: {unknown[0]!r} is unknown; choose of {', '.join(STOCK_ARMS)}")
        if "assisted" in self.stock and self.assistant is None:
            raise ConfigError("--assistant: `assisted` needs a causal LM where no profile drafts with a model")
        targets = {profile.target for profile in self.profiles}
        if len(targets) > 1:
            models = ", ".join(sorted(f"{one.model} in {one.dtype}" for one in targets))
            raise ConfigError(f"--profiles: must share one target, got {models}; set --target and --dtype")
        oracle = [ORACLE] if self.hybrid else []
        names = Counter([*self.stock, *oracle, *(profile.name for profile in self.profiles)])
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ConfigError(f"--profiles, --stock: {twice[0]!r} appears {names[twice[0]]} times; names must differ")


def run(args: argparse.Namespace, prompts: Sequence[Prompt], provenance: Provenance, plot: Path) -> int:
    """Measure, print a table, write JSON and plot."""
    args.batch = args.batch or 1
    plan = plan_from(args, len(prompts))
    if plan.threads:
        torch.set_num_threads(plan.threads)
    built = {profile.name: build(profile) for profile in plan.profiles}
    tokenizer = next(iter(built.values())).tokenizer
    work = Work(
        prompts=[tokenizer.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts],
        stop_ids=tokenizer.stop_ids,
        max_tokens=args.max_tokens,
        batch=args.batch,
        temperature=args.temperature,
        seed=args.seed,
    )
    if plan.hybrid:
        built[ORACLE] = build_oracle(plan.hybrid, prompts, work.requests())
    ours = {name: profile_arm(one, work) for name, one in built.items()}
    stock = stock_arms(plan.stock, plan.profiles[0].target, plan.assistant, work)
    arms = stock | ours
    order = orders(list(arms), plan.repeats)
    incomparable = frozenset(name for name, arm in arms.items() if not arm.is_comparable)
    runs = summarise(measure(arms, order), incomparable)
    write_json(args.json, {"meta": _meta(provenance, plan, work, order), "runs": [asdict(one) for one in runs]})
    _show(runs, plot)
    return 0


def plan_from(args: argparse.Namespace, num_prompts: int) -> Plan:
    """The plan of the flags. Raises ConfigError naming the flag."""
    hybrid = profile_from(args, args.hybrid) if args.hybrid else None
    named = args.profiles if args.profiles or hybrid else "plain,suffix"
    profiles = [profile_from(args, name) for name in (named or "").split(",") if name]
    profiles += hybrid_parts(hybrid) if hybrid else ()
    plan = Plan(
        profiles=profiles,
        stock=_stock(args),
        assistant=args.assistant or assistant_of(profiles),
        repeats=3 if args.repeats is None else args.repeats,
        threads=args.threads,
        hybrid=hybrid,
    )
    single = [name for name in plan.stock if name != "generate"]
    if single and args.batch > 1:
        raise ConfigError(f"--stock: transformers runs {single[0]!r} at batch 1 only; drop it or --batch {args.batch}")
    if args.batch > num_prompts:
        raise ConfigError(f"--batch: must be at most the number of prompts ({num_prompts}), got {args.batch}")
    return plan


def _stock(args: argparse.Namespace) -> list[str]:
    default = "generate,lookup" if args.batch == 1 else "generate"
    return [name for name in (default if args.stock is None else args.stock).split(",") if name]


def _meta(provenance: Provenance, plan: Plan, work: Work, order: Sequence[Sequence[str]]) -> dict[str, object]:
    return {
        **asdict(provenance),
        "threads": torch.get_num_threads(),
        "prompts": len(work.prompts),
        "max_tokens": work.max_tokens,
        "batch": work.batch,
        "temperature": work.temperature,
        "seed": work.seed,
        "repeats": plan.repeats,
        "orders": order,
        "assistant": plan.assistant if "assisted" in plan.stock else None,
        "profiles": [profile.model_dump() for profile in plan.profiles],
    }


def _show(runs: Sequence[Run], plot: Path) -> None:
    bar_chart({one.name: one.tokens_per_s for one in runs}, plot, unit="tokens/s")
    print(table([one.row for one in runs]))
