"""The numbers of an audit: each arm's own, and what a profile gains and loses against strict on the same prompts."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from serving.config_rules import Calibration
from serving.memory.drift import drift_of
from tuning.audit_records import PLAIN, STRICT, Answer, ArmRun, Group
from tuning.bootstrap import Interval, mean, ratio

LEAST_TASK_SCORE = 0.2


@dataclass(frozen=True)
class Judged:
    """What a fresh pass of the target, and the task's checker, say of one answer."""

    log_likelihood: float
    problems: tuple[str, ...]
    solved: bool | None = None


Judgements = dict[tuple[str, str], Judged]  # by arm and prompt


@dataclass(frozen=True)
class ArmNumbers:
    """One arm: speed, work a token, exceptions and their cost, likelihood, the share of answers that were cut."""

    tokens: int
    tokens_per_s: float
    accepted_length: float
    accepted_at: list[float]
    tokens_per_target_pass: float
    target_passes_per_token: float
    slim_passes_per_token: float
    draft_passes_per_token: float
    drafted_per_token: float
    cycles_per_1k_tokens: float
    exceptions_per_request: float
    rescues_per_request: float
    regret_per_request: float
    regret_share_of_budget: float | None
    exhausted_requests: float | None
    exhausted_at_median: float | None
    tier_shares: dict[str, float]
    log_likelihood_per_token: Interval | None
    first_mismatches: list[int]
    cut_by_max_tokens: float
    unconfirmed_answers: int


@dataclass(frozen=True)
class Paired:
    """A profile against strict and plain on the same prompts. `task_scores` only where strict reaches 20 %."""

    identical_to_strict: Interval | None
    first_divergence_median: float | None
    log_likelihood_difference: Interval | None
    length_ratio: Interval | None
    speed_ratio_to_strict: Interval | None
    speed_ratio_to_plain: Interval | None
    strict_speed_ratio_to_plain: Interval | None
    drift_from_calibration: float | None
    task_scores: dict[str, Any] = field(default_factory=dict)


def arm_numbers(arm: str, groups: Sequence[Group], judged: Judgements) -> ArmNumbers:
    runs = [group.runs[arm] for group in groups]
    answers = [answer for run in runs for answer in run.answers]
    receipts = [answer.receipt for answer in answers]
    tokens = sum(answer.num_tokens for answer in answers)
    passes = sum(receipt.target_passes for receipt in receipts)
    num_drafts = sum(run.num_drafts for run in runs)
    budgets = [receipt.budget for receipt in receipts if receipt.budget]
    spent = sum(receipt.regret_spent for receipt in receipts)
    stops = [receipt.exhausted_at for receipt in receipts if receipt.exhausted_at is not None]
    tiers = sum((Counter(answer.tiers) for answer in answers), Counter[str]())
    verdicts = [judged[arm, answer.prompt_id] for answer in answers]
    return ArmNumbers(
        tokens=tokens,
        tokens_per_s=_over(tokens, sum(run.seconds for run in runs)),
        accepted_length=_over(sum(receipt.accepted for receipt in receipts), num_drafts),
        accepted_at=[_over(count, num_drafts) for count in _summed([run.accepted_at for run in runs])],
        tokens_per_target_pass=_over(tokens, passes),
        target_passes_per_token=_over(passes, tokens),
        slim_passes_per_token=_over(sum(one.slim.passes for one in receipts if one.slim is not None), tokens),
        draft_passes_per_token=_over(sum(receipt.draft_passes for receipt in receipts), tokens),
        drafted_per_token=_over(sum(receipt.drafted for receipt in receipts), tokens),
        cycles_per_1k_tokens=_over(1000 * sum(receipt.rounds for receipt in receipts), tokens),
        exceptions_per_request=_over(sum(receipt.num_exceptions for receipt in receipts), len(answers)),
        rescues_per_request=_over(sum(receipt.rescues for receipt in receipts), len(answers)),
        regret_per_request=_over(spent, len(answers)),
        regret_share_of_budget=_over(spent, sum(budgets)) if budgets else None,
        exhausted_requests=_over(len(stops), len(answers)) if budgets else None,
        exhausted_at_median=_median(stops),
        tier_shares={tier: _over(count, tokens) for tier, count in sorted(tiers.items())},
        log_likelihood_per_token=ratio(
            [one.log_likelihood for one in verdicts], [answer.num_tokens for answer in answers]
        ),
        first_mismatches=_summed([run.first_mismatches for run in runs]),
        cut_by_max_tokens=_over(sum(answer.finish_reason == "length" for answer in answers), len(answers)),
        unconfirmed_answers=sum(bool(one.problems) for one in verdicts),
    )


