"""Masks judged in place against cached rows, what an output is worth, and when a middle tier pays."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from serving.decode.stats import EngineStats
from serving.models.hf_decoder import HFDecoder
from tests.models.test_packed_lm import make_lm, random_ids, stock_logits
from tests.models.test_slim import deep, without_layers
from tuning.dimr import compare
from tuning.selfgen import Dialogue
from tuning.via import Cut, Fidelity, MaskBench, excerpts, fidelity, mask_pass_times
from tuning.via_cost import PassTimes, break_even, least_saving, modelled, saving_verdict, verdict

pytestmark = pytest.mark.usefixtures("one_thread")

PREFIX = random_ids(20, 0)  # every prompt begins with it


def dialogue(seed: int, *, num_output: int = 9) -> Dialogue:
    ids = random_ids(12 + num_output, seed)
    return Dialogue(np.concatenate([PREFIX, ids[:12]]), ids[12:])


def by_stock(network, one: Dialogue) -> np.ndarray:
    logits = stock_logits(network, one.ids[:-1])[len(one.prompt_ids) - 1 :]
    return torch.log_softmax(logits, dim=-1).numpy()


def test_a_mask_is_judged_as_the_stock_model_without_its_layers_would_be() -> None:
    dialogues = [dialogue(seed) for seed in range(3)]
    bench = MaskBench(make_lm(HFDecoder(deep())), dialogues)
    assert (bench.num_rows, bench.num_layers) == (27, 6)
    assert bench.agreement(()).cost == 0.0
    for skipped in ((2,), (1, 4), (2,)):  # masks of a size share their rows, and must not see each other's
        kept = tuple(layer for layer in range(6) if layer not in skipped)
        expected = compare(
            np.concatenate([by_stock(deep(), one) for one in dialogues]),
            np.concatenate([by_stock(without_layers(deep(), kept), one) for one in dialogues]),
        )
        found = bench.agreement(skipped)
        assert (found.cost, found.kl, found.top1) == pytest.approx(
            (expected.cost, expected.kl, expected.top1), abs=1e-3
        )


def test_excerpts_have_as_many_rows_as_are_asked_for() -> None:
    dialogues = [dialogue(seed, num_output=30) for seed in range(5)]
    supply = iter(dialogues)
    taken = excerpts(supply, Cut(length=20, reach=96), num_rows=50, seed=0)
    assert [len(one.output_ids) for one in taken] == [20, 20, 10]
    assert list(supply) == dialogues[3:]


def test_an_excerpt_begins_anywhere_and_has_all_before_it_as_context() -> None:
    one, rng = dialogue(1, num_output=30), np.random.default_rng(0)
    starts = set()
    for _ in range(200):
        part = Cut(length=4, reach=10).apply(one, rng)
        starts.add(len(part.prompt_ids) - len(one.prompt_ids))
        assert len(part.output_ids) == 4
        assert part.ids.tolist() == one.ids[: len(part.ids)].tolist()
    assert starts == set(range(7))
    short = Cut(length=4, reach=10).apply(dialogue(2, num_output=3), rng)
    assert len(short.output_ids) == 3


def test_an_answer_of_the_targets_own_has_no_regret() -> None:
    target = make_lm(HFDecoder(deep()))
    ids = dialogue(1).prompt_ids
    for _ in range(5):
        ids = np.append(ids, np.int32(target.all_logits(ids)[-1].argmax()))
    own = fidelity(target, Dialogue(ids[:-5], ids[-5:]))
    assert (own.regret, own.top1, own.num_tokens) == (0.0, 1.0, 5)
    other = fidelity(target, dialogue(2))
    assert other.regret > 0.0 > other.logprob
    both = Fidelity.mean([own, other])
    assert both.top1 == pytest.approx((5 * own.top1 + 9 * other.top1) / 14)


class OnDevice(torch.Tensor):
    """Refuses what tensors on a GPU refuse."""

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_rows_of_a_target_on_a_gpu_are_brought_here() -> None:
    target, one = make_lm(HFDecoder(deep())), dialogue(2)
    here, all_logits = fidelity(target, one), target.all_logits
    target.all_logits = lambda *args, **kwargs: all_logits(*args, **kwargs).as_subclass(OnDevice)  # type: ignore[method-assign]
    assert fidelity(target, one) == here


TIMES = PassTimes(full={1: 0.010, 5: 0.014, 17: 0.030}, slim={1: 0.008, 5: 0.0112, 17: 0.024}, draft_s=0.001)
STRICT = EngineStats(emitted=100, target_passes=50, target_rows=250, drafted=200)
VIA = EngineStats(emitted=100, target_passes=20, target_rows=340, slim_passes=45, slim_rows=225, drafted=180)


def test_the_cost_model_adds_up_passes() -> None:
    strict, via = modelled(STRICT, TIMES), modelled(VIA, TIMES)
    assert (strict.full_ms, strict.slim_ms, strict.draft_ms) == pytest.approx((7.0, 0.0, 2.0))
    assert (via.full_ms, via.slim_ms, via.draft_ms) == pytest.approx((6.0, 5.04, 1.8))
    assert TIMES.slim_ratio == pytest.approx(0.8)


def test_the_slim_tier_reads_prompts_too_and_the_shorter_the_answers_the_more_that_costs() -> None:
    """60 prompt tokens at 24 ms / 17 each, over 100 answer tokens, or over 50."""
    asked = EngineStats(**{**vars(VIA), "prompt_tokens": 60})
    via = modelled(asked, TIMES)
    assert via.reading_ms == pytest.approx(60 * 24.0 / 17 / 100)
    assert via.total_ms == pytest.approx(modelled(VIA, TIMES).total_ms + via.reading_ms)
    assert modelled(EngineStats(**{**vars(asked), "emitted": 50}), TIMES).reading_ms == pytest.approx(
        2 * via.reading_ms
    )
    assert modelled(asked, replace(TIMES, is_seeded=True)).reading_ms == 0.0  # copies of the target's KV
    strict = modelled(EngineStats(**{**vars(STRICT), "prompt_tokens": 60}), TIMES)
    assert strict == modelled(STRICT, TIMES)  # the target reads them in either case
    assert break_even(strict, via) == pytest.approx((9.0 - 7.8) / (5.04 + via.reading_ms))
    assert f"{via.reading_ms:.2f} of it for the slim tier to read prompts" in verdict(strict, via, TIMES)
    assert "reads every prompt, 1.41 ms a token" in saving_verdict(TIMES, 5)


def test_it_says_what_a_slim_pass_may_cost() -> None:
    strict, via = modelled(STRICT, TIMES), modelled(VIA, TIMES)
    assert break_even(strict, via) == pytest.approx((9.0 - 7.8) / 5.04)
    assert "does not pay" in verdict(strict, via, TIMES)
    flat = TIMES.flat
    assert "pays" in verdict(
        modelled(STRICT, flat), modelled(EngineStats(**{**vars(VIA), "slim_passes": 20}), flat), flat
    )
    dear = modelled(EngineStats(emitted=100, target_passes=90, target_rows=450, slim_passes=9, slim_rows=45), TIMES)
    assert break_even(strict, dear) is None
    assert "slim passes were free" in verdict(strict, dear, TIMES)


def test_what_a_slim_tier_must_save_is_its_share_of_what_a_full_pass_costs_without_rows() -> None:
    """Rows that a full pass did not see are scored by the next one: only what a pass costs apart from rows is saved."""
    full = {1: 0.010, 5: 0.010 + 4 * 0.001, 20: 0.010 + 19 * 0.001}
    cheap, dear = dict.fromkeys(full, 0.0045), dict.fromkeys(full, 0.0095)
    assert least_saving(PassTimes(full, cheap), 5) == pytest.approx(0.5)  # 4.5 ms of 9 ms
    assert least_saving(PassTimes(full, dear), 5) is None
    flat = dict.fromkeys(full, 0.010)
    assert least_saving(PassTimes(flat, dict.fromkeys(full, 0.003)), 5) == pytest.approx(0.3)
    assert "costs 0.32 of a full one here: the middle tier pays if it saves more than 50%" in saving_verdict(
        PassTimes(full, cheap), 5
    )
    assert "does not pay" in saving_verdict(PassTimes(full, dear), 5)


def test_passes_of_a_mask_are_timed_on_any_target_and_leave_its_row_free() -> None:
    target = make_lm(HFDecoder(deep()))
    for kept in ((0, 5), (0, 2, 5)):
        times = mask_pass_times(target, kept, (1, 5))
        assert list(times.full) == list(times.slim) == [1, 5]
        assert all(seconds > 0.0 for seconds in (*times.full.values(), *times.slim.values()))
    assert target.store.num_open == 0
