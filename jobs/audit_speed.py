"""Triples strict - candidate - strict of fixed work: timed until strict agrees with itself, or the time is over."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs.audited import AuditRuns
from serving.decode.offline import complete
from serving.decode.scheduler import Scheduler
from serving.errors import DrafthouseError
from serving.requests import Chunk, GenerationRequest
from tuning.audit_records import STRICT, read_records
from tuning.audit_speed import Triple, speed_numbers
from tuning.prompts import Prompt

SPEED_TOKENS = 32  # a side then takes a second or two, in which a shared machine hardly changes
_LEFT_UNREAD = 2  # tokens: with at most two a round, a request that has all but these has not ended

Clock = Callable[[], float]


@dataclass(frozen=True)
class Triples:
    """The triples of all candidates, a line each in `path`; `measure` makes number n of a candidate.

    `minutes` are for all runs together, so a finished audit is evaluated again without an engine. More is taken only
    where it is too little for one triple of each candidate.
    """

    candidates: Sequence[str]
    minutes: float
    path: Path
    key: str
    measure: Callable[[str, int], Triple]

    def __iter__(self) -> Iterator[Triple]:
        """First those on file, then candidates in turn, each until its protocol is met, while there is time."""
        known = read_records(self.path, Triple, self.key)
        yield from known
        found = {name: [one for one in known if one.candidate == name] for name in self.candidates}
        spent_s = sum(triple.took_s for triple in known)
        with self.path.open("a", encoding="utf-8") as out:
            while (candidate := _next(found, left_s=60.0 * self.minutes - spent_s)) is not None:
                triple = self.measure(candidate, len(found[candidate]))
                out.write(triple.model_dump_json() + "\n")
                out.flush()
                found[candidate].append(triple)
                spent_s += triple.took_s
                yield triple


def _next(found: Mapping[str, Sequence[Triple]], *, left_s: float) -> str | None:
    """Of the candidates that are not done, the first of those with the fewest triples.

    One whose last triple took longer than `left_s` is left as it is; one without any always has its turn.
    """
    left = [
        name
        for name, triples in found.items()
        if not triples or (triples[-1].took_s <= left_s and not speed_numbers(triples).protocol_met)
    ]
    return min(left, key=lambda name: len(found[name]), default=None)


@dataclass(frozen=True)
class FixedWork:
    """What a triple of an audit's arms does: the same prompts, so many tokens each, wherever a text would end.

    All three sides run on the candidate's engine, each as a tenant of its own: no side finds another's KV, answers
    or corrections. As in the whole audit, drafts are not guarded.
    """

    runs: AuditRuns
    clock: Clock = time.perf_counter

    @property
    def num_tokens(self) -> int:
        """Of one answer."""
        return min(SPEED_TOKENS, self.runs.max_tokens)

    @property
    def key(self) -> str:
        """What a triple depends on besides candidate and number."""
        return hashlib.sha256(f"{self.runs.key}\0{self.num_tokens}".encode()).hexdigest()[:16]

    def triple(self, candidate: str, number: int) -> Triple:
        """Triple `number` of every candidate has the same prompts."""
        self.runs.engine(candidate)  # what building it takes is no part of the triple
        prompts = rotated(self.runs.prompts, self.runs.batch, number)
        started_s = self.clock()
        first_s, candidate_s, second_s = (
            self._side_s(candidate, arm, f"speed-{candidate}-{number}-{place}", prompts)
            for place, arm in enumerate((STRICT, candidate, STRICT))
        )
        return Triple(
            key=self.key,
            candidate=candidate,
            number=number,
            prompt_ids=tuple(prompt.id for prompt in prompts),
            num_tokens=len(prompts) * self.num_tokens,
            strict_s=(first_s, second_s),
            candidate_s=candidate_s,
            took_s=self.clock() - started_s,
        )

    def _side_s(self, candidate: str, arm: str, tenant: str, prompts: Sequence[Prompt]) -> float:
        built = self.runs.engine(candidate)
        requests = self.runs.requests(built, arm, tenant, prompts, max_tokens=self.num_tokens)
        return fixed_work_s(built.scheduler, [_endless(one, tenant) for one in requests], self.clock)


def speed_report(found: Sequence[Triple], triples: Triples, *, num_tokens: int) -> dict[str, Any]:
    """What the triples tell of each candidate, the raw ones, and what they were allowed and took."""
    numbers = {name: speed_numbers([one for one in found if one.candidate == name]) for name in triples.candidates}
    return {
        "tokens_per_prompt": num_tokens,
        "minutes_allowed": triples.minutes,
        "minutes_taken": round(sum(triple.took_s for triple in found) / 60.0, 2),
        "candidates": {name: asdict(one) for name, one in numbers.items()},
        "triples": [triple.model_dump(mode="json", exclude={"key"}) for triple in found],
    }


def rotated(prompts: Sequence[Prompt], size: int, number: int) -> list[Prompt]:
    """The window `number` of at most `size` different prompts; the last is followed by the first."""
    size = min(size, len(prompts))
    return [prompts[(number * size + place) % len(prompts)] for place in range(size)]


def fixed_work_s(scheduler: Scheduler, requests: Sequence[GenerationRequest], clock: Clock) -> float:
    """Seconds in which `requests` get all their `max_tokens`; their prompts are read beforehand.

    Raises DrafthouseError where one of them fails, or ends sooner.
    """
    read_ahead(scheduler, requests)
    started_s = clock()
    done = list(complete(scheduler, requests))
    seconds = clock() - started_s
    wanted = sum(request.limits.max_tokens for request in requests)
    if (emitted := sum(len(one.output_ids) for one in done)) != wanted:
        raise DrafthouseError(f"a speed triple must emit {wanted} tokens, got {emitted}")
    return seconds


def read_ahead(scheduler: Scheduler, requests: Sequence[GenerationRequest]) -> None:
    """Let all roles read the prompts, and keep nothing of it but their KV: what is cancelled is not remembered."""
    told: list[Chunk] = []
    enough = {}
    for request in requests:
        max_draft = 1 if request.max_draft is None else min(1, request.max_draft)
        ahead = replace(request, request_id=f"{request.request_id} ahead", max_draft=max_draft)
        enough[ahead.request_id] = request.limits.max_tokens - _LEFT_UNREAD
        scheduler.submit(ahead, told.append)
    while scheduler.has_work:
        scheduler.step()
        heard, told[:] = list(told), []
        for chunk in heard:
            if chunk.error is not None:
                raise DrafthouseError(f"request {chunk.request_id} failed: {chunk.error}")
            if chunk.receipt.emitted >= enough[chunk.request_id]:
                scheduler.cancel(chunk.request_id)


def _endless(request: GenerationRequest, tenant: str) -> GenerationRequest:
    """The same request for `tenant`, which no stop ends; the rule still knows stops for what they are."""
    limits = replace(request.limits, min_tokens=request.limits.max_tokens)
    return replace(request, limits=limits, salt=tenant, wants_tiers=False)
