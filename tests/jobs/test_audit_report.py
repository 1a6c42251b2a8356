"""An audit's Markdown and plot: what is known only as a number does not look as if it were exact."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from jobs import plotting
from jobs.audit_report import markdown, panels, plot

KNOWN = {"value": 1.295, "low": 1.1, "high": 1.5}
ALONE = {"value": 1.295, "low": None, "high": None}
WORSE = {"value": -0.12, "low": -0.17, "high": -0.08}
PAIRED = {
    "identical_to_strict": KNOWN, "first_divergence_median": 3.0, "log_likelihood_difference": WORSE,
    "length_ratio": KNOWN, "speed_ratio_to_strict": ALONE, "speed_ratio_to_plain": ALONE,
    "strict_speed_ratio_to_plain": ALONE, "drift_from_calibration": None, "task_scores": {},
}  # fmt: skip
OTHER = PAIRED | {"log_likelihood_difference": ALONE, "first_divergence_median": 3.5}
TIMED = {"ratio_to_strict": KNOWN, "strict_ratio_to_itself": KNOWN}


def report(**changed: Any) -> dict[str, Any]:
    return {
        "arms": {}, "paired": {"asd": PAIRED, "csd": OTHER},
        "profiles": {"asd": {"hash": "a"}, "csd": {"hash": "c"}}, "prompts": 12, "max_tokens": 32, "batch": 4,
        "target": {"model": "m", "dtype": "float32"}, "drafter": {"kind": "model"},
        "provenance": {"date": "", "processor": "", "command": ""},
        **changed,
    }  # fmt: skip


def drawn(report: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(plotting, "_write", lambda figure, path: figures.append(figure))
    plot(report, path)
    return figures[0]


def test_a_ratio_without_interval_says_so_in_its_cell() -> None:
    text = markdown(report())
    assert "| speed / strict | 1.295, no interval | 1.295, no interval |" in text
    assert "| first token that differs (median) | 3.0 | 3.5 |" in text
    assert "| length / strict's | 1.295 [1.100, 1.500] | 1.295 [1.100, 1.500] |" in text


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ({"kind": "suffix"}, "drafter suffix."),
        ({"kind": "model", "model": "mine"}, "drafter model mine."),
        ({"kind": "hybrid", "model": {"kind": "eagle3", "model": "head"}}, "drafter hybrid with eagle3 head."),
    ],
)
def test_the_drafter_is_named_with_its_model(drafter: dict[str, Any], said: str) -> None:
    assert said in markdown(report(drafter=drafter))


def test_strict_is_shown_once_and_the_triples_beside_the_whole_answers() -> None:
    ratios, quality = panels(report(speed={"candidates": {"plain": TIMED, "asd": TIMED, "csd": TIMED}}))
    assert list(ratios.rows) == [
        "strict: speed / plain",
        "asd: speed / strict", "asd: speed / plain", "asd: length / strict's",
        "csd: speed / strict", "csd: speed / plain", "csd: length / strict's",
        "plain: speed / strict, triples", "asd: speed / strict, triples", "csd: speed / strict, triples",
    ]  # fmt: skip
    assert list(quality.rows) == ["asd"]  # csd's has no interval
    assert (ratios.reference, quality.reference) == (1.0, 0.0)
    untimed = {"ratio_to_strict": None, "strict_ratio_to_itself": None}
    assert len(panels(report(speed={"candidates": {"plain": untimed}}))[0].rows) == 7


def test_a_row_without_interval_is_hollow_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(report(), tmp_path / "a.png", monkeypatch)
    ratios, quality = figure.axes
    assert figure.get_suptitle() == "asd, csd against strict, 12 prompts"
    assert "95 % intervals over prompts (lengths), groups" in ratios.get_xlabel().replace("\n", " ")
    assert quality.get_xlabel().startswith("log likelihood a token less strict's")
    said = [text.get_text() for text in ratios.texts]
    assert said == ["1.29, no interval"] * 3 + ["1.29"] + ["1.29, no interval"] * 2 + ["1.29"]
    hollow = [line.get_markerfacecolor() == "white" for line in ratios.lines if line.get_marker() == "o"]
    assert hollow == [text.endswith("no interval") for text in said]


def test_without_any_interval_there_is_no_panel_of_quality(tmp_path: Path) -> None:
    few = report(paired={"asd": PAIRED | {"log_likelihood_difference": ALONE}})
    assert len(panels(few)) == 1
    plot(few, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
