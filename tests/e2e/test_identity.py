"""Speculation changes nothing: ids of the embedded model against transformers' greedy generate, float32."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from serving.build import Built
from serving.config import Eagle3Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from serving.decode.offline import complete
from serving.requests import GenerationRequest, Limits, Sampling

pytestmark = pytest.mark.slow

Make = Callable[..., Built]
Expected = dict[str, list[int]]


def outputs(built: Built, requests: list[GenerationRequest]) -> Expected:
    return {done.request_id: done.output_ids for done in complete(built.scheduler, requests)}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_case_08_greedy_ids_with_a_suffix_cache(
    make: Make, requests: list[GenerationRequest], expected: Expected, k: int, batch: int
) -> None:
    assert outputs(make(SuffixDrafter(max_draft=k), batch=batch), requests) == expected


@pytest.mark.parametrize(("k", "batch"), [(1, 8), (4, 1), (8, 8)])
def test_case_08_greedy_ids_with_a_draft_model(
    make: Make, requests: list[GenerationRequest], expected: Expected, k: int, batch: int
) -> None:
    assert outputs(make(ModelDrafter(max_draft=k), batch=batch), requests) == expected


@pytest.mark.parametrize(("k", "batch"), [(1, 8), (4, 1), (8, 8)])
def test_case_08_greedy_ids_with_an_eagle3_head(
    make: Make, requests: list[GenerationRequest], expected: Expected, k: int, batch: int
) -> None:
    built = make(Eagle3Drafter(max_draft=k), batch=batch)
    assert outputs(built, requests) == expected
    assert built.scheduler.stats.accepted > 0


SAMPLED = (
    Sampling(1.0, seed=1),
    Sampling(0.7, seed=2, top_p=0.9),
    Sampling(1.1, seed=3, top_k=40, min_p=0.02),
    Sampling(0.9, seed=4, frequency_penalty=0.6, presence_penalty=0.4),
    Sampling(frequency_penalty=2.0, presence_penalty=-2.0),
)


def test_case_16_seeded_samples_are_plain_decoding_s_with_any_drafter_draft_length_and_batch(
    make: Make, requests: list[GenerationRequest]
) -> None:
    sampled = [replace(request, sampling=SAMPLED[i % len(SAMPLED)]) for i, request in enumerate(requests)]
    plain = outputs(make(NoDrafter(), batch=8), sampled)
    assert len({tuple(ids) for ids in plain.values()}) == len(plain)
    for drafter, batch in ((SuffixDrafter(max_draft=8), 1), (ModelDrafter(max_draft=4), 3), (Eagle3Drafter(), 8)):
        assert outputs(make(drafter, batch=batch), sampled) == plain


def test_the_guard_changes_no_token(make: Make, requests: list[GenerationRequest], expected: Expected) -> None:
    for drafter in (SuffixDrafter(), ModelDrafter()):
        assert outputs(make(drafter, batch=3, guard=True), requests) == expected


def test_case_14_neighbours_of_every_acceptance_do_not_matter(
    make: Make, requests: list[GenerationRequest], expected: Expected
) -> None:
    built = make(SuffixDrafter(), batch=8)
    for request in requests:
        assert outputs(built, [request])[request.request_id] == expected[request.request_id]
    mixed = [
        replace(request, request_id=f"{request.request_id}-{k}", max_draft=k)
        for request in requests
        for k in (0, 3, 16)
    ]
    for name, ids in outputs(built, mixed).items():
        assert ids == expected[name.split("-")[0]]


def test_case_15_cold_warm_and_warm_under_load_are_the_same(
    make: Make, requests: list[GenerationRequest], expected: Expected
) -> None:
    built = make(SuffixDrafter(), batch=4)
    for run in ("cold", "warm"):
        for request in requests:
            renamed = replace(request, request_id=f"{run}-{request.request_id}")
            assert list(outputs(built, [renamed]).values()) == [expected[request.request_id]]
    together = [replace(request, request_id=f"load-{request.request_id}") for request in requests]
    for name, ids in outputs(built, together).items():
        assert ids == expected[name.removeprefix("load-")]


def test_case_04_a_stop_string_ends_the_text_before_it(
    make: Make, requests: list[GenerationRequest], expected: Expected
) -> None:
    built = make(SuffixDrafter(), batch=1)
    whole = built.tokenizer.decode(expected["q0"])
    stop = whole[40:52]
    request = replace(requests[0], limits=Limits(32, built.tokenizer.stop_ids, (stop,)))
    (done,) = complete(built.scheduler, [request])
    assert done.text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    assert done.output_ids == expected["q0"][: len(done.output_ids)]
