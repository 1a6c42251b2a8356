"""What profiles gain and what they cost: plain, strict and each profile on the same prompts, to their natural end.

Speed is measured group by group, arms in turn and every second group backwards. With --speed-minutes it is also
measured by short triples strict - candidate - strict of fixed work (32 tokens a prompt, stops ignored, prompts read
beforehand), plain and each profile in turn, until the interval of strict's ratio to itself lies within 3 % of 1 or the
time is over.

Quality is what the target itself says of each output in a fresh pass (log likelihood), how often and where outputs part
from strict's, their length, and task scores for prompts with a `reference` that ends in a number, or, where --run-code
allows it, `test` and `entry_point`. Each receipt is checked in the same pass: every token the target's own, or a
recorded exception with its regret, and its totals those of its exceptions. Tokens that a slim verifier decided may be
any; of them their number and the regret that the receipt tells (`slim`) are checked.

Intervals are 95 % bootstrap intervals over prompts, those of speed over groups or triples, where there are enough of
these. Drafts are not guarded: K is the profile's. Passes are counted where they look for a token: of the target one a
round, of a draft model or head one a drafted token, of the suffix cache none; reading a prompt does not count. Killed,
it goes on where it was. A report in Markdown and a plot go beside the JSON.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jobs.audit_report import markdown, plot
from jobs.audit_speed import FixedWork, Triples, speed_report
from jobs.audited import AuditRuns
from jobs.options import add_profile_options, add_prompt_options, profile_from, prompts_from
from jobs.provenance import Provenance
from jobs.reports import check_writable, write_json
from serving.config import Profile
from serving.errors import ConfigError
from serving.models.loading import LoadOptions, load_packed_lm
from serving.models.tokenizer import ChatTokenizer
from serving.types import as_ids
from tuning.audit import Judged, Judgements, arm_numbers, paired_numbers
from tuning.audit_records import PLAIN, STRICT, Answer, Group
from tuning.checkers import checker_of
from tuning.prompts import Prompt
from tuning.scoring import discrepancies, false_slim, false_totals, score_output

SUMMARY = "what a lossy profile gains and costs against strict, with every receipt checked"


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(
        prog="python -m jobs audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--profile", required=True, nargs="+", metavar="NAME|FILE",
        help="one or several that differ in their rules alone",
    )  # fmt: skip
    p.add_argument("--json", type=Path, required=True, metavar="OUT.json")
    p.add_argument(
        "--speed-minutes", type=float, metavar="N",
        help="time triples strict - candidate - strict, one of each candidate and more while N minutes last; "
        "default: none",
    )  # fmt: skip
    p.add_argument("--run-code", action="store_true", help="run generated code against HumanEval's tests")
    add_prompt_options(p)
    add_profile_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Exit status 1 if a fresh pass, or its own list of exceptions, contradicts any receipt."""
    args = parser().parse_args(argv)
    check_writable(args.json)
    if args.speed_minutes is not None and not 0.0 < args.speed_minutes < math.inf:
        raise ConfigError(f"--speed-minutes: must be a time of more than 0, got {args.speed_minutes:g}")
    profiles, prompts = [profile_from(args, name) for name in args.profile], prompts_from(args)
    runs = AuditRuns(profiles, prompts, args.max_tokens, args.json.with_suffix(".answers.jsonl"))
    groups = []
    with tqdm(total=len(prompts), desc="answers", unit="prompt", file=sys.stderr, dynamic_ncols=True) as bar:
        for group in runs.groups():
            groups.append(group)
            bar.update(len(group.runs[PLAIN].answers))
    judged = _judge(profiles[0], groups, {prompt.id: prompt for prompt in prompts}, runs_code=args.run_code)
    report = _report(runs, groups, judged, Provenance.of("audit", argv), runs_code=args.run_code)
    if args.speed_minutes is not None:
        report["speed"] = _speed(runs, args.speed_minutes, args.json.with_suffix(".triples.jsonl"))
    write_json(args.json, report)
    text = markdown(report)
    args.json.with_suffix(".md").write_text(text, encoding="utf-8")
    plot(report, args.json.with_suffix(".png"))
    print(text)
    return 1 if any(arm["unconfirmed_answers"] for arm in report["arms"].values()) else 0


def _judge(profile: Profile, groups: Sequence[Group], prompts: dict[str, Prompt], *, runs_code: bool) -> Judgements:
    """Every answer under a target of its own, loaded anew."""
    answers = [(arm, answer) for group in groups for arm, run in group.runs.items() for answer in run.answers]
    model = load_packed_lm(
        profile.target.model,
        LoadOptions(
            role="target",
            dtype=profile.target.dtype,
            num_rows=1,
            max_length=profile.engine.max_length,
            prefill_chunk=profile.engine.max_length,
            vocab_size=ChatTokenizer.load(profile.target.model).vocab_size,
        ),
    )
    judged = {}
    for arm, answer in tqdm(answers, desc="fresh passes", unit="answer", file=sys.stderr, dynamic_ncols=True):
        scored = score_output(model, as_ids(answer.prompt_ids), as_ids(answer.output_ids))
        prompt = prompts[answer.prompt_id]
        judged[arm, answer.prompt_id] = Judged(
            scored.log_likelihood,
            (
                *discrepancies(scored.table, answer.exceptions, answer.tiers),
                *false_totals(answer.receipt, answer.exceptions),
                *false_slim(scored.table, answer.receipt.slim, answer.tiers),
            ),
            _solved(prompt, answer, runs_code=runs_code),
        )
    return judged


def _speed(runs: AuditRuns, minutes: float, path: Path) -> dict[str, Any]:
    """The triples of plain decoding and of each profile, and what they tell."""
    work = FixedWork(runs)
    triples = Triples([name for name in runs.arms if name != STRICT], minutes, path, work.key, work.triple)
    found = list(tqdm(triples, desc="triples", unit="triple", file=sys.stderr, dynamic_ncols=True))
    return speed_report(found, triples, num_tokens=work.num_tokens)


def _solved(prompt: Prompt, answer: Answer, *, runs_code: bool) -> bool | None:
    checker = checker_of(prompt, runs_code=runs_code)
    return None if checker is None else checker(prompt, answer.text)


def _report(
    runs: AuditRuns,
    groups: Sequence[Group],
    judged: Judgements,
    provenance: Provenance,
    *,
    runs_code: bool,
) -> dict[str, Any]:
    tasks = {p.id: p.task for p in runs.prompts if checker_of(p, runs_code=runs_code) is not None}
    first = runs.profiles[0]
    return {
        "profiles": {
            profile.name: {"hash": profile.hash, "rule": profile.rule.model_dump(mode="json", exclude={"calibration"})}
            for profile in runs.profiles
        },
        "drafter": first.drafter.model_dump(mode="json"),
        "target": first.target.model_dump(mode="json"),
        "prompts": len(runs.prompts),
        "max_tokens": runs.max_tokens,
        "batch": runs.batch,
        "provenance": asdict(provenance),
        "arms": {arm: asdict(arm_numbers(arm, groups, judged)) for arm in runs.arms},
        "paired": {
            profile.name: asdict(
                paired_numbers(
                    profile.name, groups, judged, tasks=tasks, calibration=getattr(profile.rule, "calibration", None)
                )
            )
            for profile in runs.profiles
        },
        "problems": {f"{arm} {name}": list(one.problems) for (arm, name), one in judged.items() if one.problems},
    }
