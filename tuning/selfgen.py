"""Text in the target's own words, to train drafters on: it writes the user's turn, then answers it.

The user's turn is sampled at T = 0.9 after a short stem, the answer is greedy, both by our own batched engine. Kept as
Parquet parts of `prompt_ids` and `output_ids`; a part is whole or absent, so a killed run resumes where it was.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serving.build import Built
from serving.decode.offline import Completion, complete
from serving.errors import ConfigError
from serving.types import GenerationRequest, Ids, Limits, Sampling, as_ids

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
    """How much to write: `num_tokens` of answers, in parts of `part_size` dialogues; same seed, same text."""

    num_tokens: int
    seed: int = 0
    part_size: int = 32
    max_question: int = 60
    max_answer: int = 300
    temperature: float = 0.9


def generate(built: Built, folder: Path, plan: SelfGeneration, *, on_tokens: Callable[[int], None]) -> Iterator[Path]:
    """Write parts into `folder` until `plan.num_tokens` are there; `on_tokens` hears of progress."""
    folder.mkdir(parents=True, exist_ok=True)
    total, part = 0, 0
    while total < plan.num_tokens:
        path = folder / f"part-{plan.seed:03d}-{part:05d}.parquet"
        if not path.is_file():
            write_dialogues(path, _part(built, plan, part))
        tokens = sum(len(dialogue.output_ids) for dialogue in read_dialogues([path]))
        total += tokens
        part += 1
        on_tokens(tokens)
        yield path


def read_dialogues(paths: list[Path]) -> list[Dialogue]:
    """All dialogues of Parquet files with the two columns. Raises ConfigError naming a file that lacks them."""
    dialogues = []
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"--data {path}: is no file")
        table = pq.read_table(path)
        missing = {"prompt_ids", "output_ids"} - set(table.column_names)
        if missing:
            raise ConfigError(f"--data {path}: column {sorted(missing)[0]!r} is missing; it has {table.column_names}")
        rows = zip(table["prompt_ids"], table["output_ids"], strict=True)
        dialogues += [Dialogue(as_ids(p.values.to_numpy()), as_ids(o.values.to_numpy())) for p, o in rows]
    return dialogues


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


def _part(built: Built, plan: SelfGeneration, part: int) -> list[Dialogue]:
    rng = np.random.default_rng((plan.seed, part))
    stems = [str(stem) for stem in rng.choice(_STEMS, plan.part_size)]
    questions = _questions(built, plan, stems, seeds=[int(seed) for seed in rng.integers(1 << 31, size=len(stems))])
    stops = built.tokenizer.stop_ids
    requests = [
        GenerationRequest(f"answer-{i}", prompt, Limits(plan.max_answer, stops)) for i, prompt in enumerate(questions)
    ]
    answers = _run(built, requests)
    return [Dialogue(prompt, as_ids(answers[f"answer-{i}"].output_ids)) for i, prompt in enumerate(questions)]


def _questions(built: Built, plan: SelfGeneration, stems: list[str], *, seeds: list[int]) -> list[Ids]:
    """Prompts whose user's turn the target wrote itself; turns that did not end in time are dropped."""
    stops = built.tokenizer.stop_ids
    requests = [
        GenerationRequest(
            request_id=f"question-{i}",
            prompt_ids=opening(built, stem),
            limits=Limits(plan.max_question, stops),
            sampling=Sampling(plan.temperature, seed),
        )
        for i, (stem, seed) in enumerate(zip(stems, seeds, strict=True))
    ]
    written = _run(built, requests)
    return [
        built.tokenizer.render_chat([{"role": "user", "content": stem + written[f"question-{i}"].text}])
        for i, stem in enumerate(stems)
        if written[f"question-{i}"].finish_reason == "stop"
    ]


def opening(built: Built, stem: str) -> Ids:
    """The template up to the user's words, then `stem`: what the model continues as the user."""
    tokenizer = built.tokenizer
    text = tokenizer.decode_raw(tokenizer.render_chat([{"role": "user", "content": stem + _MARK}]))
    if _MARK not in text:
        raise ConfigError(f"model {tokenizer.name!r}: its chat template does not carry the user's words through")
    return tokenizer.encode_raw(text.split(_MARK)[0])


def _run(built: Built, requests: list[GenerationRequest]) -> dict[str, Completion]:
    return {completion.request_id: completion for completion in complete(built.scheduler, requests)}
