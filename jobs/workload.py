"""Write a file of prompts: edits (documents and code to be given back with a small change), agentic work (code edits,
tool calls with changing arguments, revisions), chat, or a mixture of which half is chat."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from serving.errors import ConfigError
from tuning.workloads import KINDS, Workload

SUMMARY = "write a JSONL file of prompts: edits, agentic work, chat or a mixture"
MOST = 4096


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs workload", description=__doc__)
    p.add_argument("--out", type=Path, required=True, metavar="F.jsonl")
    p.add_argument("--kind", choices=KINDS, default="edits", help="default: %(default)s")
    p.add_argument(
        "--split", choices=("train", "test"), help="only prompts of this half of all texts, so that the other is unseen"
    )
    p.add_argument("--count", type=int, default=16, help="default: %(default)s")
    p.add_argument("--size", type=int, default=300, help="tokens of a text, about; default: %(default)s")
    p.add_argument("--seed", type=int, default=0)
    return p


def main(argv: Sequence[str]) -> int:
    """Print where they went."""
    args = parser().parse_args(argv)
    for flag, value in (("--count", args.count), ("--size", args.size)):
        if not 1 <= value <= MOST:
            raise ConfigError(f"{flag}: must be between 1 and {MOST}, got {value}")
    prompts = Workload(args.kind, args.count, args.seed, args.size, args.split).prompts()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(f"{prompt.model_dump_json(exclude_none=True)}\n" for prompt in prompts), "utf-8")
    print(json.dumps({"out": str(args.out), "prompts": len(prompts)}))
    return 0
