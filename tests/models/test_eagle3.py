from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from serving.errors import ModelError
from serving.models import eagle3_lm
from serving.models.eagle3 import Eagle3Head
from serving.models.eagle3_checkpoint import is_eagle3, load_eagle3, read_eagle3_config
from serving.models.eagle3_lm import Eagle3LM
from serving.models.eagle3_runner import NativeEagle3, TorchEagle3, kv_shape, runner_of
from serving.models.kv_store import KVStore
from serving.protocols import ScoreRequest
from serving.requests import Sampling
from serving.types import WORTH_A_PASS, Draft, DraftStops, Ids
from tests.models.eagle_heads import _LAYER, DRAFT_VOCAB, HIDDEN, TARGET_HIDDEN, plain_output, tiny_head, write_head
from tests.models.tiny import VOCAB

CAPACITY = 96


class KnownFeatures:
    """Features that are a function of the text up to their position; `known` is how far the target has been."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        return features_of(ids)[start : self.known.get(session_id, len(ids))]


def features_of(ids: Ids) -> Tensor:
    generator = torch.Generator()
    rows = []
    for stop in range(1, len(ids) + 1):
        generator.manual_seed(hash(ids[:stop].tobytes()) % (1 << 62))
        rows.append(torch.randn(3 * TARGET_HIDDEN, generator=generator))
    return torch.stack(rows) if rows else torch.zeros(0, 3 * TARGET_HIDDEN)


class CountingRunner:
    """`runner`, noting the positions of each pass."""

    def __init__(self, runner: Any, widths: list[int]) -> None:
        self._runner, self._widths = runner, widths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, g: Tensor, step: Any, store: KVStore) -> Tensor:
        self._widths.append(len(g))
        return self._runner.forward(g, step, store)


def random_ids(length: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def runners(head: Eagle3Head) -> list[Any]:
    found: list[Any] = [TorchEagle3(head, max_length=CAPACITY)]
    fastest = runner_of(head, max_length=CAPACITY)
    return [*found, fastest] if isinstance(fastest, NativeEagle3) else found


def make_lm(
    head: Eagle3Head, runner: Any, features: KnownFeatures, *, num_rows: int = 3, prefill_chunk: int = CAPACITY
) -> Eagle3LM:
    store = KVStore([kv_shape(head)], num_rows, CAPACITY, torch.float32)
    return Eagle3LM(
        runner, store, features, target_ids=head.target_ids, hidden=HIDDEN, prefill_chunk=prefill_chunk,
        with_logsumexp=True,
    )  # fmt: skip


def expected_token(head: Eagle3Head, ids: Ids, num_known: int) -> int:
    out = plain_output(head, features_of(ids[:-1])[:num_known], ids)
    return int(head.target_ids[head.logits(out).argmax()])


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_a_chain_equals_the_head_run_position_by_position(norm_before_residual: bool) -> None:
    head = tiny_head(norm_before_residual=norm_before_residual)
    for runner in runners(head):
        features = KnownFeatures()
        lm = make_lm(head, runner, features)
        texts = {"a": random_ids(20, 1), "b": random_ids(7, 2)}
        for name, ids in texts.items():
            lm.open(name, ids)
            features.known[name] = len(ids) - 1
        for _ in range(5):
            tables = lm.score([ScoreRequest(name, ids) for name, ids in texts.items()])
            for (name, ids), table in zip(texts.items(), tables, strict=True):
                assert table is not None
                assert table.next_ids[0] == expected_token(head, ids, features.known[name])
            texts = {
                name: np.append(ids, table.next_ids).astype(np.int32)
                for (name, ids), table in zip(texts.items(), tables, strict=True)
                if table is not None
            }


def test_what_a_long_draft_began_with_can_be_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle3_lm, "KEPT", 8)
    head = tiny_head()
    for runner in runners(head):
        features, ids = KnownFeatures(), random_ids(20, 1)
        lm = make_lm(head, runner, features)
        lm.open("a", ids)
        features.known["a"] = len(ids) - 1
        for other in range(3, 8):
            text, count = np.append(ids[:-1], other).astype(np.int32), 0
            while (table := lm.score([ScoreRequest("a", text)])[0]) is not None:
                assert table.next_ids[0] == expected_token(head, text, features.known["a"])
                text, count = np.append(text, table.next_ids).astype(np.int32), count + 1
                if count == 2 and other % 2 and (said := lm.draft([ScoreRequest("a", text)], stops(99))) is not None:
                    assert said[0] is not None
                    assert 0 < len(said[0]) < 8  # what stands on the target's last feature is kept
                    assert said[0].ids[0] == expected_token(head, text, features.known["a"])
            assert count >= 6
            ids = text[:20]


def stops(*most: int, floor: float = 0.0, least: float = 0.0) -> DraftStops:
    return DraftStops(np.array(most), np.full(len(most), floor, dtype=np.float32), least)


def drafted_by_token(lm: Eagle3LM, name: str, ids: Ids, count: int, *, floor: float, least: float) -> Draft | None:
    """As `Eagle3LM.draft`, by `score`."""
    text, confidences, num_passes = ids, list[float](), 0
    while len(confidences) < count:
        num_passes += 1
        (table,) = lm.score([ScoreRequest(name, text)])
        if table is None:
            return None
        assert table.logsumexp is not None
        confidence = float(np.exp(table.next_logits[0] - table.logsumexp[0]))
        if confidence < least or np.prod([*confidences, confidence]) < floor:
            break
        text = np.append(text, table.next_ids).astype(np.int32)
        confidences.append(confidence)
        if np.prod(confidences) < WORTH_A_PASS * floor:
            break
    return Draft(text[len(ids) :], "eagle3", np.array(confidences, dtype=np.float32), num_passes=num_passes)


@pytest.mark.parametrize(("floor", "least"), [(0.0, 0.0), (5e-3, 0.0), (0.0, 0.08), (1.1, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_what_it_drafts_in_one_call_is_what_it_says_when_asked_token_by_token(
    norm_before_residual: bool, dtype: torch.dtype, floor: float, least: float
) -> None:
    head = tiny_head(2, norm_before_residual=norm_before_residual).to(dtype)
    runner = runner_of(head, max_length=CAPACITY)
    assert isinstance(runner, NativeEagle3)
    features = KnownFeatures()
    at_once, by_token = make_lm(head, runner, features), make_lm(head, runner, features)
    texts = {"a": random_ids(20, 1), "b": random_ids(7, 2), "c": random_ids(30, 3)}
    for lm in (at_once, by_token):
        for name, ids in texts.items():
            lm.open(name, ids)
    lengths = set()
    # Each round keeps a drafted token and adds one of its own; the target has not been at the last `behind` positions.
    for round_, (counts, behind) in enumerate([((4, 1, 3), 0), ((2, 4, 0), 1), ((3, 3, 3), 3), ((1, 4, 4), 0)]):
        features.known = {name: len(ids) - 1 - behind * (name != "c") for name, ids in texts.items()}
        requests = [ScoreRequest(name, ids) for name, ids in texts.items()]
        drafts = at_once.draft(requests, stops(*counts, floor=floor, least=least))
        assert drafts is not None
        for (name, ids), count, draft in zip(texts.items(), counts, drafts, strict=True):
            assert draft is not None
            lengths.add(len(draft))
            if count == 0:
                assert (len(draft), draft.num_passes) == (0, 0)
                continue
            expected = drafted_by_token(by_token, name, ids, count, floor=floor, least=least)
            assert expected is not None
            assert draft.ids.tolist() == expected.ids.tolist()
            assert draft.num_passes == expected.num_passes
            if len(draft):
                assert draft.confidences == pytest.approx(expected.confidences, rel=1e-5)
                texts[name] = np.append(ids, [draft.ids[0], 5 + round_]).astype(np.int32)
    assert max(lengths) == (0 if floor > 1 else 4)
    assert floor == least == 0.0 or len(lengths) > 2 or floor > 1


def test_a_text_without_features_gets_no_draft_and_a_long_one_none_before_it_is_read() -> None:
    head, ids = tiny_head(2), {"a": random_ids(20, 1), "b": random_ids(90, 2)}
    runner = runner_of(head, max_length=CAPACITY)
    features = KnownFeatures()
    lm = make_lm(head, runner, features, prefill_chunk=48)
    for name, text in ids.items():
        lm.open(name, text)
    features.known = {"a": 0, "b": 89}
    requests = [ScoreRequest(name, text) for name, text in ids.items()]
    assert lm.draft(requests, stops(4, 4)) == [None, None]
    features.known["a"] = 19
    drafts = lm.draft(requests, stops(2, 2))
    assert drafts is not None
    for request, draft in zip(requests, drafts, strict=True):
        assert draft is not None
        assert draft.ids[0] == expected_token(head, request.ids, len(request.ids) - 1)


def test_by_torch_it_is_asked_token_by_token() -> None:
    head, ids = tiny_head(2), random_ids(20, 1)
    lm = make_lm(head, TorchEagle3(head, max_length=CAPACITY), KnownFeatures())
    lm.open("a", ids)
    assert lm.draft([ScoreRequest("a", ids)], stops(4)) is None
    assert lm.score([ScoreRequest("a", ids)])[0] is not None


def test_after_rejections_and_missed_rounds_it_drafts_as_if_it_had_read_the_text_afresh() -> None:
    head, ids = tiny_head(3), random_ids(40, 4)
    for runner in runners(head):
        features = KnownFeatures()
        lm, fresh = make_lm(head, runner, features), make_lm(head, runner, features)
        lm.open("a", ids[:10])
        for committed in (10, 11, 14, 15, 29, 40):  # some rounds draft, some are another drafter's
            features.known["a"] = committed - 1
            wrong = np.concatenate([ids[:committed], random_ids(3, committed)])
            for length in range(committed, committed + 4):
                lm.score([ScoreRequest("a", wrong[:length])])
            (table,) = lm.score([ScoreRequest("a", ids[:committed])])
            fresh.open("a", ids[:0])
            (expected,) = fresh.score([ScoreRequest("a", ids[:committed])])
            fresh.close("a")
            assert table is not None
            assert expected is not None
            assert table.next_ids[0] == expected.next_ids[0]
            assert table.next_logits[0] == pytest.approx(expected.next_logits[0], abs=1e-4)


def test_its_own_outputs_stand_in_where_the_target_has_not_been_and_give_way_when_it_has() -> None:
    head, ids = tiny_head(5), random_ids(30, 6)
    for runner in runners(head):
        features = KnownFeatures()
        lm = make_lm(head, runner, features)
        lm.open("a", ids[:10])
        for length, known in ((12, 9), (18, 9), (18, 14), (25, 20), (30, 29)):
            features.known["a"] = known
            (table,) = lm.score([ScoreRequest("a", ids[:length])])
            assert table is not None
            assert table.next_ids[0] == expected_token(head, ids[:length], known), (length, known)


def test_without_features_there_is_no_draft_and_neighbours_go_on() -> None:
    head = tiny_head()
    for runner in runners(head):
        features = KnownFeatures()
        lm = make_lm(head, runner, features)
        ids = random_ids(12, 7)
        for name in ("fed", "feeding", "short"):
            lm.open(name, ids)
        features.known["feeding"] = 0
        fed, feeding, short = lm.score(
            [ScoreRequest("fed", ids), ScoreRequest("feeding", ids), ScoreRequest("short", ids[:1])]
        )
        assert feeding is None
        assert short is None
        assert fed is not None
        assert fed.next_ids[0] == expected_token(head, ids, 11)


def test_prompts_share_a_chunk_of_positions_a_call_and_who_follows_goes_on() -> None:
    head, long = tiny_head(9), random_ids(80, 9)
    other, follower = random_ids(60, 10), random_ids(40, 11)
    for runner in runners(head):
        widths: list[int] = []
        counting = CountingRunner(runner, widths)
        lm = make_lm(head, counting, KnownFeatures(), prefill_chunk=48)
        for name, ids in (("follower", follower), ("long", long), ("other", other)):
            lm.open(name, ids[:0])
        lm.score([ScoreRequest("follower", follower[:38])])
        widths.clear()
        found = []
        for _ in range(3):
            requests = [ScoreRequest("long", long), ScoreRequest("follower", follower), ScoreRequest("other", other)]
            found.append(lm.score(requests))
        assert [[table is not None for table in tables] for tables in found] == [
            [False, True, False],
            [True, True, False],
            [True, True, True],
        ]
        # A chunk of 48 of what is long; a rest of few positions comes on top, as does what a follower lacks. Whoever is
        # done has its last position read anew, and no output of a part stands in for what is not read.
        assert widths == [48 + 2, 31 + 1 + 48, 1 + 1 + 11]
        long_table, _, other_table = found[-1]
        assert long_table is not None
        assert other_table is not None
        assert long_table.next_ids[0] == expected_token(head, long, len(long) - 1)
        assert other_table.next_ids[0] == expected_token(head, other, len(other) - 1)


def test_a_batch_changes_no_row_and_draws_are_coupled_to_position_and_seed() -> None:
    head, ids = tiny_head(8), random_ids(25, 9)
    sampling = Sampling(temperature=0.8, seed=3)
    runner = runners(head)[-1]
    alone, together = make_lm(head, runner, KnownFeatures()), make_lm(head, runner, KnownFeatures())
    for lm in (alone, together):
        lm.open("a", ids)
    together.open("b", ids[:9])
    (one,) = alone.score([ScoreRequest("a", ids, sampling=sampling)])
    two, _ = together.score([ScoreRequest("a", ids, sampling=sampling), ScoreRequest("b", ids[:9])])
    assert one is not None
    assert two is not None
    assert one.next_ids.tolist() == two.next_ids.tolist()
    assert one.next_logits.tolist() == two.next_logits.tolist()
    assert set(one.next_ids.tolist()) <= set(head.target_ids.tolist())
    with pytest.raises(ValueError, match="num_rows must be 1"):
        alone.score([ScoreRequest("a", ids, num_rows=2)])


@pytest.mark.parametrize("layout", ["authors", "speculators"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_both_layouts_are_read(tmp_path: Path, layout: str, norm_before_residual: bool) -> None:
    head = tiny_head(1, norm_before_residual=norm_before_residual)
    write_head(head, tmp_path, layout=layout)
    assert is_eagle3(str(tmp_path))
    read = load_eagle3(str(tmp_path), target="not needed", dtype=torch.float32)
    assert read.config.norm_before_residual == norm_before_residual
    for name, tensor in head.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    assert torch.equal(read.target_ids, head.target_ids)
    ids = random_ids(9, 2)
    assert torch.equal(plain_output(read, features_of(ids), ids), plain_output(head, features_of(ids), ids))


def test_pickled_weights_are_read_as_weights_only(tmp_path: Path) -> None:
    head = tiny_head(1)
    write_head(head, tmp_path)
    from safetensors.torch import load_file

    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert load_eagle3(str(tmp_path), target="not needed", dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": True}, "norm_before_fc=True"),
        ({"fc_norm": "rms"}, "fc_norm='rms'"),
        ({"mystery": 1}, "config key 'mystery'"),
        ({"speculators_model_type": "eagle"}, "must be 'eagle3'"),
        ({"draft_vocab_size": DRAFT_VOCAB + 1}, "'d2t' has shape"),
        ({"target_hidden_size": 32}, "'fc.weight' has shape"),
        ({"transformer_layer_config": {"hidden_act": "gelu"}}, "hidden_act must be 'silu'"),
        ({"transformer_layer_config": {"num_hidden_layers": 2}}, "num_hidden_layers must be 1"),
        ({"transformer_layer_config": {"sliding_window": 512}}, "sliding_window=512"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_head(tiny_head(), tmp_path, layout="speculators", **changes)
    with pytest.raises(ModelError, match=message):
        load_eagle3(str(tmp_path), target="not needed", dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": True}, "norm_before_fc=True"),
        ({"fc_norm": True}, "fc_norm=True"),
        ({"mystery": 1}, "config key 'mystery'"),
        ({"eagle_config": {"mystery": 1}}, r"config key 'eagle_config\.mystery'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"eagle_config\.use_aux_hidden_state=False"),
        ({"eagle_config": {"norm_before_fc": True}}, r"eagle_config\.norm_before_fc=True"),
        ({"sliding_window": 512}, "sliding_window=512"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ],
)
def test_nor_is_it_ignored_in_the_authors_layout(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_head(tiny_head(), tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_eagle3(str(tmp_path), target="not needed", dtype=torch.float32)


def test_what_a_llama_config_says_of_other_things_is_let_pass(tmp_path: Path) -> None:
    """The whole config of a layer, and what training left in it."""
    whole = LlamaConfig(**_LAYER).to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 9], "use_last_layernorm": True,
                         "use_aux_hidden_state": True, "use_mtp_layernorm": None, "parallel_draft_step": 1},
        "torch_dtype": "bfloat16", "rope_theta": 10000.0, "rope_scaling": None, "max_window_layers": 36,
        "sliding_window": 4096, "use_sliding_window": False,
    }  # fmt: skip
    write_head(tiny_head(), tmp_path, **whole)
    assert read_eagle3_config(str(tmp_path)).feature_layers == (1, 4, 9)


def test_unknown_and_missing_tensors_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_head(tiny_head(), tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    save_file(whole | {"midlayer.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'midlayer.extra' is unknown"):
        load_eagle3(str(tmp_path), target="not needed", dtype=torch.float32)
    whole.pop("fc.weight")
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'fc.weight' is missing"):
        load_eagle3(str(tmp_path), target="not needed", dtype=torch.float32)


def test_feature_layers_are_the_usual_three_or_the_checkpoints_own(tmp_path: Path) -> None:
    write_head(tiny_head(), tmp_path, layout="speculators")
    assert read_eagle3_config(str(tmp_path)).layers_of(30) == (2, 15, 27)
    write_head(tiny_head(), tmp_path, layout="speculators", eagle_aux_hidden_state_layer_ids=[1, 4, 9])
    assert read_eagle3_config(str(tmp_path)).layers_of(10) == (1, 4, 9)
    with pytest.raises(ModelError, match="the target has 8"):
        read_eagle3_config(str(tmp_path)).layers_of(8)
