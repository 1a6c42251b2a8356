"""Write a file of edit prompts: documents and code files to be given back with a small change."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from serving.errors import ConfigError
from tuning.workloads import EditWorkload

SUMMARY = "write a JSONL file of edit prompts for benchmarks"


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs workload", description=__doc__)
    p.add_argument("--out", type=Path, required=True, metavar="F.jsonl")
    p.add_argument("--count", type=int, default=16, help="default: %(default)s")
    p.add_argument("--size", type=int, default=300, help="tokens of a text, about; default: %(default)s")
    p.add_argument("--seed", type=int, default=0)
    return p


def main(argv: Sequence[str]) -> int:
    """Print where they went."""
    args = parser().parse_args(argv)
    for flag, value in (("--count", args.count), ("--size", args.size)):
        if value < 1:
            raise ConfigError(f"{flag}: must be at least 1, got {value}")
    prompts = EditWorkload(args.count, args.seed, args.size).prompts()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(f"{prompt.model_dump_json(exclude_none=True)}\n" for prompt in prompts), "utf-8")
    print(json.dumps({"out": str(args.out), "prompts": len(prompts)}))
    return 0
