"""Replicas' online memories through one hub: they agree, and no lost or doubled message spoils a count."""

import asyncio
import logging
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayError

from serving.config import PROFILES_DIR, load_profile
from serving.deploy.correction_actor import CorrectionLink
from serving.deploy.corrections import CorrectionHub, CorrectionSync, Exchange, PackedCounts, Totals
from serving.deploy.messages import MAX_MESSAGE_BYTES
from serving.memory.correction import PairCounts
from serving.memory.correction_file import load_all, save_counts
from serving.memory.online import OnlineMemory, tenant_of

deltas = st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.integers(1, 4), min_size=1, max_size=4)


class LostError(Exception):
    """A message, or its answer, did not arrive."""


class Line:
    """The hub through a line that loses calls before or after they arrive, as scripted; every message is weighed."""

    def __init__(self, hub: CorrectionHub, losses: list[str] | None = None) -> None:
        self.hub = hub
        self.losses = losses or []
        self.largest = 0

    async def __call__(self, call: Exchange) -> Totals:
        loss = self.losses.pop(0) if self.losses else ""
        if loss == "before":
            raise LostError
        answer = self.hub.exchange(pickle.loads(pickle.dumps(call)))
        self.largest = max(self.largest, len(pickle.dumps(call)), len(pickle.dumps(answer)))
        if loss == "after":
            raise LostError
        return answer


def hub(path: Path | None = None) -> CorrectionHub:
    return CorrectionHub(identity="me", max_pairs=10_000, path=path)


def memory() -> OnlineMemory:
    return OnlineMemory(max_pairs=10_000)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), deltas), max_size=12), st.lists(st.sampled_from(["", "before", "after"])))
async def test_all_replicas_come_to_the_same_sums_whatever_is_lost(met, losses):
    line, memories = Line(hub(), losses), [memory() for _ in range(3)]
    links = [CorrectionSync(one, line) for one in memories]
    expected = PairCounts()
    for who, delta in met:
        memories[who].add("tenant", PairCounts.of(delta))
        expected = expected.merged(PairCounts.of(delta), max_pairs=10_000)
        try:
            await links[who].exchange()
        except LostError:
            continue
    line.losses.clear()
    for link in links * 3:  # what was told again, what was new behind it, what that is to the others
        await link.exchange()
    assert [one.snapshot("tenant") for one in memories] == [expected] * 3
    assert [len(one.snapshot("")) for one in memories] == [0] * 3


async def test_a_new_replica_hears_everything_in_messages_of_bounded_size():
    line, old, new = Line(hub()), memory(), memory()
    for tenant in "ab":
        old.add(tenant, PairCounts.of({(draft, target): 2 for draft in range(80) for target in range(50)}))
    await CorrectionSync(old, line).exchange()
    await CorrectionSync(new, line).exchange()
    assert [new.snapshot(tenant) for tenant in "ab"] == [old.snapshot(tenant) for tenant in "ab"]
    assert 30_000 < line.largest < MAX_MESSAGE_BYTES


async def test_a_hub_that_comes_back_goes_on_from_its_file(tmp_path):
    path = tmp_path / "deep" / "t.parquet"
    first, one = hub(path), memory()
    line = Line(first)
    link = CorrectionSync(one, line)
    one.add("a", PairCounts.of({(1, 2): 3}))
    await link.exchange()
    assert first.has_unsaved
    first.save()
    assert not first.has_unsaved
    line.hub = hub(path)
    one.add("a", PairCounts.of({(1, 2): 1}))
    await link.exchange()
    other = memory()
    await CorrectionSync(other, line).exchange()
    assert one.snapshot("a") == other.snapshot("a") == PairCounts.of({(1, 2): 4})


