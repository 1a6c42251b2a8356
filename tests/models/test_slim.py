"""Masked models: in place and loaded from only the kept layers, against the stock model with layers taken out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.build_via import mask_of
from serving.config import ModelConfig, Profile, SuffixDrafter, ViaVerifier
from serving.config_mask import LayerMask, read_mask
from serving.errors import ConfigError, ModelError
from serving.models.digest import model_digest
from serving.models.hf_decoder import HFDecoder
from serving.models.loading import LoadOptions, load_packed_lm, plan_memory, read_config
from serving.models.native import load_native
from serving.models.native_decoder import NativeDecoder, supports
from serving.models.slim import SeededSlim, load_kept_network, slim_in_place
from serving.protocols import ScoreRequest
from tests.models.test_packed_lm import CAPACITY, make_lm, random_ids, stock_logits
from tests.models.tiny import FAMILIES, VOCAB, tiny_model

DEEP = 6
KEPT = (0, 2, 5)


def without_layers(network: Any, kept: tuple[int, ...]) -> Any:
    """The stock model whose other layers add nothing to the residual stream: each returns what it gets."""
    for index, layer in enumerate(network.get_decoder().layers):
        if index not in kept:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    return network


def poisoned(network: Any, kept: tuple[int, ...]) -> Any:
    for index, layer in enumerate(network.get_decoder().layers):
        if index not in kept:
            for parameter in layer.parameters():
                parameter.data.fill_(float("nan"))
    return network


def deep(family: str = "llama") -> Any:
    return tiny_model(family, num_hidden_layers=DEEP)


def decoders(family: str = "llama", *, clean: tuple[int, ...] | None = None) -> list[Any]:
    """Every decoder that claims `family`, each with its own copy of the same weights; NaN but for layers `clean`."""

    def network() -> Any:
        return deep(family) if clean is None else poisoned(deep(family), clean)

    kernels = load_native()
    if kernels is None or not supports(deep(family), kernels):
        return [HFDecoder(network())]
    return [HFDecoder(network()), NativeDecoder(network(), kernels, max_length=CAPACITY)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_in_place_equals_the_stock_model_without_those_layers(family: str) -> None:
    ids = random_ids(37, 1)
    expected = stock_logits(without_layers(deep(family), KEPT), ids)
    whole = stock_logits(deep(family), ids)
    for decoder in decoders(family):
        target = make_lm(decoder)
        slim = slim_in_place(target, KEPT)
        assert len(slim.store.keys) == len(KEPT)
        torch.testing.assert_close(slim.all_logits(ids), expected, atol=1e-3, rtol=0)
        torch.testing.assert_close(target.all_logits(ids), whole, atol=1e-3, rtol=0)  # the target runs all of them
        assert slim.decoder.num_bytes < target.decoder.num_bytes


def test_poisoned_layers_that_are_skipped_change_nothing() -> None:
    ids = random_ids(37, 2)
    expected = stock_logits(without_layers(deep(), KEPT), ids)
    for decoder in decoders(clean=KEPT):
        target = make_lm(decoder)
        assert torch.isnan(target.all_logits(ids)).all()
        torch.testing.assert_close(slim_in_place(target, KEPT).all_logits(ids), expected, atol=1e-3, rtol=0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny Llama on disk from which the layers that are not kept have been removed."""
    deep().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    skipped = tuple(f"model.layers.{index}." for index in range(DEEP) if index not in KEPT)
    state = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(skipped)}
    save_file(state, path, metadata={"format": "pt"})
    return tmp_path


def options(**fields: Any) -> LoadOptions:
    values = {
        "role": "slim", "dtype": "float32", "num_rows": 2, "max_length": 128, "prefill_chunk": 64, "vocab_size": VOCAB
    }  # fmt: skip
    return LoadOptions(**values | fields)


def test_only_the_kept_layers_are_loaded(checkpoint: Path) -> None:
    ids = random_ids(37, 3)
    expected = stock_logits(without_layers(deep(), KEPT), ids)
    slim = load_packed_lm(str(checkpoint), options(kept=KEPT))
    torch.testing.assert_close(slim.all_logits(ids), expected, atol=1e-3, rtol=0)
    plan = plan_memory(read_config(str(checkpoint)), options(kept=KEPT))
    weights = {item.purpose: item.num_bytes for item in plan.items}["weights"]
    whole = plan_memory(read_config(str(checkpoint)), options())
    assert weights < {item.purpose: item.num_bytes for item in whole.items}["weights"]
    network = load_kept_network(str(checkpoint), KEPT, torch.float32)
    assert sum(parameter.nbytes for parameter in network.parameters()) == weights


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_without_the_layers_it_skips(family: str, tmp_path: Path) -> None:
    ids = random_ids(20, 4)
    poisoned(deep(family), KEPT).save_pretrained(tmp_path)
    slim = load_packed_lm(str(tmp_path), options(kept=KEPT))
    expected = stock_logits(without_layers(deep(family), KEPT), ids)
    torch.testing.assert_close(slim.all_logits(ids), expected, atol=1e-3, rtol=0)


def test_a_checkpoint_that_lacks_a_kept_layer_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"no 'model\.layers\.1\."):
        load_packed_lm(str(checkpoint), options(kept=(0, 1, 5)))


