"""Calibrate ASD or CSD to a target and its drafter, from strict runs over prompts: no labels, no training.

`asd` sets budget and gate to the first quartile of what strict rejects (r / q, normalised). `csd` counts which tokens
the target puts in place of the drafter's; the counts go to a Parquet file beside the profile. Both keep the histogram
of first mismatches, against which served traffic is watched. Killed, it goes on where it was when started again.

The profile has target and drafter as they were calibrated; --batch and --max-length are the run's and do not reach it.
It is lossy, so it is served only once its file says `allow_uncertified: true`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from tqdm import tqdm

from jobs.options import add_profile_options, add_prompt_options, profile_from, prompts_from
from jobs.provenance import Provenance
from jobs.recorded import Recording, record_mismatches
from serving.build_rules import memory_identity
from serving.config import FullVerifier, Profile, load_profile
from serving.config_rules import CsdRule
from serving.errors import ConfigError, one_line
from serving.memory.correction_file import save_counts
from serving.models.tokenizer import ChatTokenizer
from tuning import asd, csd
from tuning.mismatches import Mismatch, calibration_of

SUMMARY = "calibrate ASD or CSD from strict runs: writes a profile, and CSD's table of counts"


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs calibrate", description=__doc__)
    p.add_argument("method", choices=("asd", "csd"))
    p.add_argument("--profile", default="strict", metavar="NAME|FILE", help="target and drafter; default: %(default)s")
    p.add_argument(
        "--out", type=Path, required=True, metavar="P.yaml", help="the profile to write; its name is the file's"
    )
    p.add_argument("--max-pairs", type=int, default=65_536, metavar="N", help="pairs that a table may hold")
    add_prompt_options(p)
    add_profile_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Print what was found."""
    args = parser().parse_args(argv)
    if args.max_pairs < 1:
        raise ConfigError(f"--max-pairs: must be at least 1, got {args.max_pairs}")
    profile, prompts = profile_from(args, args.profile), prompts_from(args)
    if profile.max_draft == 0:
        raise ConfigError(f"--profile: {profile.name!r} drafts nothing, so nothing would be rejected; use another one")
    if not isinstance(profile.verifier, FullVerifier):
        raise ConfigError(
            f"--profile: {profile.name!r} verifies by {profile.verifier.kind!r}, which rejects other tokens than the "
            "full target does; use one whose verifier is full"
        )
    written = _to_be_written(args, profile)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    recording = Recording(profile, max_tokens=args.max_tokens, path=args.out.with_suffix(".mismatches.jsonl"))
    mismatches: list[Mismatch] = []
    with tqdm(total=len(prompts), desc="strict runs", unit="prompt", file=sys.stderr, dynamic_ncols=True) as bar:
        for found in record_mismatches(recording, prompts):
            mismatches += found
            bar.update(1)
    provenance = Provenance.of("calibrate", argv)
    told = f"{provenance.command} ({provenance.date}, {len(prompts)} prompts)"
    if args.method == "asd":
        rule: Any = asd.calibrated(mismatches, provenance=told)
        found_out: dict[str, Any] = {"budget": rule.budget}
    else:
        rule, found_out = _csd(args, profile, mismatches, told)
    _write_profile(args.out, written, rule.model_dump(exclude_none=True))
    print(json.dumps({"profile": str(args.out), "mismatches": len(mismatches), **found_out}))
    return 0


def _csd(
    args: argparse.Namespace, profile: Profile, mismatches: Sequence[Mismatch], told: str
) -> tuple[CsdRule, dict[str, Any]]:
    tokenizer = ChatTokenizer.load(profile.target.model)
    counts = csd.count_pairs(mismatches, held_ids=tokenizer.special_ids | tokenizer.stop_ids, max_pairs=args.max_pairs)
    if not len(counts):
        raise ConfigError("--prompts: no drafted token was rejected; give more prompts or tokens")
    path = args.out.with_suffix(".parquet")
    save_counts(path, {"": counts}, identity=memory_identity(profile, tokenizer))
    rule = CsdRule(
        table=path.name,
        table_hash=counts.fingerprint,
        max_pairs=args.max_pairs,
        calibration=calibration_of(mismatches, provenance=told),
    )
    seen = list(counts.seen.values())
    above = sum(count > rule.count_above for count in seen)
    if not above:
        print(
            f"calibrate: no pair was seen more than {rule.count_above:g} times, so {path} nominates nothing; give more "
            "prompts or tokens, or lower rule.count_above",
            file=sys.stderr,
        )
    return rule, {
        "table": str(path),
        "pairs": len(counts),
        "pairs_above": above,
        "top_20_percent_of_pairs": round(csd.pareto_share(seen), 3),
    }


def _to_be_written(args: argparse.Namespace, calibrated: Profile) -> Profile:
    """The profile of --profile, named after its file, with target and drafter as they are calibrated.

    Raises ConfigError for a file that could not be loaded as a profile.
    """
    if args.out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out: must end in .yaml or .yml, got {str(args.out)!r}; a table is put beside it")
    values = load_profile(args.profile).model_dump() | {
        "name": args.out.stem,
        "target": calibrated.target,
        "drafter": calibrated.drafter,
        "allow_uncertified": False,
    }
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"--out: the file's stem is the profile's name, {one_line(error)}") from None


def _write_profile(path: Path, profile: Profile, rule: dict[str, Any]) -> None:
    values = {"name": profile.name, "target": profile.target.model_dump(), "drafter": profile.drafter.model_dump()}
    values |= profile.model_dump(exclude_defaults=True, exclude=set(values)) | {"rule": rule}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    partial.replace(path)
