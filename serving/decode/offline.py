"""A whole batch to its end, in the caller's thread: for jobs, benchmarks and tests."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from serving.decode.scheduler import Scheduler
from serving.errors import DrafthouseError
from serving.requests import Chunk, GenerationRequest, Receipt
from serving.types import ExceptionRecord, FinishReason, Tier


@dataclass
class Completion:
    """One finished request."""

    request_id: str
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    receipt: Receipt = field(default_factory=Receipt)
    exceptions: list[ExceptionRecord] = field(default_factory=list)
    tiers: list[Tier] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Append one chunk of this request."""
        if chunk.error is not None:
            raise DrafthouseError(f"request {chunk.request_id} failed: {chunk.error}")
        self.output_ids.extend(chunk.ids)
        self.text += chunk.text
        self.exceptions.extend(chunk.exceptions)
        self.tiers.extend(chunk.tiers)
        self.receipt = chunk.receipt
        self.finish_reason = chunk.finish_reason


def complete(
    scheduler: Scheduler,
    requests: Iterable[GenerationRequest],
    *,
    in_flight: int = 64,
    on_chunk: Callable[[Chunk], None] | None = None,
) -> Iterator[Completion]:
    """Run `requests` and yield each as it ends; pulls at most `in_flight` of them ahead. Errors raise."""
    for done in rounds(scheduler, requests, in_flight=in_flight, on_chunk=on_chunk):
        yield from done


def rounds(
    scheduler: Scheduler,
    requests: Iterable[GenerationRequest],
    *,
    in_flight: int = 64,
    on_chunk: Callable[[Chunk], None] | None = None,
) -> Iterator[list[Completion]]:
    """As `complete`, a step at a time: yields the requests that ended in it, most often none."""
    source = iter(requests)
    open_completions: dict[str, Completion] = {}
    done: list[Completion] = []

    def sink(chunk: Chunk) -> None:
        completion = open_completions[chunk.request_id]
        completion.add(chunk)
        if on_chunk is not None:
            on_chunk(chunk)
        if chunk.finish_reason is not None:
            done.append(open_completions.pop(chunk.request_id))

    is_exhausted = False
    while True:
        while not is_exhausted and len(open_completions) < in_flight:
            request = next(source, None)
            if request is None:
                is_exhausted = True
                break
            open_completions[request.request_id] = Completion(request.request_id)
            scheduler.submit(request, sink)
        if not open_completions:
            return
        scheduler.step()
        yield list(done)
        done.clear()