def test_blocks_rollbacks_and_catch_up_equal_a_fresh_prefill() -> None:
    ids, wrong = random_ids(60, 5), random_ids(6, 6)
    for decoder in decoders():
        slim = slim_in_place(make_lm(decoder), KEPT)
        fresh = slim.all_logits(ids)
        slim.open("a", ids)
        slim.score([ScoreRequest("a", np.concatenate([ids[:20], wrong]), num_rows=7)])
        (table,) = slim.score([ScoreRequest("a", ids, num_rows=21)])
        assert table is not None
        assert table.logsumexp is not None
        np.testing.assert_array_equal(table.next_ids, fresh[39:].argmax(dim=-1))
        np.testing.assert_allclose(table.top_logits, fresh[39:].max(dim=-1).values, atol=1e-4)


def test_rows_seeded_from_the_full_model_are_its_own_at_the_kept_layers() -> None:
    ids = random_ids(40, 7)
    for decoder in decoders():
        full = make_lm(decoder)
        slim = slim_in_place(full, KEPT)
        seeded = SeededSlim(slim, full, KEPT)
        full.open("a", ids)
        seeded.open("a", ids)
        full.score([ScoreRequest("a", ids)])
        (table,) = seeded.score([ScoreRequest("a", ids, prompt_len=30)])
        assert table is not None
        for slot, layer in enumerate(KEPT):
            assert torch.equal(slim.store.keys[slot][0, :, :30], full.store.keys[layer][0, :, :30])
        assert not torch.equal(slim.store.keys[1][0, :, 30:40], full.store.keys[KEPT[1]][0, :, 30:40])


def test_seeding_depends_on_no_answer_before() -> None:
    """The row of an answer that has ended holds the slim model's own KV of it, which the next turn does not take."""
    prompt, longer = random_ids(60, 8), 50

    def second_turn(*, after_first: bool) -> tuple[torch.Tensor, Any]:
        full = make_lm(HFDecoder(deep()))
        slim = slim_in_place(full, KEPT)
        seeded = SeededSlim(slim, full, KEPT)
        for name, prompt_len in (("first", 30), ("second", longer)) if after_first else (("second", longer),):
            full.open(name, prompt)
            assert seeded.open(name, prompt) == 0
            full.score([ScoreRequest(name, prompt)])
            (table,) = seeded.score([ScoreRequest(name, prompt, prompt_len=prompt_len)])
            keys = slim.store.keys[1][slim.store.row(name).index, :, :longer].clone()
            full.close(name)
            seeded.close(name)
        return keys, table

    cold_keys, cold = second_turn(after_first=False)
    warm_keys, warm = second_turn(after_first=True)
    assert torch.equal(warm_keys, cold_keys)
    np.testing.assert_array_equal(warm.top_logits, cold.top_logits)


def test_the_shipped_mask_is_for_the_embedded_model_and_keeps_its_ends() -> None:
    mask = read_mask("smollm2-135m-via")
    mask.check("smollm2-135m-instruct", 30)
    assert (mask.kept[0], mask.kept[-1]) == (0, 29)
    assert mask.digest == model_digest("smollm2-135m-instruct")


def test_a_mask_fits_weights_under_any_name_and_no_others_under_the_same(tmp_path: Path) -> None:
    def mask_for(target: Path, digest: str | None) -> LayerMask:
        layers = LayerMask(model=str(tmp_path / "a"), num_layers=DEEP, kept=KEPT, digest=digest)
        verifier = ViaVerifier(layers=layers)
        profile = Profile(name="p", target=ModelConfig(model=str(target)), drafter=SuffixDrafter(), verifier=verifier)
        return mask_of(profile, verifier)

    for name in ("a", "b"):
        deep().save_pretrained(tmp_path / name)
    digest = model_digest(str(tmp_path / "a"))
    assert mask_for(tmp_path / "b", digest).kept == KEPT
    with pytest.raises(ConfigError, match=r"searched for '.*a' with 6 layers, the target is '.*b' with 6; .* or name"):
        mask_for(tmp_path / "b", None)
    tiny_model("llama", num_hidden_layers=DEEP, seed=1).save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="and other weights; search again"):
        mask_for(tmp_path / "a", digest)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"num_layers": 3, "kept": [0, 2]}, "model"),
        ({"model": "m", "num_layers": 3, "kept": [0, 3]}, r"within 0\.\.2"),
        ({"model": "m", "num_layers": 3, "kept": [2, 0]}, "ascending"),
        ({"model": "other", "num_layers": 3, "kept": [0, 2]}, "searched for 'other'"),
        ({"model": "m", "num_layers": 4, "kept": [0, 3]}, "with 4 layers"),
        ({"model": "m", "num_layers": 3, "kept": [1, 2]}, "must hold the first and the last layer, 0 and 2"),
        ({"model": "m", "num_layers": 3, "kept": [0, 1]}, "must hold the first and the last layer, 0 and 2"),
        ("nonsense", "no JSON"),
    ],
)
def test_a_bad_mask_is_refused_by_name(tmp_path: Path, content: object, complaint: str) -> None:
    path = tmp_path / "mask.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=complaint):
        read_mask(str(path)).check("m", 3)
