"""Training on a toy, end to end: the head drafts what its target goes on to say, and a killed training resumes."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.drafters.model import ModelDrafter
from serving.models.eagle3 import Eagle3Config, Eagle3Head
from serving.models.eagle3_checkpoint import is_eagle3
from serving.models.eagle3_load import load_eagle3_lm
from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVStore
from serving.models.loading import LoadOptions
from serving.models.memory_plan import MemoryPlan
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.protocols import DraftRequest, ScoreRequest
from serving.types import Ids
from tests.models.test_packed_lm import random_ids
from tests.models.tiny import FAMILIES, VOCAB, tiny_model
from tuning.selfgen import Dialogue
from tuning.train_drafter import draft_vocabulary
from tuning.train_eagle3 import Eagle3Progress, Eagle3Recipe, Objective, export, train
from tuning.train_features import Example, FeatureFolder, FeatureSet
from tuning.train_loop import Checkpoint
from tuning.train_start import TargetHead, blank_head, feature_scale, start

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS, CAPACITY, PROMPT, ANSWER = 8, 64, 6, 24
LAYERS = Eagle3Config(tiny_model("llama").config, 0, 0).layers_of(NUM_LAYERS)
RECIPE = Eagle3Recipe(
    vocab_size=120, epochs=120, learning_rate=6e-3, tokens_per_batch=256, max_length=CAPACITY, steps_per_checkpoint=5,
    shards=2,
)  # fmt: skip


def network() -> torch.nn.Module:
    made: torch.nn.Module = tiny_model("llama", num_hidden_layers=NUM_LAYERS)
    return made


def target(*, feature_layers: tuple[int, ...]) -> PackedLM:
    decoder = HFDecoder(network())
    store = KVStore(decoder.shapes, 2, CAPACITY, torch.float32, feature_layers=feature_layers, hidden=64)
    return PackedLM(decoder, store, head=HeadOptions(VOCAB), prefill_chunk=64)


def own_text(model: PackedLM, number: int) -> Dialogue:
    """A random prompt and what the target says to it."""
    ids: Ids = random_ids(PROMPT, number)
    model.open("text", ids)
    for _ in range(ANSWER):
        (table,) = model.score([ScoreRequest("text", ids)])
        assert table is not None
        ids = np.append(ids, table.next_ids).astype(np.int32)
    model.close("text")
    return Dialogue(ids[:PROMPT], ids[PROMPT:])


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    model = target(feature_layers=())
    return [own_text(model, number) for number in range(8)]


def run(
    dialogues: list[Dialogue], work: Path, *, stop_at: int | None = None, recipe: Eagle3Recipe = RECIPE
) -> tuple[Eagle3Head, list[Eagle3Progress]]:
    folder = FeatureFolder(work / "features", "tiny", (*LAYERS, NUM_LAYERS))
    folder.read(target(feature_layers=folder.layers), dialogues)
    data = folder.all([dialogues])
    target_ids = draft_vocabulary(dialogues, size=recipe.vocab_size, target_size=VOCAB)
    torch.manual_seed(0)
    head, target_head, seen = blank_head(network(), target_ids), TargetHead(network(), target_ids), []
    start(head, target_head, data, on_share=lambda _: None)

    def on_step(progress: Eagle3Progress) -> None:
        seen.append(progress)
        if progress.step == stop_at:
            raise KeyboardInterrupt

    train(
        head,
        target_head,
        recipe,
        data,
        checkpoint=Checkpoint(work / "checkpoint.pt", {}),
        on_step=on_step,
    )
    return head, seen


def test_the_head_drafts_what_the_target_goes_on_to_say(dialogues: list[Dialogue], tmp_path: Path) -> None:
    network().save_pretrained(tmp_path / "base")
    head, seen = run(dialogues, tmp_path)
    assert seen[-1].loss < 0.7 * seen[0].loss
    assert min(seen[-1].agreement) > 0.9
    export(head, tmp_path / "out", base=str(tmp_path / "base"), recipe=RECIPE, card={"note": "toy"})
    assert is_eagle3(str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "eagle3.json").read_text())["recipe"]["steps_ahead"] == 4
    model = target(feature_layers=LAYERS)
    options = LoadOptions(
        role="head", dtype="float32", num_rows=2, max_length=CAPACITY, prefill_chunk=64, vocab_size=VOCAB
    )
    lm = load_eagle3_lm(str(tmp_path / "out"), target=str(tmp_path / "base"), features=model, options=options)
    assert "head" in {item.role for item in MemoryPlan.on(torch.device("cpu"), ()).items}  # its rows count for others
    drafter = ModelDrafter(lm, max_length=CAPACITY, source="eagle3")
    accepted = []
    for number, dialogue in enumerate(dialogues):
        name, ids = str(number), dialogue.ids
        model.open(name, ids[:0])
        for length in range(PROMPT + 1, len(ids) - 4, 3):
            model.score([ScoreRequest(name, ids[: length - 1])])
            (draft,) = drafter.start([DraftRequest(name, ids[:length], PROMPT, 4)]).result()
            agrees = draft.ids == ids[length : length + 4]
            accepted.append(int(np.cumprod(agrees).sum()))
        model.close(name)
        drafter.close(name, None)
    assert np.mean(accepted) > 1.5


class Texts(FeatureSet):
    """Random texts whose last hidden state is a linear map of the features and of the next token's embedding."""

    def __init__(
        self, made: torch.nn.Module, *, count: int, num_features: int, hidden: int, features: float = 1.0
    ) -> None:
        super().__init__((), ())
        noise = torch.Generator().manual_seed(0)
        mix = torch.randn(num_features + hidden, hidden, generator=noise)
        mix[:num_features] *= features
        sizes = 10.0 ** torch.linspace(-1, 2, num_features)
        embedding = made.get_input_embeddings().weight
        self.lengths = [40] * count
        self.examples = []
        for number in range(count):
            ids = torch.from_numpy(random_ids(40, number)).long()
            plain = torch.randn(40, num_features, generator=noise)
            token = torch.nn.functional.rms_norm(embedding[ids], embedding.shape[1:])
            hidden_at = torch.cat([plain, token.roll(-1, 0)], dim=-1) @ mix
            self.examples.append(Example(ids, 6, (plain * sizes)[:-1], hidden_at.roll(1, 0)[:-1]))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("heard", ["features and token", "token"])
