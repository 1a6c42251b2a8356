"""Captures traces: runs requests and keeps what the rule saw in each round.

With `every_position` no draft token is kept, so that each position of the same text gets a draft of its own, made with
all that its drafter needs of the target: the yield of a drafter everywhere, for the price of plain decoding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.build import Built
from serving.decode.offline import complete
from serving.requests import Chunk, GenerationRequest
from serving.rules.book import RuleBook, Terms
from serving.rules.prefix import accept_prefix
from serving.session import AcceptanceRule
from serving.trace import StepRecord
from serving.types import Ids, Ledger, ScoreTable, Verdict
from tuning.prompts import Prompt


@dataclass
class _Judged:
    scores: ScoreTable
    verdict: Verdict


@dataclass
class _TracingRule:
    """Judges as `inner` does, or keeps nothing, and remembers the last block."""

    inner: AcceptanceRule
    every_position: bool
    last: _Judged | None = None

    @property
    def is_lossless(self) -> bool:
        return self.inner.is_lossless

    def judge(self, scores: ScoreTable, ledger: Ledger) -> Verdict:
        if self.every_position:
            verdict = accept_prefix(scores, np.zeros(len(scores.draft_ids), dtype=np.bool_))
        else:
            verdict = self.inner.judge(scores, ledger)
        self.last = _Judged(scores, verdict)
        return verdict

    def learn(self, emitted: Verdict) -> None:
        self.inner.learn(emitted)


@dataclass
class TracingBook(RuleBook):
    """A rule book whose rules remember what they judged."""

    every_position: bool = False
    rules: dict[str, _TracingRule] = field(default_factory=dict)

    def open(self, request: GenerationRequest) -> Terms:
        terms = super().open(request)
        rule = self.rules[request.request_id] = _TracingRule(terms.rule, self.every_position)
        return Terms(rule, terms.receipt)


@dataclass
class _Recorder:
    """Turns chunks into steps; one request's rounds come in order."""

    book: TracingBook
    prompts: dict[str, tuple[str, Ids]]
    steps: dict[str, list[StepRecord]] = field(default_factory=dict)
    choices: dict[str, dict[str, int]] = field(default_factory=dict)

    def note(self, chunk: Chunk) -> None:
        judged = self.book.rules[chunk.request_id].last
        if judged is None or not chunk.ids:
            return
        task, prompt_ids = self.prompts[chunk.request_id]
        found = self.steps.setdefault(chunk.request_id, [])
        position = found[-1].position + len(found[-1].emitted_ids) if found else len(prompt_ids)
        found.append(
            StepRecord(
                request_id=chunk.request_id,
                task=task,
                round=len(found),
                position=position,
                prompt_ids=[] if found else prompt_ids.tolist(),
                source=self._source(chunk),
                draft_ids=judged.scores.draft_ids.tolist(),
                next_ids=judged.scores.next_ids.tolist(),
                regret=judged.scores.regret.tolist(),
                num_accepted=judged.verdict.num_accepted,
                emitted_ids=list(chunk.ids),
            )
        )

    def _source(self, chunk: Chunk) -> str:
        """The one whose drafts have become more."""
        before, now = self.choices.get(chunk.request_id, {}), dict(chunk.receipt.choices)
        self.choices[chunk.request_id] = {str(source): count for source, count in now.items()}
        return next((source for source, count in now.items() if count > before.get(source, 0)), "none")


def capture(
    built: Built, book: TracingBook, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest]
) -> Iterator[list[StepRecord]]:
    """The steps of each of `requests`, which are those of `prompts`, in their order. `built` was built with `book`."""
    about = {r.request_id: (p.task, r.prompt_ids) for p, r in zip(prompts, requests, strict=True)}
    recorder = _Recorder(book, about)
    for done in complete(built.scheduler, requests, on_chunk=recorder.note):
        book.rules.pop(done.request_id, None)
    for request in requests:
        yield recorder.steps.pop(request.request_id, [])
