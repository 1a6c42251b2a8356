"""The flags of `search via`: what they are, and what is refused before anything is loaded."""

import argparse
import math
from pathlib import Path

from jobs.via_rows import LEAST_FINAL_ROWS
from serving.errors import ConfigError
from serving.models.embedded import EMBEDDED_MODEL
from tuning.mask_log import Plan
from tuning.masks import ARMS

_LEAST = {"tokens": 0, "rows": 1, "final_rows": LEAST_FINAL_ROWS, "held_out_rows": 1, "seed": 0}


def add_via_options(p: argparse.ArgumentParser) -> None:
    """Every flag of the job."""
    p.add_argument("--out", type=Path, required=True, metavar="DIR")
    p.add_argument("--target", default=EMBEDDED_MODEL, help="embedded name, Hub id or folder (default: %(default)s)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    p.add_argument("--data", type=Path, nargs="*", default=[], help="Parquet files of prompt_ids and output_ids")
    p.add_argument("--tokens", type=int, default=0, help="answer tokens to self-generate beside --data")
    p.add_argument("--sizes", default="4,8", metavar="N,N", help="layers to skip, a search each (default: %(default)s)")
    p.add_argument("--budget", type=int, default=200, help="questions of each arm and size (default: %(default)s)")
    p.add_argument("--arms", default=",".join(ARMS), help="default: %(default)s")
    p.add_argument("--rows", type=int, default=256, help="positions of a block (default: %(default)s)")
    p.add_argument("--final-rows", type=int, default=4096, help="positions for the best few (default: %(default)s)")
    p.add_argument("--held-out-rows", type=int, default=4096, help="positions to judge on (default: %(default)s)")
    p.add_argument("--cpus", type=float, default=1.0, help="of the trial that judges questions (default: %(default)s)")
    p.add_argument("--gpus", type=float, default=0.0, help="of the same trial (default: %(default)s)")
    p.add_argument("--address", help="a Ray cluster; default: RAY_ADDRESS, or this machine")
    p.add_argument("--seed", type=int, default=0)


def check_via_options(args: argparse.Namespace) -> None:
    """Raise ConfigError, naming the flag, for numbers that no search can have."""
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value < least:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {least}, got {value}")
    if not 0 < args.cpus < math.inf:
        raise ConfigError(f"--cpus: must be above 0 and finite, got {args.cpus:g}")
    if not 0 <= args.gpus < math.inf:
        raise ConfigError(f"--gpus: must be at least 0 and finite, got {args.gpus:g}")


def plan_of(args: argparse.Namespace, num_layers: int) -> Plan:
    """What is to be searched for a target of so many layers. Raises ConfigError naming the flag."""
    return Plan(
        num_layers=num_layers,
        sizes=_sizes(args.sizes, num_layers),
        budget=args.budget,
        seed=args.seed,
        arms=_arms(args.arms),
    )


def _sizes(text: str, num_layers: int) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes: must be numbers separated by commas, got {text!r}") from None
    if not all(1 <= size <= num_layers - 2 for size in sizes):
        raise ConfigError(f"--sizes: must lie within 1..{num_layers - 2}, for first and last layer stay; got {text!r}")
    return list(dict.fromkeys(sizes))


def _arms(text: str) -> list[str]:
    arms = [part.strip() for part in text.split(",")]
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise ConfigError(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    return list(dict.fromkeys(arms))
