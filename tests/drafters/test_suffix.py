"""The suffix drafter follows each request, and remembers finished responses for the same tenant."""

from serving.drafters.suffix import SuffixDrafter
from serving.memory.suffix import SuffixCache
from serving.protocols import DraftRequest
from serving.types import Draft, as_ids


def ask(drafter: SuffixDrafter, ids: list[int], *, session: str = "a", salt: str = "", max_draft: int = 8) -> Draft:
    (draft,) = drafter.start([DraftRequest(session, as_ids(ids), 2, max_draft, salt)]).result()
    return draft


def test_a_repeated_text_is_continued() -> None:
    drafter = SuffixDrafter(SuffixCache())
    assert ask(drafter, [1, 2, 3, 4, 5, 9, 1, 2, 3]).ids.tolist()[:2] == [4, 5]


def test_ids_are_followed_through_growth_and_rollback() -> None:
    drafter, fresh = SuffixDrafter(SuffixCache()), SuffixDrafter(SuffixCache())
    for ids in ([1, 2, 3, 1], [1, 2, 3, 1, 2], [1, 2, 7, 8, 1, 2], [1, 2, 7, 8, 1, 2, 7]):
        draft = ask(drafter, ids)
    assert draft.ids.tolist() == ask(fresh, [1, 2, 7, 8, 1, 2, 7]).ids.tolist() == [8, 1, 2]


def test_finished_responses_serve_the_same_tenant_only() -> None:
    drafter = SuffixDrafter(SuffixCache())
    ask(drafter, [1, 2, 50, 51], salt="x")
    drafter.close("a", as_ids([1, 2, 50, 51, 52, 53]))
    assert ask(drafter, [9, 9, 50, 51], session="b", salt="x").ids.tolist() == [52, 53]
    assert len(ask(drafter, [9, 8, 50, 51], session="c", salt="y")) == 0
    assert drafter.num_sessions == 2


def test_cancelled_responses_are_forgotten() -> None:
    drafter = SuffixDrafter(SuffixCache())
    ask(drafter, [1, 2, 50, 51])
    drafter.close("a", None)
    drafter.close("never seen", None)
    assert len(ask(drafter, [9, 9, 50, 51], session="b")) == 0


def test_drafts_respect_the_room() -> None:
    drafter = SuffixDrafter(SuffixCache())
    assert len(ask(drafter, [1, 2, 3, 4, 5, 6, 1, 2, 3], max_draft=1)) == 1