def paired_numbers(
    arm: str, groups: Sequence[Group], judged: Judgements, *, tasks: dict[str, str], calibration: Calibration | None
) -> Paired:
    """`tasks` names the task of each prompt that has a checker."""
    ours, strict = _answers(arm, groups), _answers(STRICT, groups)
    pairs = list(zip(ours, strict, strict=True))
    splits = [split for a, b in pairs if (split := first_divergence(a.output_ids, b.output_ids)) is not None]
    mismatches = _summed([group.runs[arm].first_mismatches for group in groups])
    return Paired(
        identical_to_strict=mean([float(a.output_ids == b.output_ids) for a, b in pairs]),
        first_divergence_median=_median(splits),
        log_likelihood_difference=mean(
            [_per_token(judged[arm, a.prompt_id], a) - _per_token(judged[STRICT, b.prompt_id], b) for a, b in pairs]
        ),
        length_ratio=ratio([a.num_tokens for a in ours], [b.num_tokens for b in strict]),
        speed_ratio_to_strict=_speed_ratio(groups, arm, STRICT),
        speed_ratio_to_plain=_speed_ratio(groups, arm, PLAIN),
        strict_speed_ratio_to_plain=_speed_ratio(groups, STRICT, PLAIN),
        drift_from_calibration=drift_of(mismatches, calibration.shares) if calibration else None,
        task_scores=_task_scores(arm, pairs, judged, tasks),
    )


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which two outputs differ; None where they are the same."""
    if a == b:
        return None
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _task_scores(
    arm: str, pairs: Sequence[tuple[Answer, Answer]], judged: Judgements, tasks: dict[str, str]
) -> dict[str, Any]:
    """By task: strict's score, and where that is 20 % or more the profile's and their paired difference."""
    scores = {}
    for task in sorted(set(tasks.values())):
        names = [a.prompt_id for a, _ in pairs if tasks.get(a.prompt_id) == task]
        solved = [(bool(judged[arm, name].solved), bool(judged[STRICT, name].solved)) for name in names]
        strict = mean([float(b) for _, b in solved])
        if strict is None:
            continue
        scores[task] = {"prompts": len(names), "strict": strict}
        if strict.value >= LEAST_TASK_SCORE:
            scores[task] |= {
                "profile": mean([float(a) for a, _ in solved]),
                "difference": mean([float(a) - float(b) for a, b in solved]),
            }
    return scores


def _speed_ratio(groups: Sequence[Group], arm: str, other: str) -> Interval | None:
    """Seconds a token of `other` over those of `arm`, groups resampled: how many times as fast `arm` is."""
    return ratio(
        [group.runs[other].seconds / _num_tokens(group.runs[other]) for group in groups],
        [group.runs[arm].seconds / _num_tokens(group.runs[arm]) for group in groups],
    )


def _num_tokens(run: ArmRun) -> int:
    return max(1, sum(answer.num_tokens for answer in run.answers))


def _answers(arm: str, groups: Sequence[Group]) -> list[Answer]:
    return [answer for group in groups for answer in group.runs[arm].answers]


def _per_token(judged: Judged, answer: Answer) -> float:
    return judged.log_likelihood / max(1, answer.num_tokens)


def _median(values: Sequence[int]) -> float | None:
    return float(statistics.median(values)) if values else None


def _over(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _summed(columns: Sequence[Sequence[int]]) -> list[int]:
    size = max(map(len, columns), default=0)
    return [sum(column[i] for column in columns if i < len(column)) for i in range(size)]
