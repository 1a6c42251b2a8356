"""VIA-SD on the embedded model, float32: what cannot change a token does not; what can is owned up to."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.build import Built
from serving.config import ModelDrafter, SuffixDrafter, ViaVerifier
from serving.decode.offline import complete
from serving.requests import GenerationRequest

pytestmark = pytest.mark.slow

NUM_LAYERS = 30
SKIPPED = (9, 11, 13, 15, 17, 19)
Make = Callable[..., Built]
Expected = dict[str, list[int]]


@pytest.fixture(scope="module")
def mask(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, ...]], str]:
    """Writes a mask of the embedded model without some layers and returns its path."""

    def write(skipped: tuple[int, ...]) -> str:
        path = Path(tmp_path_factory.mktemp("mask")) / "mask.json"
        kept = [index for index in range(NUM_LAYERS) if index not in skipped]
        path.write_text(json.dumps({"model": "smollm2-135m-instruct", "num_layers": NUM_LAYERS, "kept": kept}))
        return str(path)

    return write


def run(built: Built, requests: list[GenerationRequest]) -> Expected:
    return {done.request_id: done.output_ids for done in complete(built.scheduler, requests)}


@pytest.mark.parametrize("drafter", [SuffixDrafter(max_draft=8), ModelDrafter(max_draft=4)], ids=["suffix", "model"])
@pytest.mark.parametrize("batch", [1, 8])
def test_always_escalating_is_plain(
    make: Make, mask: Callable[..., str], requests: list[GenerationRequest], expected: Expected, drafter, batch: int
) -> None:
    always = ViaVerifier(mask=mask(SKIPPED), theta_accept=1.5, theta_escalate=1.5)
    built = make(drafter, batch=batch, verifier=always)
    assert run(built, requests) == expected
    assert built.scheduler.stats.slim_passes > 0


@pytest.mark.parametrize("bonus", ["none", "slim"])
def test_a_mask_that_keeps_all_at_theta_one_is_plain(
    make: Make, mask: Callable[..., str], requests: list[GenerationRequest], expected: Expected, bonus: str
) -> None:
    whole = ViaVerifier(mask=mask(()), theta_accept=1.0, theta_escalate=1.0, bonus=bonus)
    built = make(ModelDrafter(max_draft=4), verifier=whole)
    assert run(built, requests) == expected
    assert built.scheduler.stats.slim_accepted > 0


def test_the_tiers_share_the_work(make: Make, mask: Callable[..., str], requests: list[GenerationRequest]) -> None:
    built = make(ModelDrafter(max_draft=4), verifier=ViaVerifier(mask=mask(SKIPPED)))
    receipts = [done.receipt for done in complete(built.scheduler, requests)]
    assert any(not receipt.lossless for receipt in receipts)
    for receipt in receipts:
        assert receipt.slim is not None
        assert receipt.target_passes <= receipt.rounds
        assert receipt.slim.audited + receipt.slim.unseen == receipt.slim.accepted + receipt.slim.regenerated
    stats = built.scheduler.stats
    assert stats.target_passes < stats.emitted
