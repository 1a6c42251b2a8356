"""The ledger and the memory through the loop: charged for what is emitted, once, and carried by the request."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config_rules import AsdCsdRule, AsdRule, CsdRule, RuleConfig
from serving.decode.offline import complete
from serving.decode.round import settle
from serving.decode.text import TextStream
from serving.memory.correction import PairCounts
from serving.memory.growing import name_of
from serving.memory.online import OnlineMemory
from serving.protocols import Proposal, ScoreRequest
from serving.requests import Chunk, Sampling
from serving.rules.book import RuleBook
from serving.session import Session
from serving.types import Draft, ExceptionRecord, Ledger, ScoreTable, Verdict, as_ids
from serving.verifiers.full import FullVerifier
from tests.decode.scripted import NextToken, ScriptedModel, arithmetic, make_scheduler, oracle, request, spell

OFTEN = PairCounts.of({(token + 1, token): 9 for token in range(100)})


@dataclass
class NearModel(ScriptedModel):
    """`next_token` is the argmax; the drafted token trails it by `regret` nats wherever it differs."""

    regret: float = 0.25

    def _score(self, request: ScoreRequest) -> ScoreTable | None:
        table = super()._score(request)
        if table is None:
            return None
        gap = np.where(table.mismatch, np.float32(self.regret), np.float32(0.0)).astype(np.float32)
        return replace(table, draft_logits=table.draft_logits - gap)


def run(
    rule: RuleConfig,
    *,
    right: int = 1,
    regret: float = 0.25,
    name: str = "a",
    book: RuleBook | None = None,
    next_token: NextToken = arithmetic,
    **fields,
) -> list[Chunk]:
    """One request whose drafts are right for `right` tokens, then one off."""
    scheduler = make_scheduler(
        NearModel(next_token, regret=regret),
        oracle(next_token, right=right),
        max_draft=4,
        rules=book or RuleBook(rule, profile_hash="p", frozen=OFTEN),
    )
    chunks: list[Chunk] = []
    list(
        complete(scheduler, [replace(request(name, max_tokens=20), wants_tiers=True, **fields)], on_chunk=chunks.append)
    )
    return chunks


RULES = (AsdRule(budget=1.0, gate=1.0), CsdRule(), AsdCsdRule(budget=1.0, gate=1.0))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_receipts_and_chunks_agree_on_every_exception(rule: RuleConfig) -> None:
    chunks = run(rule)
    ids = [token for chunk in chunks for token in chunk.ids]
    exceptions = [exception for chunk in chunks for exception in chunk.exceptions]
    tiers = [tier for chunk in chunks for tier in chunk.tiers]
    receipt, ledger = chunks[-1].receipt, chunks[-1].ledger
    assert exceptions
    assert len(tiers) == len(ids) == receipt.emitted
    assert [place for place, tier in enumerate(tiers) if tier == "exception"] == [e.index for e in exceptions]
    for exception in exceptions:
        assert ids[exception.index] == exception.draft_id != exception.target_id
        assert arithmetic([5, 9, *ids[: exception.index]]) == exception.target_id
        assert (exception.count >= 9) == (rule.kind != "asd")
    assert (receipt.num_exceptions, receipt.rescues) == (len(exceptions), 0 if rule.kind == "asd" else len(exceptions))
    assert receipt.regret_spent == ledger.regret_spent == sum(e.regret for e in exceptions)
    assert (receipt.lossless, receipt.profile) == (False, "p")


def test_the_budget_ends_exceptions_for_good_and_the_receipt_says_where() -> None:
    receipt = run(AsdRule(budget=1.0, gate=1.0, max_exceptions=4))[-1].receipt
    assert (receipt.regret_spent, receipt.num_exceptions, receipt.regret_left) == (1.0, 4, 0.0)
    assert receipt.exhausted_at is not None
    assert run(AsdRule(budget=64.0, gate=1.0))[-1].receipt.exhausted_at is None


def test_csd_has_no_bound_on_the_sum_and_says_so() -> None:
    receipt = run(CsdRule())[-1].receipt
    assert (receipt.budget, receipt.regret_left) == (None, None)
    assert "their sum no bound; uncertified" in receipt.reason
    assert receipt.memory == OFTEN.fingerprint


def cyclic(ids: Sequence[int]) -> int:
    """A text whose pairs come again and again."""
    return 3 + len(ids) % 3


def halves(rule: RuleConfig, book: RuleBook, *, lost_after: int) -> tuple[list[Chunk], list[Chunk]]:
    """One request whose replica is out of reach after at least one chunk: what it delivered, and its successor."""
    whole = run(rule, book=book, next_token=cyclic, name="a")
    kept = whole[: min(lost_after, len(whole) - 1)]
    resumed = run(
        rule,
        book=book,
        next_token=cyclic,
        name="a~1",
        resume_ids=np.array([token for chunk in kept for token in chunk.ids], dtype=np.int32),
        resume_seen=tuple(pair for chunk in kept for pair in chunk.seen),
        ledger=kept[-1].ledger,
        receipt=kept[-1].receipt,
    )
    return kept, resumed


LEARNING = (
    AsdRule(budget=1.0, gate=1.0),
    CsdRule(count_above=0.0),
    AsdCsdRule(budget=1.0, gate=1.0, count_above=0.0),
)


@given(st.integers(1, 12), st.sampled_from(LEARNING))
def test_a_resumed_request_goes_on_with_its_ledger_and_its_divergences(lost_after: int, rule: RuleConfig) -> None:
    kept, resumed = halves(rule, RuleBook(rule), lost_after=lost_after)
    assert len([token for chunk in [*kept, *resumed] for token in chunk.ids]) == 20
    receipt = resumed[-1].receipt
    regrets = [e.regret for chunk in [*kept, *resumed] for e in chunk.exceptions]
    assert receipt.regret_spent == sum(regrets) <= (1.0 if rule.kind != "csd" else 99.0)
    assert receipt.num_exceptions == len(regrets)
    met: Counter[tuple[int, int]] = Counter()
    for chunk in [*kept, *resumed]:
        for one in chunk.exceptions:
            assert one.count == (0 if rule.kind == "asd" else met[one.draft_id, one.target_id])
        met.update(chunk.seen)


def test_a_resumed_request_is_rescued_by_what_it_met_before() -> None:
    rule = CsdRule(count_above=0.0)
    kept, resumed = halves(rule, RuleBook(rule), lost_after=4)
    before = {pair for chunk in kept for pair in chunk.seen}
    first = next(chunk for chunk in resumed if chunk.seen)
    assert first.exceptions
    assert {(one.draft_id, one.target_id) for one in first.exceptions} <= before


def test_what_a_request_met_before_it_was_resumed_is_added_once() -> None:
    """The replica that is out of reach hears of its client's leaving, and adds what it met there."""
    online = OnlineMemory(max_pairs=64)
    book = RuleBook(CsdRule(count_above=1e6), online=online)
    lost, successor = request("a"), replace(request("a~1"), resume_seen=((4, 3), (5, 4)))
    left = book.open(lost).rule
    for pair in successor.resume_seen:
        left.learn(Verdict(0, pair[1], ("recovered",), rejected=ExceptionRecord(0, *pair, 0.5)))
    book.open(successor)
    for one in (lost, successor):
        book.close(one.request_id)
    assert online.snapshot("") == PairCounts.of({(4, 3): 1, (5, 4): 1})