def test_a_head_of_any_family_starts_where_a_linear_map_says_what_the_target_will(family: str, heard: str) -> None:
    made = tiny_model(family)
    texts = Texts(made, count=200, num_features=192, hidden=64, features=float(heard != "token"))
    head, target_head = started(made, texts, torch.arange(VOCAB))
    with torch.no_grad():
        head.fc.weight.mul_(scale := feature_scale(texts))
    objective = Objective(head, target_head, Eagle3Recipe(steps_ahead=1), scale)
    batch = objective._pad([texts[i] for i in range(190, 200)])
    loss, _, ((agreed, said),) = objective.loss(batch)
    assert agreed > 0.3 * said  # by chance 1 / 199
    assert loss < math.log(VOCAB) * batch.weights.sum()  # what a head that knows nothing would have


@pytest.mark.parametrize("count", [1, 4])
def test_a_few_texts_are_enough_to_start(count: int) -> None:
    made = tiny_model("llama")
    head, target_head = started(made, Texts(made, count=count, num_features=192, hidden=64), torch.arange(VOCAB))
    hidden = torch.randn(64, 64)
    loudness = head.norm.weight.norm() / target_head.normed(hidden).square().mean(dim=0).sqrt().norm()
    assert loudness > 0.05


@pytest.mark.parametrize("heads", [2, 8])
def test_a_head_may_be_narrower_or_wider_than_its_stream(heads: int) -> None:
    made = tiny_model("llama", num_attention_heads=heads)
    head, _ = started(made, Texts(made, count=200, num_features=192, hidden=64), torch.arange(VOCAB))
    assert head.midlayer.self_attn.o_proj.weight.shape == (64, 16 * heads)


def started(made: torch.nn.Module, texts: FeatureSet, ids: torch.Tensor) -> tuple[Eagle3Head, TargetHead]:
    torch.manual_seed(0)
    head, target_head = blank_head(made, ids), TargetHead(made, ids)
    start(head, target_head, texts, on_share=lambda _: None)
    return head, target_head


@pytest.mark.parametrize(("num_prompt", "first"), [(1, 0), (2, 0), (6, 4), (15, 13), (16, 14), (40, 14)])
def test_prompts_of_any_length_weigh_their_own_entries_and_no_padding(num_prompt: int, first: int) -> None:
    """Sixteen tokens are learnt from: fourteen entries, the last of which predicts the last token."""
    made = network()
    head = blank_head(made, torch.arange(VOCAB))
    objective = Objective(head, TargetHead(made, head.target_ids), Eagle3Recipe(max_length=16), torch.ones(3 * 64))
    batch = objective._pad([example(40, num_prompt), example(40, 6), example(9, min(num_prompt, 8))])
    assert batch.weights[0].tolist() == pytest.approx([0.1] * first + [1.0] * (14 - first))
    assert batch.weights[2, 7:].tolist() == [0.0] * 7


