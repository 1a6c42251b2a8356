"""Text in the target's own words, by a model without weights: resumption, who wrote it, progress."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from serving.build import Built
from serving.config import Profile
from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Sink
from serving.drafters.ready import PlainDrafter
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest
from serving.types import Ids, as_ids
from tests.decode.scripted import ScriptedModel, make_scheduler, spell
from tuning.selfgen import Dialogue, SelfGeneration, generate, read_dialogues

STOP, ANSWER = 9, 20
PLAN = SelfGeneration(num_tokens=400, writer_key="scripted", most_in_part=4, max_question=12, max_answer=40)


class Letters:
    """A tokenizer of one token a character, whose chat template is `<words>`."""

    name = "letters"
    stop_ids = frozenset({STOP})

    def render_chat(self, messages: Sequence[dict[str, str]]) -> Ids:
        return self.encode_raw(f"<{messages[-1]['content']}>")

    def encode_raw(self, text: str) -> Ids:
        return as_ids([ord(letter) - ord("!") for letter in text.replace(" ", "_")])

    def decode_raw(self, ids: Ids) -> str:
        return spell(ids.tolist())


def next_token(ids: Sequence[int]) -> int:
    """Questions end after a few letters, answers when the whole is of a length that is divided by `ANSWER`."""
    is_answer = ids.count(ord(">") - ord("!")) > 0
    return STOP if len(ids) % (ANSWER if is_answer else 5) == 0 else 70


def scripted() -> tuple[Built, ScriptedModel]:
    model, limits = ScriptedModel(next_token), SchedulerLimits(4, 256, 64, 0)
    scheduler = make_scheduler(model, PlainDrafter(), max_draft=0)
    return Built(Profile(name="scripted"), scheduler, limits, cast(ChatTokenizer, Letters())), model


def written(folder: Path, plan: SelfGeneration = PLAN) -> tuple[list[list[int]], list[int], int]:
    """The dialogues, what `on_tokens` heard, and how many passes it took."""
    heard: list[int] = []
    built, model = scripted()
    paths = list(generate(built, folder, plan, on_tokens=heard.append))
    return [dialogue.ids.tolist() for dialogue in read_dialogues(paths)], heard, model.num_passes


def test_progress_is_told_answer_by_answer_and_a_second_run_writes_nothing(tmp_path: Path) -> None:
    texts, heard, passes = written(tmp_path)
    assert sum(heard) >= PLAN.num_tokens
    assert len(heard) >= len(texts) > PLAN.part_size
    assert passes > 0
    again, heard_again, passes_again = written(tmp_path)
    assert (again, passes_again) == (texts, 0)
    assert sum(heard_again) >= PLAN.num_tokens


def test_a_killed_run_goes_on_to_the_same_text(tmp_path: Path) -> None:
    texts, _, _ = written(tmp_path / "whole")
    built, _ = scripted()
    next(generate(built, tmp_path / "cut", PLAN, on_tokens=lambda _: None))
    assert written(tmp_path / "cut")[0] == texts


@pytest.mark.parametrize("other", [{"writer_key": "another"}, {"seed": 1}, {"temperature": 0.5}])
def test_text_of_another_writer_seed_or_way_of_writing_is_never_taken(tmp_path: Path, other: dict[str, object]) -> None:
    written(tmp_path)
    _, _, passes = written(tmp_path, replace(PLAN, **other))  # type: ignore[arg-type]
    assert passes > 0


def test_more_tokens_take_the_text_that_is_there(tmp_path: Path) -> None:
    texts, _, _ = written(tmp_path)
    more, _, _ = written(tmp_path, replace(PLAN, num_tokens=2 * PLAN.num_tokens))
    assert more[: len(texts)] == texts


@pytest.mark.parametrize("num_tokens", [1, 30, 100])
def test_little_text_is_little_work(tmp_path: Path, num_tokens: int) -> None:
    plan = replace(PLAN, num_tokens=num_tokens, most_in_part=32)
    texts, heard, _ = written(tmp_path, plan)
    assert plan.least_dialogues <= len(texts) < plan.most_in_part
    assert sum(heard) >= num_tokens


class Notes:
    """A keeper that is handed the name of every request as it ends."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.kept: list[list[list[int]]] = []

    def forget(self, request_id: str) -> None:
        self.open.remove(request_id)

    def keep(self, request_ids: Sequence[str], dialogues: Sequence[Dialogue]) -> None:
        for request_id in request_ids:
            self.open.remove(request_id)
        self.kept.append([dialogue.ids.tolist() for dialogue in dialogues])


def test_a_keeper_keeps_every_answer_with_its_part_and_no_question(tmp_path: Path) -> None:
    built, _ = scripted()
    notes = Notes()
    submit = built.scheduler.submit

    def noted(request: GenerationRequest, sink: Sink) -> None:
        notes.open.add(request.request_id)
        submit(request, sink)

    built.scheduler.submit = noted  # type: ignore[method-assign]
    paths = list(generate(built, tmp_path, PLAN, on_tokens=lambda _: None, keeper=notes))
    assert notes.kept == [[dialogue.ids.tolist() for dialogue in read_dialogues([path])] for path in paths]
