"""Three tiers over two tiny models in the real loop: what is decided by whom, and what the target sees of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.config_rules import AsdRule, CsdRule, RuleConfig, StrictRule
from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.offline import Completion, complete
from serving.decode.scheduler import Scheduler
from serving.drafters.model import ModelDrafter
from serving.drafters.suffix import SuffixDrafter
from serving.errors import RequestError
from serving.memory.suffix import SuffixCache
from serving.models.eagle3_lm import Eagle3LM
from serving.models.eagle3_runner import TorchEagle3, kv_shape
from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVStore
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.models.slim import slim_in_place
from serving.protocols import Drafter, DraftRequest, ScoreRequest, Verifier
from serving.requests import GenerationRequest, Limits, Sampling, Tightening
from serving.rules.book import RuleBook
from serving.rules.via import ViaGates
from serving.types import Ids, ScoreTable, as_ids
from serving.verifiers.full import FullVerifier
from serving.verifiers.via import ViaVerifier
from tests.decode.scripted import ScriptedDrafter, spell
from tests.models.eagle_heads import HIDDEN, TARGET_HIDDEN, tiny_head
from tests.models.test_packed_lm import CAPACITY, make_lm, random_ids
from tests.models.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

DEEP, KEPT, ALL = 4, (0, 1, 3), (0, 1, 2, 3)
ALWAYS = ViaGates(theta_accept=1.5, theta_escalate=1.5)
LAX = ViaGates(theta_accept=0.02, theta_escalate=0.01, min_confidence=0.0)
K = 5


@dataclass
class Watched:
    """A model whose requests are noted, and whose caches are compared with what is committed."""

    model: PackedLM
    requests: list[list[ScoreRequest]] = field(default_factory=list)
    is_lost: bool = False

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        return self.model.open(session_id, ids, salt=salt)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        self.requests.append(list(requests))
        return [None] * len(requests) if self.is_lost else self.model.score(requests)

    def rollback(self, session_id: str, length: int) -> None:
        self.model.rollback(session_id, length)

    def close(self, session_id: str) -> None:
        self.model.close(session_id)


class Bench:
    """One target, one slim verifier in place, and a drafter that mixes right guesses with wrong ones."""

    def __init__(
        self,
        gates: ViaGates | None,
        *,
        kept: tuple[int, ...] = KEPT,
        drafter: Drafter | None = None,
        rule: RuleConfig | None = None,
        target: PackedLM | None = None,
    ) -> None:
        target = target or make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))
        self.full, self.slim = Watched(target), Watched(slim_in_place(target, kept))
        self.verifier: Verifier = FullVerifier(self.full)
        if gates is not None:
            self.verifier = ViaVerifier(
                slim=self.slim, full=self.full, gates=gates, is_degraded=lambda: self.slim.is_lost
            )
        self.scheduler = Scheduler(
            verifier=self.verifier,
            drafter=drafter or mixed(),
            decode=spell,
            limits=SchedulerLimits(4, 150, 64, K, greedy_only="verifier 'via'" if gates else None),
            grouping=Grouping(shares_cores=True),
            policy=FixedDrafts(K),
            rules=RuleBook(rule or StrictRule()),
        )

    def run(self, *requests: GenerationRequest) -> list[Completion]:
        done = {one.request_id: one for one in complete(self.scheduler, requests)}
        return [done[request.request_id] for request in requests]


def mixed() -> ScriptedDrafter:
    """What the same target would say, with a wrong token now and then: a function of the text alone."""
    helper = make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))

    def guess(request: DraftRequest) -> list[int]:
        ids, draft = request.ids, []
        for place in range(request.max_draft):
            token = int(helper.all_logits(ids)[-1].argmax())
            token = (token + 1) % 199 if (len(request.ids) + place) % 4 == 3 else token
            draft.append(token)
            ids = np.append(ids, as_ids([token]))
        return draft

    return ScriptedDrafter(guess)


def asked(name: str = "a", *, max_tokens: int = 40, seed: int = 1, **fields: object) -> GenerationRequest:
    return replace(GenerationRequest(name, random_ids(12, seed), Limits(max_tokens)), **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    requests = [asked(str(seed), seed=seed) for seed in range(3)]
    return [done.output_ids for done in Bench(None).run(*requests)]


@pytest.mark.parametrize(
    ("gates", "kept"),
    [
        (ALWAYS, KEPT),
        (ViaGates(theta_accept=1.0, theta_escalate=1.0), ALL),
        (ViaGates(theta_accept=1.0, theta_escalate=1.0, has_bonus=True), ALL),
        (ViaGates(max_unverified=0), KEPT),
    ],
)
def test_what_cannot_change_a_token_is_strict_and_plain(
    gates: ViaGates, kept: tuple[int, ...], plain: list[list[int]]
) -> None:
    for batch in (1, 3):
        bench = Bench(gates, kept=kept)
        requests = [asked(str(seed), seed=seed) for seed in range(3)]
        done = bench.run(*requests) if batch == 3 else [bench.run(request)[0] for request in requests]
        assert [one.output_ids for one in done] == plain


def test_always_escalating_says_lossless_and_counts_its_passes(plain: list[list[int]]) -> None:
    bench = Bench(ALWAYS)
    (done,) = bench.run(asked("0", seed=0))
    receipt = done.receipt
    assert receipt.slim is not None
    assert (receipt.lossless, receipt.slim.accepted, receipt.slim.regenerated) == (True, 0, 0)
    assert receipt.target_passes == receipt.rounds
    assert 0 < receipt.slim.passes < receipt.rounds  # the first round and the last have no draft
    assert receipt.accepted > 0
    assert 0 < receipt.replaced < receipt.drafted
    assert receipt.rejection_rate == receipt.replaced / receipt.drafted


def test_lax_gates_save_full_passes_and_the_receipt_owns_up() -> None:
    bench = Bench(LAX)
    (done,) = bench.run(asked())
    receipt, stats = done.receipt, bench.scheduler.stats
    slim = receipt.slim
    assert slim is not None
    assert (receipt.lossless, "audit" in receipt.reason) == (False, True)
    assert receipt.target_passes < receipt.rounds
    assert receipt.target_passes == len(bench.full.requests) == stats.target_passes
    assert slim.passes == len(bench.slim.requests) == stats.slim_passes
    decided = slim.accepted + slim.regenerated
    assert decided == slim.audited + slim.unseen <= receipt.emitted
    assert (stats.slim_accepted, stats.regenerated, stats.audited) == (slim.accepted, slim.regenerated, slim.audited)
    assert slim.audit_regret == pytest.approx(stats.audit_regret)


@pytest.mark.parametrize("limit", [1, 4, 7, 32])
def test_at_most_so_many_tokens_are_unseen_and_every_round_progresses(limit: int) -> None:
    bench = Bench(replace(LAX, max_unverified=limit, has_bonus=True))
    chunks = []
    bench.scheduler.submit(asked(), chunks.append)
    while bench.scheduler.has_work:
        before = len(bench.full.requests), len(bench.slim.requests)
        bench.scheduler.step()
        assert len(bench.full.requests) - before[0] <= 1
        assert len(bench.slim.requests) - before[1] <= 1
    assert all(len(chunk.ids) >= 1 for chunk in chunks)
    unseen = [chunk.receipt.slim.unseen for chunk in chunks if chunk.receipt.slim is not None]
    assert all(count <= limit for count in unseen)
    assert limit <= K or max(unseen) > 0


def test_the_target_catches_up_in_one_chunk_with_the_rows_of_a_fresh_prefill() -> None:
    bench = Bench(LAX)
    bench.run(asked())
    fresh = make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))
    caught_up = [request for requests in bench.full.requests for request in requests if request.num_rows > K + 1]
    assert caught_up
    other = make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))
    other.open("a", caught_up[-1].ids)
    other.score([replace(caught_up[-1], ids=caught_up[-1].ids[: -caught_up[-1].num_rows], num_rows=1)])
    (table,) = other.score([caught_up[-1]])
    logits = fresh.all_logits(caught_up[-1].ids)[-caught_up[-1].num_rows :]
    assert table is not None
    np.testing.assert_array_equal(table.next_ids, logits.argmax(dim=-1))
    np.testing.assert_allclose(table.top_logits, logits.max(dim=-1).values, atol=1e-4)


def test_stops_are_the_targets_own() -> None:
    target = make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))
    num_stopped = 0
    for stop in Bench(LAX).run(asked())[0].output_ids[5:30:2]:
        (done,) = Bench(LAX).run(asked(limits=Limits(40, frozenset({stop}))))
        assert (done.finish_reason == "stop") == (stop in done.output_ids)
        if done.finish_reason == "stop":
            num_stopped += 1
            assert done.receipt.slim is None or done.receipt.slim.unseen == 0
            whole = np.concatenate([random_ids(12, 1), as_ids(done.output_ids)])
            assert int(target.all_logits(whole[:-1])[-1].argmax()) == stop
    assert num_stopped > 0


def test_audit_regret_is_what_a_fresh_pass_says_of_the_same_tokens() -> None:
    bench = Bench(LAX)
    (done,) = bench.run(asked())
    slim = done.receipt.slim
    assert slim is not None
    whole = np.concatenate([random_ids(12, 1), as_ids(done.output_ids)])
    target = make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))
    logits = target.all_logits(whole[:-1])[11:]
    regret = (logits.max(dim=-1).values - logits[range(len(done.output_ids)), done.output_ids]).numpy()
    seen = regret[: len(regret) - slim.unseen]
    assert slim.audit_regret == pytest.approx(float(seen.sum()), abs=1e-2)  # the target's own tokens have none


def test_log_probabilities_come_from_the_target_so_such_requests_are_plain(plain: list[list[int]]) -> None:
    bench = Bench(LAX)
    chunks = []
    (done,) = complete(bench.scheduler, [asked("0", seed=0, num_logprobs=2)], on_chunk=chunks.append)
    assert done.output_ids == plain[0]
    assert all(len(chunk.logprobs) == len(chunk.ids) for chunk in chunks if chunk.logprobs is not None)
    assert (bench.slim.requests, done.receipt.lossless) == ([], True)


def test_a_slim_verifier_out_of_reach_leaves_all_to_the_target(plain: list[list[int]]) -> None:
    bench = Bench(LAX)
    bench.slim.is_lost = True
    (done,) = bench.run(asked("0", seed=0))
    assert done.output_ids == plain[0]
    assert (done.receipt.degraded, done.receipt.lossless) == (True, True)


def test_a_suffix_drafter_fits_and_long_drafts_go_straight_to_the_target() -> None:
    cache = SuffixCache(max_depth=64, max_draft=16, factor=4.0, offset=4.0, min_prob=0.0, max_tokens=1000)
    bench = Bench(replace(LAX, max_unverified=3), drafter=SuffixDrafter(cache))
    repeating = np.tile(random_ids(4, 1), 5)
    (done,) = bench.run(replace(asked(max_tokens=100), prompt_ids=repeating))
    assert len(done.output_ids) == 100
    by_slim = {request.num_rows - 1 for requests in bench.slim.requests for request in requests}
    by_full = {request.num_rows - 1 for requests in bench.full.requests for request in requests}
    assert by_slim <= {1, 2, 3}
    assert max(by_full) > 3


def test_sampled_requests_are_refused_by_name() -> None:
    bench = Bench(LAX)
    with pytest.raises(RequestError, match=r"temperature: must be 0 with verifier 'via'.*got 0\.7"):
        bench.scheduler._limits.check(asked(sampling=Sampling(0.7)))
    bench.scheduler._limits.check(asked(sampling=Sampling(0.7), tightening=Tightening(is_strict=True)))


def test_nothing_is_left_of_a_session_that_has_ended() -> None:
    bench = Bench(LAX)
    bench.run(asked())
    assert bench.full.model.store.num_open == bench.slim.model.store.num_open == 0
    assert bench.verifier._seen == {}  # type: ignore[attr-defined]


def test_a_request_that_asks_for_strict_never_meets_the_slim_verifier(plain: list[list[int]]) -> None:
    bench = Bench(LAX)
    (done,) = bench.run(asked("0", seed=0, tightening=Tightening(is_strict=True)))
    assert (done.output_ids, bench.slim.requests, done.receipt.lossless) == (plain[0], [], True)


@pytest.mark.parametrize(
    "rule", [AsdRule(budget=30.0, gate=20.0), CsdRule(count_above=-1.0, min_ratio=0.0)], ids=["asd", "csd"]
)
def test_a_lossy_rule_acts_in_tier_c_and_pays_for_it_alone(rule: RuleConfig) -> None:
    """Tiers A and B are never charged; what tier C accepts is recorded at its place in the block."""
    bench = Bench(replace(LAX, theta_accept=0.2, theta_escalate=0.2), rule=rule)
    chunks = []
    (done,) = complete(bench.scheduler, [asked(max_tokens=100, wants_tiers=True)], on_chunk=chunks.append)
    exceptions = [one for chunk in chunks for one in chunk.exceptions]
    tiers = [tier for chunk in chunks for tier in chunk.tiers]
    assert {"slim", "exception"} <= set(tiers)
    assert [place for place, tier in enumerate(tiers) if tier == "exception"] == [one.index for one in exceptions]
    assert all(done.output_ids[one.index] == one.draft_id for one in exceptions)
    assert done.receipt.regret_spent == pytest.approx(sum(one.regret for one in exceptions))
    assert done.receipt.num_exceptions == len(exceptions) > 0
    assert not done.receipt.lossless


@pytest.mark.parametrize("rule", [AsdRule(budget=30.0, gate=20.0), AsdRule(budget=0.0)])
def test_always_escalating_is_the_full_rule_alone(rule: RuleConfig) -> None:
    alone, escalated = Bench(None, rule=rule), Bench(ALWAYS, rule=rule)
    (expected,), (done,) = alone.run(asked()), escalated.run(asked())
    assert (done.output_ids, done.receipt.regret_spent) == (expected.output_ids, expected.receipt.regret_spent)


@dataclass
class Narrow:
    """The features of `target` as far as a head that was made for a narrower one reads them."""

    target: PackedLM

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        return self.target.features(session_id, ids, start)[:, : 3 * TARGET_HIDDEN]


def eagle_bench(gates: ViaGates) -> Bench:
    decoder = HFDecoder(tiny_model("llama", num_hidden_layers=DEEP))
    store = KVStore(decoder.shapes, 4, CAPACITY, torch.float32, feature_layers=(1, 2, 3), hidden=64)
    target = PackedLM(decoder, store, head=HeadOptions(vocab_size=VOCAB), prefill_chunk=256)
    head = tiny_head()
    own = KVStore([kv_shape(head)], 4, CAPACITY, torch.float32)
    lm = Eagle3LM(
        TorchEagle3(head, max_length=CAPACITY), own, Narrow(target), target_ids=head.target_ids, hidden=HIDDEN,
        prefill_chunk=256,
    )  # fmt: skip
    return Bench(gates, drafter=ModelDrafter(lm, max_length=CAPACITY, source="eagle3"), target=target)


def test_an_eagle3_head_fits_and_drafts_on_its_own_outputs_between_full_passes(plain: list[list[int]]) -> None:
    (done,) = eagle_bench(ALWAYS).run(asked("0", seed=0))
    assert (done.output_ids, done.receipt.drafted > 0) == (plain[0], True)
    lax = eagle_bench(ViaGates(theta_accept=1e-9, theta_escalate=1e-9, min_confidence=0.0))
    (other,) = lax.run(asked("0", seed=0))
    assert other.receipt.slim is not None
    assert other.receipt.target_passes < other.receipt.rounds - 2  # and each round but the first and last has a draft
    assert other.receipt.drafts_empty <= 2