async def test_a_save_that_fails_is_logged_once_counted_and_made_good(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="ray.serve")
    in_the_way = tmp_path / "deep"
    in_the_way.write_text("a file where the folder would be")
    path, one = in_the_way / "t.parquet", memory()
    shared = hub(path)
    one.add("a", PairCounts.of({(1, 2): 3}))
    await CorrectionSync(one, Line(shared)).exchange()
    for _ in range(3):
        shared.keep()
    assert (shared.failed_saves, shared.has_unsaved) == (3, True)
    in_the_way.unlink()
    shared.keep()
    assert (shared.failed_saves, shared.has_unsaved, path.is_file()) == (0, False, True)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_store_that_cannot_be_taken_up_is_logged_once_and_left_as_it_is(tmp_path, caplog, is_damaged):
    path, aside = tmp_path / "t.parquet", tmp_path / "aside.parquet"
    if is_damaged:
        path.write_text("no parquet")
    else:
        save_counts(path, {"": PairCounts.of({(1, 2): 9})}, identity="another")
    before, shared = path.read_bytes(), hub(path)
    counts = PackedCounts.of("a", PairCounts.of({(1, 2): 3}))
    answer = shared.exchange(Exchange("r", 1, 1, (counts,), "", 0))
    assert answer.totals == (counts,)
    for _ in range(2):
        shared.keep()
    assert path.read_bytes() == before
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"rule.store: {path} " in record.getMessage()
    path.rename(aside)
    shared.keep()
    assert load_all(path, identity="me") == {"a": counts.counts}


class LostLink(CorrectionLink):
    """A link whose hub cannot be reached, until it can."""

    def __init__(self, line):
        super().__init__(memory(), identity="me", max_pairs=10, path=Path("unused"))
        self.line = line
        self.calls = 0
        self.is_lost = True

    async def _call(self, call):
        self.calls += 1
        if self.is_lost:
            raise RayError
        return await self.line(call)


async def test_a_hub_out_of_reach_is_logged_once_and_so_is_its_return(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve")
    link = LostLink(Line(hub()))
    running = asyncio.create_task(link.exchange_for_ever(period_s=0.0))
    while link.calls < 3:
        await asyncio.sleep(0)
    link.is_lost = False
    while link.calls < 6:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


class LinkByLine(CorrectionLink):
    """A link whose hub is in this process."""

    def __init__(self, memory: OnlineMemory, line: Line) -> None:
        super().__init__(memory, identity="me", max_pairs=10_000, path=Path("unused"))
        self.line = line

    async def _call(self, call: Exchange) -> Totals:
        return await self.line(call)


async def test_what_was_not_told_is_told_at_the_end(tmp_path):
    one, other, line = memory(), memory(), Line(hub())
    running = asyncio.create_task(LinkByLine(one, line).exchange_for_ever(period_s=3600.0))
    await asyncio.sleep(0)
    one.add("a", PairCounts.of({(1, 2): 3}))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await CorrectionSync(other, line).exchange()
    assert other.snapshot("a") == PairCounts.of({(1, 2): 3})


@pytest.mark.parametrize(
    ("store", "kept"), [("mine/c.parquet", "{}/mine/c.parquet"), ("/tmp/c.parquet", "/tmp/c.parquet")]
)
def test_a_store_is_beside_its_profile_wherever_the_replica_runs(tmp_path, store, kept):
    path = tmp_path / "p.yaml"
    shutil.copy(PROFILES_DIR / "csd.parquet", tmp_path)
    text = (PROFILES_DIR / "csd.yaml").read_text()
    path.write_text(text.replace("memory: frozen", f"memory: online\n  store: {store}"))
    profile = load_profile(str(path))
    assert profile.rule.store == kept.format(tmp_path)
    elsewhere = load_profile(str(shutil.copytree(tmp_path, tmp_path / "copy") / "p.yaml"))
    assert elsewhere.hash == profile.hash


async def test_salts_are_neither_told_nor_kept(tmp_path):
    path = tmp_path / "t.parquet"
    shared, one = hub(path), memory()
    one.add("a secret salt", PairCounts.of({(1, 2): 3}))
    calls = []

    async def call(exchange):
        calls.append(exchange)
        return shared.exchange(exchange)

    await CorrectionSync(one, call).exchange()
    shared.save()
    assert b"secret" not in pickle.dumps(calls) + path.read_bytes()
    assert calls[0].deltas[0].tenant == tenant_of("a secret salt")


@pytest.mark.parametrize("most", [1, 3])
def test_a_hub_is_bounded(most):
    bounded = CorrectionHub(identity="me", max_pairs=most, path=None, max_tenants=2)
    for number, tenant in enumerate("abc", 1):
        counts = PairCounts.of({(i, i): i + 1 for i in range(5)})
        answer = bounded.exchange(Exchange("r", number, 1, (PackedCounts.of(tenant, counts),), "", 0))
    assert {packed.tenant for packed in answer.totals} == {"b", "c"}
    assert all(len(packed.counts) == most for packed in answer.totals)
