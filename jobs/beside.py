"""The engine of a profile in this process, which takes turns with a running application on the same prompts."""

from collections.abc import Sequence

from jobs.arms import ChunkClock, Work
from serving.build import Built
from serving.decode.offline import complete
from serving.requests import GenerationRequest, Limits


class Beside:
    """Runs prompts of `work` by their indices; a number at or behind their end begins another cycle through them.

    Each cycle of each level has a memory of its own, as an application's have by their cache salts. `max_draft` bounds
    drafts as a request over HTTP does.
    """

    def __init__(self, built: Built, work: Work, *, max_draft: int | None = None) -> None:
        self._built = built
        self._work = work
        self._max_draft = max_draft

    def tpot_ms(self, level: int, numbers: Sequence[int], concurrency: int) -> list[float | None]:
        """Time per output token of each, `concurrency` at once; None for an answer of less than two tokens."""
        clock = ChunkClock()
        requests = (self._request(level, number) for number in numbers)
        done = complete(self._built.scheduler, requests, in_flight=concurrency, on_chunk=clock.note)
        return [clock.timing(one.request_id, len(one.output_ids)).tpot_ms for one in done]

    def _request(self, level: int, number: int) -> GenerationRequest:
        cycle, index = divmod(number, len(self._work.prompts))
        return GenerationRequest(
            f"{level}-{number}",
            self._work.prompts[index],
            Limits(self._work.max_tokens, self._work.stop_ids),
            self._work.sampling(index),
            max_draft=self._max_draft,
            salt=f"{level}-{cycle}",
        )
