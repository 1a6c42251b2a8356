"""The engine of a profile in this process, which takes turns with a running application on the same prompts."""

import time
from collections.abc import Sequence
from itertools import count

from jobs.arms import ChunkClock, Work
from serving.build import Built
from serving.decode.offline import complete
from serving.requests import GenerationRequest, Limits


class Beside:
    """Runs prompts of `work` by their indices; a number at or behind their end begins another cycle through them.

    Each cycle of each turn has a memory of its own, as an application's have by their cache salts.
    """

    def __init__(self, built: Built, work: Work) -> None:
        self._built = built
        self._work = work
        self._turns = count()

    def tpot_ms(self, numbers: Sequence[int], concurrency: int) -> list[float | None]:
        """Time per output token of each, `concurrency` at once; None for an answer of less than two tokens."""
        turn, clock = next(self._turns), ChunkClock(time.perf_counter())
        requests = (self._request(number, turn) for number in numbers)
        done = complete(self._built.scheduler, requests, in_flight=concurrency, on_chunk=clock.note)
        return [clock.timing(one.request_id, len(one.output_ids)).tpot_ms for one in done]

    def _request(self, number: int, turn: int) -> GenerationRequest:
        cycle, index = divmod(number, len(self._work.prompts))
        return GenerationRequest(
            f"{turn}-{number}",
            self._work.prompts[index],
            Limits(self._work.max_tokens, self._work.stop_ids),
            self._work.sampling(index),
            salt=f"{turn}-{cycle}",
        )
