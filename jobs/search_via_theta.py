"""Sweep the thresholds of a slim verifier (VIA-SD) on live runs: speed against quality, beside strict speculation.

Every pair theta_accept:theta_escalate answers all prompts with the same drafter, K fixed, greedy. Each output is then
scored by the target once more: nats a token below its best one (regret), and tokens that are its own. The cost model
counts passes times pass times measured here, for one sequence at a time, and says whether the middle tier pays.
Killed, it goes on where it was when started again with the same flags: OUT.arms/ has a file an arm, found again by what
its answers depend on.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jobs.figures import table
from jobs.options import add_profile_options, add_prompt_options, profile_from, prompts_from
from jobs.plotting import trade_off_chart
from jobs.provenance import Provenance
from jobs.reports import check_writable, write_json
from serving.build import build
from serving.build_rules import models_identity
from serving.build_via import mask_of
from serving.config import FullVerifier, Profile, ViaVerifier, pinned
from serving.config_rules import StrictRule
from serving.decode.offline import complete
from serving.decode.stats import EngineStats
from serving.errors import ConfigError
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest, Limits
from serving.types import as_ids
from tuning.prompts import Prompt
from tuning.selfgen import Dialogue
from tuning.via import Fidelity, fidelity, load_target, pass_times
from tuning.via_cost import PassTimes, modelled, verdict

_PAIRS = "0.9:0.7,0.7:0.5,0.5:0.3,0.3:0.1,0.1:0.05"


@dataclass(frozen=True)
class _Run:
    """One arm: what it said to which prompts, how long it took, what its engine counted."""

    name: str
    dialogues: list[Dialogue]
    num_unseen: int
    seconds: float
    stats: EngineStats

    def write(self, path: Path) -> None:
        """All or nothing: the file appears under its name only when it is whole."""
        record = asdict(self) | {"dialogues": [[d.prompt_ids.tolist(), d.output_ids.tolist()] for d in self.dialogues]}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "_Run | None":
        """None where there is none, where it is damaged, or where an engine counted other things than this one does."""
        if not path.is_file():
            return None
        try:
            record = json.loads(path.read_bytes())
            dialogues = [Dialogue(as_ids(prompt), as_ids(output)) for prompt, output in record["dialogues"]]
            name, num_unseen, seconds, stats = (record[key] for key in ("name", "num_unseen", "seconds", "stats"))
            if set(stats) != {field.name for field in fields(EngineStats)}:
                return None
            return cls(name, dialogues, num_unseen, seconds, EngineStats(**stats))
        except (ValueError, KeyError, TypeError):
            return None


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(
        prog="python -m jobs search via-theta",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--json", type=Path, required=True, metavar="OUT.json",
        help="the report, written anew by every run; what each arm answered stays in the folder OUT.arms",
    )  # fmt: skip
    p.add_argument("--plot", type=Path, metavar="OUT.png", help="default: beside the JSON")
    p.add_argument("--profile", default="via", help="whose verifier is `via` (default: %(default)s)")
    p.add_argument("--mask", help="in place of the profile's own")
    p.add_argument("--min-confidence", type=float, help="in place of the profile's own")
    p.add_argument("--thetas", default=_PAIRS, metavar="A:E,A:E", help="default: %(default)s")
    add_prompt_options(p)
    add_profile_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Run every arm, score the outputs, print table and verdict, write JSON and plot."""
    args = parser().parse_args(argv)
    profile, pairs, prompts = _profile(args), _pairs(args.thetas), prompts_from(args)
    check_writable(args.json)
    _check_lengths(profile, prompts, args.max_tokens)
    strict = {"verifier": FullVerifier(), "rule": StrictRule()}
    arms: dict[str, Profile] = {"strict": profile.model_copy(update=strict)}
    for accept, escalate in pairs:
        arms[f"{accept:g}:{escalate:g}"] = _with_thetas(profile, accept, escalate)
    runs = _runs(args, arms, [prompt.text for prompt in prompts])
    times = pass_times(profile, list(dict.fromkeys((1, profile.max_draft + 1, 2 * profile.max_draft + 1, 16, 32))))
    scores = _scores(profile, runs)
    rows = [_row(run, runs[0], times, scores[run.name]) for run in runs]
    best = min(runs[1:], key=lambda run: modelled(run.stats, times).total_ms)
    verdicts = _verdicts(runs[0], best, times)
    print(table(rows), *verdicts, sep="\n")
    report = {
        "provenance": asdict(Provenance.of("search via-theta", argv)),
        "profile": profile.model_dump(mode="json"),
        "pass_times_s": asdict(times),
        "arms": rows,
        "verdicts": verdicts,
    }
    write_json(args.json, report)
    plot_speed(rows, args.plot or args.json.with_suffix(".png"))
    return 0


