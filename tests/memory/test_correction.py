"""CSD's memory: what is counted, what a request sees, how it is bounded, kept and merged."""

import io
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.memory.correction import EMPTY_COUNTS, PairCounts, RequestMemory, ids_of_pair, pair_of
from serving.memory.correction_file import load_all, load_counts, save_counts
from serving.memory.growing import GrowingCounts, name_of
from serving.memory.online import OnlineMemory, tenant_of
from serving.types import ExceptionRecord, Verdict

ids = st.integers(0, 2**21)
tables = st.dictionaries(st.tuples(ids, ids), st.integers(1, 50), max_size=20).map(PairCounts.of)
small = st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.integers(1, 5), max_size=6).map(
    PairCounts.of
)


def verdict(*accepted: tuple[int, int], rejected: tuple[int, int] | None = None) -> Verdict:
    records = [ExceptionRecord(i, draft, target, 0.5) for i, (draft, target) in enumerate(accepted)]
    last = ExceptionRecord(len(records), *rejected, 0.5) if rejected else None
    return Verdict(len(records), 0, (*["exception"] * len(records), "recovered"), tuple(records), last)


@given(ids, ids)
def test_a_pair_is_one_number(draft: int, target: int) -> None:
    assert ids_of_pair(pair_of(draft, target)) == (draft, target)


def test_a_request_sees_its_snapshots_and_its_own_divergences() -> None:
    memory = RequestMemory(PairCounts.of({(1, 2): 3}), PairCounts.of({(1, 2): 2, (5, 6): 1}), resumed=[(1, 2)])
    assert [memory.count(1, 2), memory.count(5, 6), memory.count(2, 1)] == [6, 1, 0]
    memory.note(verdict((1, 2), rejected=(5, 6)))
    assert [memory.count(1, 2), memory.count(5, 6)] == [7, 2]
    assert memory.own == PairCounts({pair_of(1, 2): 1, pair_of(5, 6): 1}, {pair_of(1, 2): 1})


def test_only_what_was_emitted_is_counted() -> None:
    met = verdict((1, 2), (3, 4), rejected=(5, 6))
    assert [len(met.emitted(n).seen) for n in range(5)] == [0, 1, 2, 3, 3]
    assert [met.emitted(n).next_id for n in range(4)] == [None, None, None, 0]


@given(small, small, small)
def test_counts_only_grow_and_merging_has_no_order(a: PairCounts, b: PairCounts, c: PairCounts) -> None:
    merged = a.merged(b, max_pairs=99)
    assert all(merged.seen[pair] >= count for pair, count in a.seen.items())
    assert merged == b.merged(a, max_pairs=99)
    assert merged.merged(c, max_pairs=99) == a.merged(b.merged(c, max_pairs=99), max_pairs=99)


@given(small, small, st.integers(1, 5))
def test_the_pairs_seen_least_are_forgotten_first(a: PairCounts, b: PairCounts, most: int) -> None:
    whole, kept = a.merged(b, max_pairs=99), a.merged(b, max_pairs=most)
    assert len(kept) == min(most, len(whole))
    gone = [count for pair, count in whole.seen.items() if pair not in kept.seen]
    assert max(gone, default=0) <= min(kept.seen.values(), default=99)


def test_snapshots_do_not_change_and_tenants_do_not_meet() -> None:
    memory = OnlineMemory(max_pairs=8)
    before = memory.snapshot("a")
    memory.add("a", PairCounts.of({(1, 2): 3}))
    assert (len(before), len(memory.snapshot("a")), len(memory.snapshot("b"))) == (0, 1, 0)
    held = memory.snapshot("a")
    memory.add("a", PairCounts.of({(1, 2): 1}))
    assert held.seen == {pair_of(1, 2): 3}
    assert memory.snapshot("a").seen == {pair_of(1, 2): 4}


def test_adding_what_a_request_met_costs_by_what_it_met_not_by_what_is_known() -> None:
    """The engine thread adds while every other request waits."""
    memory = OnlineMemory(max_pairs=65_536)
    memory.add("a", PairCounts.of({(pair, 0): 1 + pair % 7 for pair in range(65_536)}))
    held = memory.snapshot("a")
    seconds = []
    for request in range(8):
        delta = PairCounts.of({(70_000 + request, other): 9 for other in range(20)})
        began_s = time.perf_counter()
        memory.add("a", delta)
        memory.snapshot("a")
        seconds.append(time.perf_counter() - began_s)
    assert min(seconds) < 0.01
    assert len(memory.snapshot("a")) == len(held) == 65_536
    assert pair_of(70_000, 0) not in held.seen


@given(st.lists(small, max_size=8), st.integers(1, 9))
def test_growing_counts_are_merged_counts_and_snapshots_of_them_stay_as_they_are(
    deltas: list[PairCounts], most: int
) -> None:
    growing, merged, taken = GrowingCounts(most), EMPTY_COUNTS, []
    for delta in deltas:
        met = PairCounts(delta.seen, dict(list(delta.seen.items())[::2]))
        growing.add(met)
        merged = merged.merged(met, max_pairs=most)
        taken.append((growing.counts, merged))
    assert all(found == expected for found, expected in taken)


@given(st.lists(small, max_size=8), st.integers(1, 9))
def test_equal_counts_have_equal_names_however_they_grew(deltas: list[PairCounts], most: int) -> None:
    growing, other = GrowingCounts(most), GrowingCounts(most)
    for delta in deltas:
        growing.add(delta)
    other.raise_to(growing.counts)
    assert name_of(growing.counts.seen) == name_of(other.counts.seen) == name_of(dict(growing.counts.seen))
    assert bool(name_of(growing.counts.seen)) == bool(len(growing.counts))
    growing.add(PairCounts.of({(1, 2): 1}))
    assert (name_of(growing.counts.seen) == name_of(other.counts.seen)) == (growing.counts.seen == other.counts.seen)


