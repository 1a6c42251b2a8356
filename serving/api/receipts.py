"""From what a choice was given to its receipt on the wire."""

from serving.api.backend import Speller
from serving.api.delivery import Delivery
from serving.api.responses import ExceptionEntry, SpeculationReceipt
from serving.requests import Receipt
from serving.types import ExceptionRecord


def receipt_of(delivery: Delivery, speller: Speller) -> SpeculationReceipt:
    """Of a lossy answer with every exception; with the tier of every token where the request asked for it."""
    receipt = delivery.receipt or Receipt()
    fields = receipt.shown
    if not receipt.lossless:
        fields["exceptions"] = [_entry(exception, speller) for exception in delivery.exceptions]
    if delivery.wants_tiers:
        fields["tiers"] = delivery.tiers
    return SpeculationReceipt(**fields)


def _entry(exception: ExceptionRecord, speller: Speller) -> ExceptionEntry:
    return ExceptionEntry(
        position=exception.index,
        draft_token=speller.token_text(exception.draft_id),
        draft_id=exception.draft_id,
        target_token=speller.token_text(exception.target_id),
        target_id=exception.target_id,
        regret=exception.regret,
        count=exception.count,
    )
