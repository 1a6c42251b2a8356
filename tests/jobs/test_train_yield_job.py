"""What `train-yield` takes from a trace: a model's yields, where a model drafted at every position."""

from pathlib import Path

import pytest

from jobs.train_yield import _of_trace, main
from serving.errors import ConfigError
from serving.trace import StepRecord, Trace
from serving.types import as_ids

OUTPUT = [5, 6, 7]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--requests-a-cache", "0"], "--requests-a-cache: must be at least 1, got 0"),
        (["--epochs", "0"], "--epochs: must be at least 1, got 0"),
        (["--limit", "-1"], "--limit: must be at least 1, got -1"),
        (["--row-cost", "nan"], "--row-cost: must be at least 0, got nan"),
    ],
)
def test_what_no_training_can_have_is_refused_by_its_flag(tmp_path: Path, flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(["--out", str(tmp_path), *flags])


def trace(sources: list[str], *, num_emitted: int = 1) -> Trace:
    steps = [
        StepRecord(
            request_id="r", task="chat", round=number, position=2 + number, prompt_ids=[1, 2] if number == 0 else [],
            source=source, draft_ids=[] if source == "none" else [6, 7], next_ids=[], regret=[], num_accepted=0,
            emitted_ids=OUTPUT[number : number + num_emitted],
        )
        for number, source in enumerate(sources)
    ]  # fmt: skip
    return Trace("r", "chat", as_ids([1, 2]), steps)


@pytest.mark.parametrize("sources", [["none", "model", "none"], ["none", "eagle3", "eagle3"], ["model"] * 3])
def test_a_model_that_drafted_at_every_position_tells_its_yields(sources: list[str]) -> None:
    assert _of_trace(trace(sources)).model_yields is not None


@pytest.mark.parametrize(
    "sources", [["none"] * 3, ["suffix"] * 3, ["none", "model", "suffix"], ["none", "eagle3", "flexdraft"]]
)
def test_what_another_source_drafted_is_no_model_s_yield(sources: list[str]) -> None:
    assert _of_trace(trace(sources)).model_yields is None


def test_nor_is_a_round_that_emitted_more_than_one_token() -> None:
    assert _of_trace(trace(["model"], num_emitted=3)).model_yields is None