def test_a_resumed_request_that_is_cancelled_while_it_waits_says_what_it_has_spent() -> None:
    scheduler = make_scheduler(NearModel(arithmetic), oracle(arithmetic), rules=RuleBook(RULES[0]))
    chunks: list[Chunk] = []
    scheduler.submit(replace(request("a~1"), ledger=Ledger(0.5, 2)), chunks.append)
    scheduler.cancel("a~1")
    assert [(chunk.ledger, chunk.finish_reason) for chunk in chunks] == [(Ledger(0.5, 2), "cancelled")]


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_proposal_that_is_settled_twice_is_emitted_and_charged_once(max_tokens: int) -> None:
    terms = RuleBook(AsdRule(budget=1.0, gate=1.0)).open(asked := request("a", max_tokens=max_tokens))
    session = Session.admit(replace(asked, receipt=terms.receipt), terms.rule, max_draft=4)
    model = NearModel(arithmetic)
    verifier = FullVerifier(model)
    verifier.open(session)
    proposal = Proposal(session, Draft(as_ids([arithmetic([5, 9]) + 1]), "model"))
    (verified,) = verifier.verify([proposal])
    assert verified is not None
    text = TextStream(spell)
    first = settle(proposal, verified, text, degraded=False)
    assert (len(first.emitted.exceptions), session.ledger.regret_spent) == (1, 0.25)
    tokens, ledger, receipt = session.tokens.tolist(), session.ledger, session.receipt
    again = settle(proposal, verified, text, degraded=False)
    assert again.chunk == Chunk("a", (), "", receipt, ledger)
    assert (again.num_accepted, again.num_gained, again.emitted.tiers) == (0, 0, ())
    assert (session.tokens.tolist(), session.ledger, session.receipt) == (tokens, ledger, receipt)
    assert text.finish() == ""