def plot_speed(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed against quality, from the report's rows, of which the first is strict."""
    points = {str(row["thetas"]): (float(row["regret/token"]), float(row["tokens/s"])) for row in rows}
    trade_off_chart(
        points,
        path,
        reference=str(rows[0]["thetas"]),
        x_label="nats a token below the target's best token (less is better)",
        y_label="tokens/s",
    )


def _profile(args: argparse.Namespace) -> Profile:
    profile = profile_from(args, args.profile)
    if not isinstance(profile.verifier, ViaVerifier):
        raise ConfigError(f"--profile: {args.profile!r} has no slim verifier; its verifier must be `via`")
    changes: dict[str, Any] = {} if args.mask is None else {"mask": args.mask, "layers": None}
    if args.min_confidence is not None:
        if not 0.0 <= args.min_confidence <= 1.0:
            raise ConfigError(f"--min-confidence: must lie within 0..1, got {args.min_confidence:g}")
        changes["min_confidence"] = args.min_confidence
    verifier = profile.verifier.model_copy(update=changes)
    engine = profile.engine.model_copy(update={"guard": False})
    here = profile.model_copy(update={"verifier": verifier, "engine": engine, "placement": "colocated"})
    mask_of(here, verifier)  # it must fit the target, be it another one than the profile's own
    return pinned(here)


def _check_lengths(profile: Profile, prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Raise ConfigError, naming it, for a prompt that leaves no room for its answer."""
    tokenizer, most = ChatTokenizer.load(profile.target.model), profile.engine.max_length
    for prompt in prompts:
        length = len(tokenizer.render_chat([{"role": "user", "content": prompt.text}]))
        if length + max_tokens > most:
            raise ConfigError(
                f"--prompts: {prompt.id!r} ({length} tokens) with --max-tokens {max_tokens} exceeds the {most} tokens "
                "a sequence may have; raise --max-length, or leave the prompt out"
            )


def _pairs(text: str) -> list[tuple[float, float]]:
    try:
        pairs = [(float(a), float(e)) for a, e in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise ConfigError(f"--thetas: must be pairs accept:escalate separated by commas, got {text!r}") from None
    wrong = next((pair for pair in pairs if not 0.0 < pair[1] <= pair[0] <= 2.0), None)
    if wrong is not None:
        raise ConfigError(f"--thetas: 0 < escalate <= accept <= 2 must hold, got {wrong[0]:g}:{wrong[1]:g}")
    return pairs


def _with_thetas(profile: Profile, accept: float, escalate: float) -> Profile:
    assert isinstance(profile.verifier, ViaVerifier)
    verifier = profile.verifier.model_copy(update={"theta_accept": accept, "theta_escalate": escalate})
    return profile.model_copy(update={"verifier": verifier})


def _runs(args: argparse.Namespace, arms: dict[str, Profile], texts: Sequence[str]) -> list[_Run]:
    """Each arm's run, kept beside the report, so that a killed sweep goes on where it was."""
    folder = args.json.with_suffix(".arms")
    folder.mkdir(exist_ok=True)
    runs = []
    for name, arm in tqdm(arms.items(), desc="arms", unit="arm", file=sys.stderr, dynamic_ncols=True):
        path = folder / f"{arm_key(arm, args.max_tokens, texts)}.json"
        run = _Run.read(path)
        if run is None:
            run = _run(name, arm, texts, args.max_tokens)
            run.write(path)
        runs.append(run)
    return runs


def arm_key(arm: Profile, max_tokens: int, texts: Sequence[str]) -> str:
    """Of what an arm's outputs depend on, models by content."""
    parts = [arm.hash, models_identity(arm), arm.engine.model_dump(), max_tokens, list(texts)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _run(name: str, profile: Profile, texts: Sequence[str], max_tokens: int) -> _Run:
    built = build(profile)
    limits = Limits(max_tokens, built.tokenizer.stop_ids)
    requests = [
        GenerationRequest(f"{number:05d}", built.tokenizer.render_chat([{"role": "user", "content": text}]), limits)
        for number, text in enumerate(texts)
    ]
    for request in requests:
        built.limits.check(request)
    started = time.perf_counter()
    done = sorted(complete(built.scheduler, requests), key=lambda one: one.request_id)
    seconds = time.perf_counter() - started
    dialogues = [Dialogue(asked.prompt_ids, as_ids(one.output_ids)) for asked, one in zip(requests, done, strict=True)]
    unseen = sum(one.receipt.slim.unseen for one in done if one.receipt.slim is not None)
    return _Run(name, dialogues, unseen, seconds, built.scheduler.stats)


def _scores(profile: Profile, runs: Sequence[_Run]) -> dict[str, Fidelity]:
    """Each arm's outputs under the target once more; what arms have in common is scored once."""
    target = load_target(profile.target.model, dtype=profile.target.dtype, max_length=profile.engine.max_length)
    known: dict[bytes, Fidelity] = {}
    found: dict[str, Fidelity] = {}
    for run in tqdm(runs, desc="scores", unit="arm", file=sys.stderr, dynamic_ncols=True):
        for dialogue in run.dialogues:
            if dialogue.ids.tobytes() not in known:
                known[dialogue.ids.tobytes()] = fidelity(target, dialogue)
        found[run.name] = Fidelity.mean([known[dialogue.ids.tobytes()] for dialogue in run.dialogues])
    return found


def _row(run: _Run, strict: _Run, times: PassTimes, score: Fidelity) -> dict[str, Any]:
    """Rates are over all prompts; shares of tiers are of emitted tokens."""
    stats = run.stats
    same = sum(a.ids.tobytes() == b.ids.tobytes() for a, b in zip(run.dialogues, strict.dialogues, strict=True))
    return {
        "thetas": run.name,
        "tokens/s": round(stats.emitted / run.seconds, 1),
        "modelled ms/token": round(modelled(stats, times).total_ms, 2),
        "rejection rate": round(stats.replaced / max(1, stats.drafted), 3),
        "accepted/draft": round(stats.accepted / max(1, stats.num_drafts), 3),
        "full/token": round(stats.target_passes / stats.emitted, 3),
        "slim/token": round(stats.slim_passes / stats.emitted, 3),
        "tier A": round(stats.slim_accepted / stats.emitted, 3),
        "tier B": round(stats.regenerated / stats.emitted, 3),
        "unseen": round(run.num_unseen / stats.emitted, 3),
        "audit regret": round(stats.audit_regret / stats.audited, 3) if stats.audited else None,
        "regret/token": round(score.regret, 4),
        "own tokens": round(score.top1, 3),
        "log p/token": round(score.logprob, 3),
        "= strict": round(same / len(run.dialogues), 3),
        "tokens": stats.emitted,
    }


def _verdicts(strict: _Run, best: _Run, times: PassTimes) -> list[str]:
    places = {"here": times, "where a pass costs the same for 1 to 32 rows": times.flat}
    return [
        f"{best.name}, {place}: {verdict(modelled(strict.stats, seconds), modelled(best.stats, seconds), seconds)}"
        for place, seconds in places.items()
    ]