def test_the_loss_of_each_step_is_that_of_the_entries_that_drafting_gets_to() -> None:
    """The second step is behind entries whose draft is the text's next token, and no others."""
    made = tiny_model("llama")
    head, target_head = blank_head(made, torch.arange(VOCAB)), TargetHead(made, torch.arange(VOCAB))
    objective = Objective(head, target_head, Eagle3Recipe(steps_ahead=2), torch.ones(3 * 64))
    batch = objective._pad([example(40, 5), example(27, 3)])
    first = objective._unroll.first(batch.features, batch.next_ids)
    said = head.target_ids[head.logits(first.out).argmax(-1)]
    batch.next_ids[0, 8], batch.next_ids[1, 5] = said[0, 7], said[1, 4]  # the first step reads no token behind its own
    first = objective._unroll.first(batch.features, batch.next_ids)
    second = objective._unroll.next(first, torch.ones_like(first.is_real))
    assert second is not None
    said = head.target_ids[head.logits(first.out).argmax(-1)]
    expected, entries, reached = 0.0, [0, 0], [0, 0]
    for row, p in product(range(2), range(batch.weights.shape[1])):
        weight = float(batch.weights[row, p])
        outs = [first.out[row, p]]
        if p > 0 and batch.weights[row, p - 1] > 0 and said[row, p - 1] == batch.next_ids[row, p]:
            outs.append(second.out[row, p - 1])
        for step, out in enumerate(outs):
            expected -= weight * float((batch.probs[row, p] * head.logits(out).log_softmax(-1)).sum().detach())
            entries[step] += weight == 1.0
            reached[step] += weight > 0
    loss, num_reached, agreed = objective.loss(batch)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert num_reached == sum(reached)
    assert [said for _, said in agreed] == entries
    assert entries[1] >= 2


def test_shards_and_batches_without_answers_weigh_by_their_entries() -> None:
    made = tiny_model("llama")
    objective = Objective(
        blank_head(made, torch.arange(VOCAB)), TargetHead(made, torch.arange(VOCAB)), Eagle3Recipe(), torch.ones(3 * 64)
    )
    examples = [example(20, 5), example(9, 3), example(30, 30)]
    whole, parts = objective.gradients(examples), [objective.gradients([one]) for one in examples]
    assert whole.num_entries == sum(part.num_entries for part in parts)
    for sums in zip(whole.gradients, *(part.gradients for part in parts), strict=True):
        torch.testing.assert_close(sums[0], sum(sums[1:]), atol=1e-3, rtol=1e-3)
    only_prompt = objective.gradients([example(30, 30)])
    assert only_prompt.loss < 0.2 * math.log(VOCAB) * only_prompt.num_entries * 3


def test_texts_too_short_for_any_step_change_nothing() -> None:
    made = tiny_model("llama")
    objective = Objective(
        blank_head(made, torch.arange(VOCAB)), TargetHead(made, torch.arange(VOCAB)), Eagle3Recipe(), torch.ones(3 * 64)
    )
    for length in (0, 1, 2, 3, 4):
        for beside in ([], [example(12, 5)]):
            found = objective.gradients([example(length, 1), *beside])
            assert math.isfinite(found.loss)
            assert all(bool(gradient.isfinite().all()) for gradient in found.gradients)


def example(length: int, num_prompt: int) -> Example:
    ids = torch.from_numpy(random_ids(length, length)).long()
    rows = max(0, length - 1)
    return Example(ids, num_prompt, torch.randn(rows, 3 * 64), torch.randn(rows, 64))


def test_a_killed_training_resumes_to_the_same_end(dialogues: list[Dialogue], tmp_path: Path) -> None:
    recipe = Eagle3Recipe(**{**RECIPE.__dict__, "epochs": 12})
    whole, _ = run(dialogues, tmp_path / "whole", recipe=recipe)
    with pytest.raises(KeyboardInterrupt):
        run(dialogues, tmp_path / "cut", stop_at=8, recipe=recipe)
    resumed, seen = run(dialogues, tmp_path / "cut", recipe=recipe)
    assert seen[0].step == 6
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
