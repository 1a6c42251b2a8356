"""An output under the target once more: likelihood, and whether its receipt tells the truth. One pass an output."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.protocols import ScoreRequest, ScoringModel
from serving.requests import Receipt, SlimReceipt
from serving.types import ExceptionRecord, Ids, Ledger, ScoreTable, Tier

# Regret is a difference of float32 logits of some tens; kernels that sum in another order differ by less.
REGRET_TOLERANCE = 1e-3
_SLIM: tuple[Tier, ...] = ("slim", "regenerated")


@dataclass(frozen=True)
class Scored:
    """One output: the table of its rows, one a token, and its log likelihood in nats given the prompt."""

    table: ScoreTable
    log_likelihood: float

    @property
    def num_tokens(self) -> int:
        return len(self.table.draft_ids)


def score_output(model: ScoringModel, prompt_ids: Ids, output_ids: Ids) -> Scored:
    """A fresh forward over prompt and output; every output token is judged as if it had been drafted."""
    session_id = "score-output"
    ids = np.concatenate([prompt_ids, output_ids]).astype(np.int32)
    request = ScoreRequest(session_id, ids, num_rows=len(output_ids) + 1, prompt_len=len(prompt_ids), num_logprobs=0)
    model.open(session_id, ids[:0])
    try:
        table = None
        while table is None:  # long prompts are fed in chunks
            (table,) = model.score([request])
    finally:
        model.close(session_id)
    assert table.logprobs is not None, "it was asked for"
    return Scored(table, float(table.logprobs.draft.astype(np.float64).sum()))


def discrepancies(table: ScoreTable, exceptions: Sequence[ExceptionRecord], tiers: Sequence[Tier] = ()) -> list[str]:
    """Where an output and its receipt disagree with the target: each token is its argmax, or a recorded exception.

    `exceptions` go by their place in the output; the recorded target token and regret must be the target's too. Tokens
    that a slim verifier decided, by `tiers` (one a token; none: no such token), may be any: see `false_slim`.
    """
    recorded = {exception.index: exception for exception in exceptions}
    excused = {*recorded, *_slim_places(tiers)}
    found = np.flatnonzero(table.mismatch).tolist()
    problems = [f"token {place}: not the target's, and no exception" for place in found if place not in excused]
    for place, exception in recorded.items():
        regret, target_id = float(table.regret[place]), int(table.next_ids[place])
        if int(table.draft_ids[place]) != exception.draft_id or target_id != exception.target_id:
            problems.append(f"token {place}: recorded as {exception.draft_id} for {exception.target_id}, is not that")
        elif abs(regret - exception.regret) > REGRET_TOLERANCE:
            problems.append(f"token {place}: recorded regret {exception.regret:.5f}, found {regret:.5f}")
    return problems


def false_totals(receipt: Receipt, exceptions: Sequence[ExceptionRecord]) -> list[str]:
    """Where the totals of a receipt are not those of the `exceptions` that it came with, all of the request's.

    Regret is compared to the last bit: both sums add the same numbers in the same order.
    """
    listed = Ledger().charge(exceptions)
    totals = (
        ("regret_spent", receipt.regret_spent, listed.regret_spent),
        ("num_exceptions", receipt.num_exceptions, listed.num_exceptions),
        ("rescues", receipt.rescues, sum(one.count > 0 for one in exceptions)),
    )
    problems = [f"receipt: {name} is {told}, its exceptions make {due}" for name, told, due in totals if told != due]
    if receipt.budget is not None and listed.regret_spent > receipt.budget:
        problems.append(f"receipt: budget is {receipt.budget:g}, its exceptions cost {listed.regret_spent:g}")
    return problems


def false_slim(table: ScoreTable, told: SlimReceipt | None, tiers: Sequence[Tier]) -> list[str]:
    """Where what a receipt says of a slim verifier is not what `tiers`, one a token, and the target's rows make of it.

    The target has seen every token that a slim verifier decided but the last `unseen` ones.
    """
    slim, decided = told or SlimReceipt(), _slim_places(tiers)
    counts = (
        ("accepted", slim.accepted, tiers.count("slim")),
        ("regenerated", slim.regenerated, tiers.count("regenerated")),
    )
    problems = [f"receipt: slim.{name} is {count}, its tiers make {due}" for name, count, due in counts if count != due]
    if slim.audited + slim.unseen != len(decided):
        problems.append(
            f"receipt: slim.audited and slim.unseen make {slim.audited + slim.unseen}, of {len(decided)} that the slim "
            "verifier decided"
        )
        return problems
    regret = float(table.regret[np.asarray(decided[: slim.audited], dtype=np.intp)].sum())
    if not math.isclose(slim.audit_regret, regret, rel_tol=0.0, abs_tol=REGRET_TOLERANCE * max(1, slim.audited)):
        problems.append(f"receipt: slim.audit_regret is {slim.audit_regret:.5f}, found {regret:.5f}")
    return problems


def _slim_places(tiers: Sequence[Tier]) -> list[int]:
    """Of the tokens that a slim verifier decided, in order."""
    return [place for place, tier in enumerate(tiers) if tier in _SLIM]
