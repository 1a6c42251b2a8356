"""Traces: every round of every request, exactly as it happened, and what they are read back as."""

import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Scheduler
from serving.errors import ConfigError
from serving.rules.strict import StrictRule
from serving.trace import StepRecord, read_traces, write_steps
from serving.types import as_ids, common_prefix
from serving.verifiers.full import FullVerifier
from tests.decode.scripted import ScriptedModel, arithmetic, oracle, plain, request, spell
from tuning.prompts import Prompt
from tuning.traces import TracingBook, capture


@dataclasses.dataclass
class Scripted:
    """As much of a Built as capturing needs."""

    scheduler: Scheduler


def captured(*, every_position: bool, right: int = 2) -> list[list[StepRecord]]:
    book = TracingBook(every_position=every_position)
    scheduler = Scheduler(
        verifier=FullVerifier(ScriptedModel(arithmetic)), drafter=oracle(arithmetic, right=right), decode=spell,
        limits=SchedulerLimits(2, 256, 64, 4), grouping=Grouping(shares_cores=True), policy=FixedDrafts(4), rules=book,
    )  # fmt: skip
    names = ("a", "b", "c")
    prompts = [Prompt(id=name, turns=("x",), task="t") for name in names]
    requests = [request(name, max_tokens=20, prompt=(5, 9 + i)) for i, name in enumerate(names)]
    found = list(capture(Scripted(scheduler), book, prompts, requests))  # type: ignore[arg-type]
    assert book.rules == {}
    return found


def test_a_trace_tells_each_round(tmp_path) -> None:
    found = captured(every_position=False)
    write_steps(tmp_path / "part-0.parquet", [step for steps in found for step in steps])
    traces = read_traces(tmp_path)
    assert [trace.request_id for trace in traces] == ["a", "b", "c"]
    assert [list(trace.steps) for trace in traces] == found
    for i, trace in enumerate(traces):
        assert trace.prompt_ids.tolist() == [5, 9 + i]
        assert trace.output_ids.tolist() == plain(arithmetic, (5, 9 + i), 20)
        assert [step.round for step in trace.steps] == list(range(len(trace.steps)))
        for step in trace.steps:
            assert len(step.next_ids) == len(step.draft_ids) + 1 == len(step.regret) + 1
            assert step.source == ("model" if step.draft_ids else "none")
            assert step.emitted_ids[: step.num_accepted] == step.draft_ids[: len(step.emitted_ids)][: step.num_accepted]
        assert max(step.num_accepted for step in trace.steps) == 2


@pytest.mark.parametrize("right", [0, 2, 4])
def test_at_every_position_the_text_is_the_same_and_each_draft_tells_its_yield(right: int) -> None:
    for i, steps in enumerate(captured(every_position=True, right=right)):
        output = as_ids([token for step in steps for token in step.emitted_ids])
        assert output.tolist() == plain(arithmetic, (5, 9 + i), 20)
        assert [len(step.emitted_ids) for step in steps] == [1] * 20
        yields = [common_prefix(as_ids(step.draft_ids), output[t:]) for t, step in enumerate(steps)]
        assert yields[1:-5] == [right] * 14


def test_a_trace_that_is_none_is_refused_in_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is no trace file"):
        read_traces(tmp_path / "missing")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="version none, 1 is read here"):
        read_traces(tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ConfigError, match="no Parquet file"):
        read_traces(tmp_path / "text.parquet")


def test_a_tracing_rule_is_as_lossless_as_what_it_watches() -> None:
    assert TracingBook().open(request("a")).rule.is_lossless == StrictRule.is_lossless
