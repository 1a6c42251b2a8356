"""Calibrate ASD or CSD to a target and its drafter, from strict runs over prompts: no labels, no training.

`asd` sets budget and gate to the first quartile of what strict rejects (r / q, normalised). `csd` counts which tokens
the target puts in place of the drafter's; the counts go to a Parquet file beside the profile. Both keep the histogram
of first mismatches, against which served traffic is watched. Killed, it goes on where it was when started again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from jobs.options import add_profile_options, add_prompt_options, profile_from, prompts_from
from jobs.provenance import Provenance
from jobs.recorded import Recording, record_mismatches
from serving.build_rules import memory_identity
from serving.config import FullVerifier, Profile
from serving.config_rules import CsdRule
from serving.errors import ConfigError
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
    _write_profile(args.out, profile, rule.model_dump(mode="json", exclude_none=True))
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
    return rule, {
        "table": str(path),
        "pairs": len(counts),
        "pairs_above": sum(count > rule.count_above for count in seen),
        "top_20_percent_of_pairs": round(csd.pareto_share(seen), 3),
    }


def _write_profile(path: Path, profile: Profile, rule: dict[str, Any]) -> None:
    values = profile.model_dump(mode="json", exclude_defaults=True)
    values |= {"name": path.stem, "rule": rule, "drafter": profile.drafter.model_dump(mode="json")}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    partial.replace(path)
