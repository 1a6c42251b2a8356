"""Text in the target's own words, to train drafters on: it writes the user's turn, then answers it.

The user's turn is sampled at T = 0.9 after a short stem, the answer is greedy, both by our own batched engine. Kept as
Parquet parts of `prompt_ids` and `output_ids`; a part is whole or absent, so a killed run resumes where it was.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serving.build import Built
from serving.decode.offline import Completion
from serving.errors import ConfigError
from serving.requests import Chunk, GenerationRequest, Limits, Sampling
from serving.types import Ids, as_ids

# Parts begun before one is whole: while its last answers end, those of the next alone do not fill the batch.
_MOST_AHEAD = 2

SCHEMA = pa.schema([("prompt_ids", pa.list_(pa.int32())), ("output_ids", pa.list_(pa.int32()))])
_MARK = "@@@"
_STEMS = (
    "Write", "Explain", "How", "What is", "Why", "Give me", "Can you", "Describe", "Summarize", "Create", "List",
    "Compare", "I want", "Help me", "Please", "Tell me about", "Translate", "Solve", "Calculate", "Who", "When did",
    "Where", "Which", "Is it", "Develop", "Design", "Imagine", "Suppose", "Analyze", "Discuss", "What are the",
    "How can I", "Write a Python function", "Write a story about", "A train", "There are", "If", "In the",
    "The following", "Rewrite", "Edit", "Convert", "Generate", "Suggest", "Provide", "Identify", "My", "I have",
    "You are", "Find",
)  # fmt: skip


@dataclass(frozen=True)
class Dialogue:
    """One prompt (whole chat template, up to the assistant's turn) and the target's greedy answer."""

    prompt_ids: Ids
    output_ids: Ids

    @property
    def ids(self) -> Ids:
        return np.concatenate([self.prompt_ids, self.output_ids])


@dataclass(frozen=True)
class SelfGeneration:
    """How much to write: `num_tokens` of answers. `writer_key` tells the target from others; same seed, same text."""

    num_tokens: int
    writer_key: str
    seed: int = 0
    most_in_part: int = 32
    max_question: int = 60
    max_answer: int = 300
    temperature: float = 0.9

    @property
    def least_dialogues(self) -> int:
        """So many there are at least, for no answer is longer than `max_answer`."""
        return -(-self.num_tokens // self.max_answer)

    @property
    def part_size(self) -> int:
        """Dialogues begun for one part: few where few are wanted."""
        return max(1, min(self.most_in_part, self.least_dialogues))

    @property
    def key(self) -> str:
        """16 hex digits of all that a part depends on beside its number."""
        return hashlib.sha256(repr((replace(self, num_tokens=0), self.part_size)).encode()).hexdigest()[:16]


class Keeper(Protocol):
    """Keeps something of its own of every answer, under the answer's request until its part is whole."""

    def forget(self, request_id: str) -> None:
        """That was a question, or nothing that is kept."""
        ...

    def keep(self, request_ids: Sequence[str], dialogues: Sequence[Dialogue]) -> None:
        """A part is whole, and is about to be written."""
        ...


def generate(
    built: Built, folder: Path, plan: SelfGeneration, *, on_tokens: Callable[[int], None], keeper: Keeper | None = None
) -> Iterator[Path]:
    """Write parts into `folder` until `plan.num_tokens` are there.

    `on_tokens` hears of every part that is there, and of every answer as it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    production = _Production(built, plan, on_tokens, keeper)
    total = 0
    for number in count():
        if total >= plan.num_tokens:
            return
        path = folder / f"part-{plan.key}-{number:05d}.parquet"
        if path.is_file():
            dialogues = read_dialogues([path])
            on_tokens(_num_tokens(dialogues))
        else:
            dialogues = production.finish(number, wanted=plan.num_tokens - total)
            write_dialogues(path, dialogues)
        total += _num_tokens(dialogues)
        yield path


def read_dialogues(paths: list[Path]) -> list[Dialogue]:
    """All dialogues of Parquet files with the two columns. Raises ConfigError naming a file without them."""
    dialogues = []
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"--data {path}: is no file")
        try:
            table = pq.read_table(path)
        except pa.ArrowInvalid:
            raise ConfigError(f"--data {path}: is no Parquet file") from None
        missing = {"prompt_ids", "output_ids"} - set(table.column_names)
        if missing:
            raise ConfigError(f"--data {path}: column {sorted(missing)[0]!r} is missing; it has {table.column_names}")
        rows = zip(table["prompt_ids"], table["output_ids"], strict=True)
        dialogues += [Dialogue(as_ids(p.values.to_numpy()), as_ids(o.values.to_numpy())) for p, o in rows]
    return dialogues


def text_key(dialogues: Sequence[Dialogue], model_key: str) -> str:
    """16 hex digits of a text and of the model that reads it: what of it is kept is found by them and no other."""
    digest = hashlib.sha256(model_key.encode())
    for dialogue in dialogues:
        digest.update(np.array([len(dialogue.prompt_ids), len(dialogue.output_ids)], dtype=np.int64).tobytes())
        digest.update(np.asarray(dialogue.ids, dtype=np.int32).tobytes())
    return digest.hexdigest()[:16]


def write_dialogues(path: Path, dialogues: list[Dialogue]) -> None:
    """All or nothing: the file appears under its name only when it is whole."""
    table = pa.table(
        {
            "prompt_ids": [dialogue.prompt_ids.tolist() for dialogue in dialogues],
            "output_ids": [dialogue.output_ids.tolist() for dialogue in dialogues],
        },
        schema=SCHEMA,
    )
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(path)


def _num_tokens(dialogues: Sequence[Dialogue]) -> int:
    """Of the answers."""
    return sum(len(dialogue.output_ids) for dialogue in dialogues)


def _answer_id(number: int, index: int) -> str:
    return f"{number}/{index}/"


def opening(built: Built, stem: str) -> Ids:
    """The template up to the user's words, then `stem`: what the model continues as the user."""
    tokenizer = built.tokenizer
    text = tokenizer.decode_raw(tokenizer.render_chat([{"role": "user", "content": stem + _MARK}]))
    if _MARK not in text:
        raise ConfigError(f"model {tokenizer.name!r}: its chat template does not carry the user's words through")
    return tokenizer.encode_raw(text.split(_MARK)[0])


@dataclass
class _Part:
    """One part while it is written: questions by index, then dialogues; `num_open` of them are under way."""

    questions: deque[GenerationRequest]
    num_open: int
    num_tokens: int = 0
    dialogues: dict[int, Dialogue] = field(default_factory=dict)


class _Production:
    """Writes part after part. Answers of one part share the batch with the next ones, so it never runs dry."""

    def __init__(
        self, built: Built, plan: SelfGeneration, on_tokens: Callable[[int], None], keeper: Keeper | None
    ) -> None:
        self._built = built
        self._plan = plan
        self._on_tokens = on_tokens
        self._keeper = keeper
        self._parts: dict[int, _Part] = {}
        self._answers: deque[GenerationRequest] = deque()
        self._open: dict[str, Completion] = {}
        self._prompts: dict[str, Ids] = {}

    def finish(self, number: int, *, wanted: int) -> list[Dialogue]:
        """Part `number`, whole. Works ahead on the next ones while fewer than `wanted` tokens are under way."""
        if number not in self._parts:
            self._begin(number)
        while self._parts[number].num_open:
            self._fill(number, wanted)
            self._built.scheduler.step()
        part = self._parts.pop(number)
        indices = sorted(part.dialogues)
        dialogues = [part.dialogues[index] for index in indices]
        if self._keeper is not None:
            self._keeper.keep([_answer_id(number, index) for index in indices], dialogues)
        return dialogues

    def _begin(self, number: int) -> None:
        plan, stops = self._plan, self._built.tokenizer.stop_ids
        rng = np.random.default_rng((plan.seed, number))
        stems = [str(stem) for stem in rng.choice(_STEMS, plan.part_size)]
        seeds = [int(seed) for seed in rng.integers(1 << 31, size=len(stems))]
        questions = deque(
            GenerationRequest(
                request_id=f"{number}/{index}/{stem}",
                prompt_ids=opening(self._built, stem),
                limits=Limits(plan.max_question, stops),
                sampling=Sampling(plan.temperature, seed),
            )
            for index, (stem, seed) in enumerate(zip(stems, seeds, strict=True))
        )
        self._parts[number] = _Part(questions, len(questions))

    def _fill(self, number: int, wanted: int) -> None:
        # None waits: an answer then finds the KV row of its question, which has just become free.
        while len(self._open) < self._built.limits.max_sessions:
            request = self._next_request(number, wanted)
            if request is None:
                return
            self._open[request.request_id] = Completion(request.request_id)
            self._built.scheduler.submit(request, self._take)

    def _next_request(self, number: int, wanted: int) -> GenerationRequest | None:
        if self._answers:
            return self._answers.popleft()
        newest = max(self._parts)
        under_way = sum(part.num_tokens for part in self._parts.values())
        if not self._parts[newest].questions and newest < number + _MOST_AHEAD and under_way < wanted:
            newest += 1
            self._begin(newest)
        return self._parts[newest].questions.popleft() if self._parts[newest].questions else None

    def _take(self, chunk: Chunk) -> None:
        completion = self._open[chunk.request_id]
        completion.add(chunk)
        number, index, stem = chunk.request_id.split("/", 2)
        part, is_answer = self._parts[int(number)], chunk.request_id in self._prompts
        part.num_tokens += len(chunk.ids) if is_answer else 0
        if chunk.finish_reason is None:
            return
        del self._open[chunk.request_id]
        if is_answer:
            prompt = self._prompts.pop(chunk.request_id)
            part.dialogues[int(index)] = Dialogue(prompt, as_ids(completion.output_ids))
            self._on_tokens(len(completion.output_ids))
        elif self._keeper is not None:
            self._keeper.forget(chunk.request_id)
        if not is_answer and completion.finish_reason == "stop":  # a turn that did not end in time is dropped
            self._ask(_answer_id(int(number), int(index)), stem + completion.text)
            return
        part.num_open -= 1

    def _ask(self, request_id: str, question: str) -> None:
        prompt = self._built.tokenizer.render_chat([{"role": "user", "content": question}])
        self._prompts[request_id] = prompt
        room = self._built.limits.max_length - len(prompt)
        limits = Limits(min(self._plan.max_answer, room), self._built.tokenizer.stop_ids)
        self._answers.append(GenerationRequest(request_id, prompt, limits))
