"""From deliveries to choices on the wire, streamed or whole; an endpoint's framing knows only its shapes."""

from collections.abc import Sequence
from typing import Protocol

from serving.api.backend import Speller
from serving.api.delivery import Delivery, Delta
from serving.api.receipts import receipt_of
from serving.api.responses import Frame, Usage, Whole
from serving.api.tally import Tally


class Framing(Protocol):
    """How one endpoint dresses what was delivered."""

    @property
    def speller(self) -> Speller: ...

    def opening(self, index: int) -> Sequence[Frame]:
        """What comes before the first text of a choice."""
        ...

    def delta(self, delta: Delta) -> Frame: ...

    def closing(self, delta: Delta) -> Frame:
        """The chunk with a choice's finish reason, and nothing else."""
        ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Whole:
        """The answer in one piece, from what its choices were given in all."""
        ...


def streamed(framing: Framing, delivery: Delivery) -> list[Frame]:
    """What the client has not had of a choice: none for a round whose text is undecided, the receipt at its end."""
    delta = delivery.take()
    frames = [framing.delta(delta)] if delta else []
    if delta.finish_reason is not None:
        frames.append(framing.closing(delta).model_copy(update={"speculation": receipt_of(delivery, framing.speller)}))
    return frames


def usage_frame(framing: Framing, tally: Tally) -> Frame:
    """The last chunk of a stream that asked for usage: no choices, and the usage of all of them."""
    empty = Delta(0, "", None, None)
    return framing.delta(empty).model_copy(update={"choices": [], "usage": tally.usage})


def whole(framing: Framing, tally: Tally) -> Whole:
    """The answer with its receipt, or where it has several choices with one on each."""
    answer = framing.whole([delivery.take() for delivery in tally.deliveries], tally.usage)
    receipts = [receipt_of(delivery, framing.speller) for delivery in tally.deliveries]
    if len(receipts) == 1:
        return answer.model_copy(update={"speculation": receipts[0]})
    pairs = zip(answer.choices, receipts, strict=True)
    choices = [choice.model_copy(update={"speculation": receipt}) for choice, receipt in pairs]
    return answer.model_copy(update={"choices": choices})
