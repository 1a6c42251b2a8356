"""An audit as Markdown and as a plot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.plotting import IntervalPanel, interval_charts
from tuning.audit_speed import TOLERANCE
from tuning.bootstrap import LEAST_SAMPLES, Interval

_ARM_ROWS = {
    "tokens/s": "tokens_per_s",
    "accepted length": "accepted_length",
    "tokens per target pass": "tokens_per_target_pass",
    "target passes per token": "target_passes_per_token",
    "slim passes per token": "slim_passes_per_token",
    "draft passes per token": "draft_passes_per_token",
    "drafted per token": "drafted_per_token",
    "cycles per 1k tokens": "cycles_per_1k_tokens",
    "exceptions per request": "exceptions_per_request",
    "rescues per request": "rescues_per_request",
    "regret per request, nats": "regret_per_request",
    "regret spent / budget": "regret_share_of_budget",
    "requests that exhausted it": "exhausted_requests",
    "at output token (median)": "exhausted_at_median",
    "log likelihood per token": "log_likelihood_per_token",
    "tokens": "tokens",
    "answers cut by max_tokens": "cut_by_max_tokens",
    "answers whose receipt is contradicted": "unconfirmed_answers",
}
_PAIRED_ROWS = {
    "speed / strict": "speed_ratio_to_strict",
    "speed / plain": "speed_ratio_to_plain",
    "strict's speed / plain": "strict_speed_ratio_to_plain",
    "outputs identical to strict's": "identical_to_strict",
    "first token that differs (median)": "first_divergence_median",
    "log likelihood per token - strict's": "log_likelihood_difference",
    "length / strict's": "length_ratio",
    "drift from calibration": "drift_from_calibration",
}
_SPEED_ROWS = {
    "speed / strict": "ratio_to_strict",
    "strict / strict": "strict_ratio_to_itself",
    "tokens/s": "tokens_per_s",
    "strict's tokens/s": "strict_tokens_per_s",
    "triples": "triples",
}
_RATIOS = ("speed / strict", "speed / plain", "length / strict's")


def markdown(report: Mapping[str, Any]) -> str:
    """Tables: the arms side by side, then each profile against strict, with its interval."""
    arms, paired = report["arms"], report["paired"]
    rows = [[label, *(_shown(arm, key) for arm in arms.values())] for label, key in _ARM_ROWS.items()]
    lines = [
        "# Audit of " + ", ".join(f"{name} ({one['hash']})" for name, one in report["profiles"].items()),
        "",
        f"{report['prompts']} prompts, at most {report['max_tokens']} tokens, {report['batch']} at once; target "
        f"{report['target']['model']} ({report['target']['dtype']}), drafter {_drafter(report['drafter'])}. "
        f"{report['provenance']['date']}, {report['provenance']['processor']}: `{report['provenance']['command']}`",
        "",
        *_table(["", *arms], rows),
        "",
        *_table(
            ["against strict, with 95 % intervals", *paired],
            [[label, *(_shown(one, key) for one in paired.values())] for label, key in _PAIRED_ROWS.items()],
        ),
    ]
    for name, one in paired.items():
        for task, score in one["task_scores"].items():
            told = {key: _cell(value) for key, value in score.items()}
            lines += ["", f"{name}, {task}: {told}" + ("" if "profile" in score else ", no signal")]
    lines += ["", *_speed(report)]
    return "\n".join(lines) + "\n"


def _speed(report: Mapping[str, Any]) -> list[str]:
    """What the triples tell, and of each candidate whether that may be claimed."""
    if "speed" not in report:
        return ["Strict was not timed against itself (--speed-minutes): take some percent of a speed ratio for noise."]
    speed, candidates = report["speed"], report["speed"]["candidates"]
    rows = [[label, *(_cell(one[key]) for one in candidates.values())] for label, key in _SPEED_ROWS.items()]
    met = ["yes" if one["protocol_met"] else "**no**, the time was over" for one in candidates.values()]
    return [
        f"Triples strict - candidate - strict: the same prompts and {speed['tokens_per_prompt']} tokens each, stops "
        "ignored, prompts read beforehand, drafts not guarded, no side with another's KV or memory. A speed may be "
        f"claimed where the interval of strict's ratio to itself lies within {100 * TOLERANCE:g} % of 1, over at least "
        f"{LEAST_SAMPLES} triples. {speed['minutes_taken']:g} of {speed['minutes_allowed']:g} minutes were taken.",
        "",
        *_table(["triples, with 95 % intervals", *candidates], [*rows, ["protocol met", *met]]),
    ]


def plot(report: Mapping[str, Any], path: Path) -> None:
    """What `panels` has, under the profiles' names."""
    title = f"{', '.join(report['profiles'])} against strict, {report['prompts']} prompts"
    interval_charts(panels(report), path, title=title)


def panels(report: Mapping[str, Any]) -> list[IntervalPanel]:
    """All ratios, around 1; and, where any of them has an interval, the differences in log likelihood, around 0."""
    paired = report["paired"]
    strict = {"strict: speed / plain": next(iter(paired.values()))["strict_speed_ratio_to_plain"]}
    ours = {f"{name}: {label}": one[_PAIRED_ROWS[label]] for name, one in paired.items() for label in _RATIOS}
    timed = {
        f"{name}: speed / strict, triples": one["ratio_to_strict"]
        for name, one in report.get("speed", {"candidates": {}})["candidates"].items()
    }
    over = "prompts (lengths), groups (speeds)" + (" or triples" if timed else "")
    found = [IntervalPanel(_intervals(strict | ours | timed), 1.0, f"ratio, with 95 % intervals over {over}")]
    differences = _intervals({name: one["log_likelihood_difference"] for name, one in paired.items()})
    known = {name: one for name, one in differences.items() if one.ends is not None}
    if known:
        label = "log likelihood a token less strict's, nats, with 95 % intervals over prompts"
        found.append(IntervalPanel(known, 0.0, label))
    return found


def _intervals(rows: Mapping[str, Mapping[str, float] | None]) -> dict[str, Interval]:
    return {name: Interval(**row) for name, row in rows.items() if row is not None}


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _drafter(config: Mapping[str, Any]) -> str:
    """The kind, and the model where there is one: a name, or a drafter itself."""
    model = config.get("model")
    if model is None:
        return str(config["kind"])
    return f"{config['kind']} {model}" if isinstance(model, str) else f"{config['kind']} with {_drafter(model)}"


def _shown(numbers: Mapping[str, Any], key: str) -> str:
    value = numbers[key]
    return f"{value:.1f}" if key.endswith("_median") and value is not None else _cell(value)


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return str(Interval(**value))
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