def test_a_tenants_name_is_of_its_own_counts_alone_and_costs_nothing_to_tell() -> None:
    memory = OnlineMemory(max_pairs=65_536)
    memory.add("a", PairCounts.of({(pair, 0): 1 for pair in range(65_536)}))
    before = name_of(memory.snapshot("a").seen)
    memory.add("b", PairCounts.of({(1, 2): 1}))
    began_s = time.perf_counter()
    for _ in range(100):
        assert name_of(memory.snapshot("a").seen) == before
    assert time.perf_counter() - began_s < 0.1


def test_many_bumps_of_few_pairs_are_forgotten_as_bumps() -> None:
    growing, merged = GrowingCounts(3), EMPTY_COUNTS
    for step in range(3000):
        delta = PairCounts.of({(step % 5, 0): 1 + step % 2})
        growing.add(delta)
        merged = merged.merged(delta, max_pairs=3)
    assert growing.counts == merged


def test_what_was_added_is_told_until_it_is_acknowledged() -> None:
    memory = OnlineMemory(max_pairs=8)
    memory.add("a", PairCounts.of({(1, 2): 3}))
    first = memory.tell()
    memory.add("a", PairCounts.of({(1, 2): 1}))
    assert memory.tell() == first
    assert first.deltas == {tenant_of("a"): PairCounts.of({(1, 2): 3})}
    memory.acknowledge(first.number)
    assert memory.tell().deltas == {tenant_of("a"): PairCounts.of({(1, 2): 1})}


def test_totals_are_taken_over_with_what_they_do_not_hold_yet_and_nothing_shrinks() -> None:
    memory = OnlineMemory(max_pairs=8)
    memory.add("a", PairCounts.of({(1, 2): 3}))
    told = memory.tell()
    memory.add("a", PairCounts.of({(1, 2): 1}))
    memory.acknowledge(told.number)
    for _ in range(2):  # a message may come twice
        memory.absorb(tenant_of("a"), PairCounts.of({(1, 2): 10, (3, 4): 2}))
        assert memory.snapshot("a").seen == {pair_of(1, 2): 11, pair_of(3, 4): 2}
    memory.absorb(tenant_of("a"), PairCounts.of({(1, 2): 5}))
    assert memory.snapshot("a").seen[pair_of(1, 2)] == 11


def test_the_tenant_not_heard_of_for_longest_goes_first() -> None:
    memory = OnlineMemory(max_pairs=8, max_tenants=2)
    for salt in "ab":
        memory.add(salt, PairCounts.of({(1, 2): 1}))
        memory.snapshot(salt)
    memory.snapshot("a")
    memory.add("c", PairCounts.of({(1, 2): 1}))
    assert [len(memory.snapshot(salt)) for salt in "cab"] == [1, 1, 0]


@settings(deadline=None)
@given(tables)
def test_a_file_brings_back_what_was_saved(tmp_path_factory: pytest.TempPathFactory, counts: PairCounts) -> None:
    path = tmp_path_factory.mktemp("csd") / "t.parquet"
    save_counts(path, {"": counts, "tenant": EMPTY_COUNTS}, identity="me")
    assert load_all(path, identity="me") == ({"": counts} if counts.seen else {})
    assert load_counts(path, identity="me", fingerprint=counts.fingerprint) == counts


def test_another_drafter_voids_a_table_and_another_table_voids_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    save_counts(path, {"": PairCounts.of({(1, 2): 3})}, identity="me")
    with pytest.raises(ConfigError, match="belongs to another tokenizer, target or drafter"):
        load_all(path, identity="you")
    with pytest.raises(ConfigError, match="not the table that this profile was calibrated with"):
        load_counts(path, identity="me", fingerprint="0" * 16)


def parquet(identity: bytes = b"me", **changed: object) -> bytes:
    """One row as `save_counts` writes it, but for the columns that are `changed`; None leaves one out."""
    columns: dict[str, object] = {"salt": [""], "draft_id": [1], "target_id": [2], "seen": [3], "rescued": [0]}
    kept = {name: column for name, column in (columns | changed).items() if column is not None}
    written = io.BytesIO()
    pq.write_table(pa.table(kept).replace_schema_metadata({b"drafthouse.identity": identity}), written)
    return written.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read as Parquet"),
        (b"no parquet", "cannot be read as Parquet"),
        (parquet()[:-9], "cannot be read as Parquet"),
        (parquet(seen=None), "is no table of counts: .*seen"),
        (parquet(seen=["many"]), "is no table of counts: "),
        (parquet(seen=[{"a": 1}]), "is no table of counts: "),
        (parquet(draft_id=[2**40]), "is no table of counts: "),
        (parquet(seen=[None]), "is no table of counts: row 0 has an empty or negative cell"),
        (parquet(target_id=[-1]), "is no table of counts: row 0 has an empty or negative cell"),
        (parquet(salt=pa.array([b"\xff"]).view(pa.string())), "is no table of counts: "),
        (parquet(identity=b"\xff"), "belongs to another tokenizer, target or drafter"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_field_and_path(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_all(path, identity="me", field="rule.store")
    assert str(caught.value).startswith(f"rule.store: {path} ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    for path in (tmp_path / "none.parquet", tmp_path):
        with pytest.raises(ConfigError, match=r"^rule\.table: .*: no such file$"):
            load_counts(path, identity="me", fingerprint="0" * 16)
