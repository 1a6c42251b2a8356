"""Speed, measured fairly: of profiles in this process, or of a running application over HTTP.

In this process, arms take turns on the same prompts, weights, dtype and threads: the profiles, round by round, and
transformers' `generate` as it is, with prompt lookup (`lookup`) and with a draft model (`assisted`). Ratios are taken
within a repeat, their median is reported, every second turn goes backwards, and memories start empty in each repeat.

With --serve URL nothing is computed here: so many streams at once (--concurrency) are sent to /v1/chat/completions and
timed as their clients see them. A cycle through the prompts has a cache salt of its own, so none is answered from
what another one left behind. With --beside PROFILE, which must be what is served there, its engine in this process
takes turns with the application on the same prompts, and what the way over HTTP costs is the share of its time per
token (TPOT) by which it exceeds the engine's, the median over the turns.

Tables go to stdout; JSON has every figure with its raw repeats or requests; a plot goes beside it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jobs.options import add_profile_options, add_prompt_options, prompts_from
from jobs.provenance import Provenance
from jobs.reports import check_writable
from serving.errors import ConfigError

SUMMARY = "speed of profiles against transformers' generate, or of a running application over HTTP"
IN_PROCESS_ONLY = (
    "profiles", "hybrid", "stock", "assistant", "repeats", "threads", "target", "drafter", "dtype", "batch",
    "max_draft", "max_length",
)  # fmt: skip
# Of an engine in this process, which --beside brings in too.
OF_THE_ENGINE = frozenset({"threads", "target", "drafter", "dtype", "max_draft", "max_length"})
SERVE_ONLY = ("concurrency", "requests", "model", "speculation", "api_key_env", "beside")


def parser() -> argparse.ArgumentParser:
    """The flags of this job. Those of one mode only are None unless given, so that they can be refused in the other."""
    p = argparse.ArgumentParser(
        prog="python -m jobs bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=Path, required=True, metavar="OUT.json")
    p.add_argument("--plot", type=Path, metavar="OUT.png", help="default: beside the JSON")
    p.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="of the first prompt's sample, the next has the next one")
    add_prompt_options(p)
    _add_paired_options(p)
    add_profile_options(p)
    _add_serve_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Exit status 1 if any request over HTTP failed."""
    args = parser().parse_args(argv)
    if not 0.0 <= args.temperature <= 2.0:
        raise ConfigError(f"--temperature: must be between 0 and 2, got {args.temperature:g}")
    if args.serve:
        refused = [name for name in IN_PROCESS_ONLY if not (args.beside and name in OF_THE_ENGINE)]
        _refuse(args, refused, "has no effect on a running application; drop it or --serve")
    else:
        _refuse(args, SERVE_ONLY, "needs --serve URL")
    check_writable(args.json)
    prompts, provenance = prompts_from(args), Provenance.of("bench", argv)
    plot = args.plot or args.json.with_suffix(".png")
    if args.serve:
        from jobs import served

        return served.run(args, prompts, provenance, plot)
    from jobs import paired  # torch: seconds of import that a load test does not need

    return paired.run(args, prompts, provenance, plot)


def _add_paired_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("in this process")
    group.add_argument("--profiles", metavar="A,B", help="names or files; default: plain,suffix")
    group.add_argument(
        "--hybrid", metavar="PROFILE",
        help="compare this hybrid profile (arm `hvd`) with plain decoding, its model and its cache alone, the rule by "
        "the cache's score, and the best choice in hindsight; without --profiles these are all",
    )  # fmt: skip
    group.add_argument(
        "--stock", metavar="A,B",
        help="of generate, lookup and assisted, or empty; default: generate,lookup (generate alone where --batch is "
        "more than 1: transformers speculates for one sequence at a time); assisted needs a profile that drafts with a "
        "model, or --assistant",
    )  # fmt: skip
    group.add_argument(
        "--assistant", metavar="MODEL",
        help="draft model of the `assisted` arm, with the target's tokenizer; default: the first that a profile drafts "
        "with. One made by train-drafter gets the target's whole head",
    )  # fmt: skip
    group.add_argument("--repeats", type=int, help="default: 3")
    group.add_argument("--threads", type=int, help="CPU threads of every arm; default: all")


def _add_serve_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("a running application")
    group.add_argument("--serve", metavar="URL", help="measure the application there, e.g. http://127.0.0.1:8000")
    group.add_argument("--concurrency", metavar="N,N", help="streams at once, a level each; default: 1,4,16")
    group.add_argument(
        "--requests", type=int, metavar="N",
        help="of each level, cycling through the prompts; default: 4 for each stream, 16 with --beside, and at least 8",
    )  # fmt: skip
    group.add_argument("--model", metavar="NAME", help="default: the first that /v1/models lists")
    group.add_argument("--speculation", metavar="off|K", help="plain decoding, or at most K drafted tokens a round")
    group.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    group.add_argument(
        "--beside", metavar="PROFILE", help="take turns with this profile's engine in this process, to price the way"
    )


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: {reason}")