def test_a_stop_within_a_block_is_charged_for_nothing_behind_it() -> None:
    scheduler = make_scheduler(
        NearModel(arithmetic),
        oracle(arithmetic, right=0),
        max_draft=4,
        rules=RuleBook(AsdRule(budget=8.0, gate=1.0, max_exceptions=4)),
    )
    (done,) = complete(scheduler, [request("a", max_tokens=3)])
    assert len(done.output_ids) == 3
    assert done.receipt.num_exceptions == len(done.exceptions) == sum(e.index < 3 for e in done.exceptions)
    assert done.receipt.regret_spent == 0.25 * len(done.exceptions)


def learned(book: RuleBook, name: str, salt: str) -> int:
    run(CsdRule(), right=1, name=name, book=book, salt=salt)
    assert book.online is not None
    return len(book.online.snapshot(salt))


def test_an_online_memory_hears_of_a_request_when_it_ends_and_serves_its_tenant_only() -> None:
    book = RuleBook(CsdRule(count_above=0.0), online=OnlineMemory(max_pairs=64))
    assert learned(book, "a", "tenant") > 0
    assert book.online is not None
    met = book.online.snapshot("tenant")
    first = run(CsdRule(), name="b", book=book, salt="other")[-1].receipt
    second = run(CsdRule(), name="c", book=book, salt="tenant")[-1].receipt
    assert second.rescues > first.rescues
    assert first.memory == "empty+empty"
    assert second.memory == f"empty+{name_of(met.seen)}"
    assert name_of(met.seen) != name_of(book.online.snapshot("tenant").seen)  # by now it has met more


def test_a_frozen_memory_does_not_learn_from_one_request_to_the_next() -> None:
    book = RuleBook(CsdRule(count_above=0.0))
    receipts = [run(CsdRule(), name=name, book=book)[-1].receipt for name in "ab"]
    assert receipts[0] == receipts[1]


@pytest.mark.parametrize(("regret", "temperature"), [(0.25, 0.7), (float("inf"), 0.0)])
def test_samples_and_the_impossible_are_no_part_of_the_histogram(regret: float, temperature: float) -> None:
    """Calibration leaves them out, so they would look like drift."""
    scheduler = make_scheduler(NearModel(arithmetic, regret=regret), oracle(arithmetic, right=1), max_draft=4)
    list(complete(scheduler, [replace(request("a"), sampling=Sampling(temperature))]))
    assert scheduler.stats.replaced > 0
    assert sum(scheduler.stats.first_mismatches) == 0


def test_stats_count_mismatches_by_what_strict_would_have_done() -> None:
    def stats_of(rule: RuleConfig):
        scheduler = make_scheduler(
            NearModel(arithmetic), oracle(arithmetic, right=1), max_draft=4, rules=RuleBook(rule)
        )
        list(complete(scheduler, [request("a", max_tokens=20)]))
        return scheduler.stats

    lossy, exact = stats_of(AsdRule(budget=1.0, gate=1.0)), stats_of(AsdRule(budget=0.0))
    assert exact.exceptions == 0
    assert sum(exact.first_mismatches) == exact.first_mismatches[4] > 0
    assert (lossy.exceptions, lossy.regret_spent, lossy.exhausted > 0) == (4, 1.0, True)
    assert lossy.first_mismatches[4] > 0
