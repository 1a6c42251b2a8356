"""Prompts for benchmarks and for training the yield predictor: edits, agentic work, chat, and a mixture.

The answers to edits and agentic work repeat most of what they are given; those to chat hardly repeat anything. A prompt
belongs to the training or to the test split by a hash of its text, so no request is in both, whatever the seeds.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from tuning.prompts import Prompt
from tuning.workload_texts import chat_question, code_edit, revision, text_edit, tool_calls

Kind = Literal["edits", "agentic", "chat", "mixed"]
Split = Literal["train", "test"]
KINDS: tuple[Kind, ...] = ("edits", "agentic", "chat", "mixed")
_Maker = Callable[[np.random.Generator, str, int], Prompt]

# Makers that take turns. "mixed" is half edits and agentic work, half chat.
_MAKERS: dict[Kind, tuple[_Maker, ...]] = {
    "edits": (text_edit, code_edit),
    "agentic": (code_edit, tool_calls, revision),
    "chat": (chat_question,),
    "mixed": (text_edit, chat_question, code_edit, chat_question, tool_calls, chat_question, revision, chat_question),
}


@dataclass(frozen=True)
class Workload:
    """`count` prompts of a kind; the same for the same seed. A text to be edited is about `size` tokens long.

    With a `split` only prompts of that split; a test prompt is then never a training prompt, under any seed.
    """

    kind: Kind
    count: int
    seed: int = 0
    size: int = 300
    split: Split | None = None

    def prompts(self) -> list[Prompt]:
        """Tasks are edit-text, edit-code, tool-calls, revision and chat; edits have the text due as `reference`."""
        return list(islice(self._endless(), self.count))

    def _endless(self) -> Iterator[Prompt]:
        """Without end and without a text twice."""
        seen: set[str] = set()
        makers = [self._of_one(turn, maker) for turn, maker in enumerate(_MAKERS[self.kind])]
        while True:
            for maker in makers:
                prompt = next(one for one in maker if one.text not in seen)
                seen.add(prompt.text)
                yield prompt

    def _of_one(self, turn: int, maker: _Maker) -> Iterator[Prompt]:
        number = 0
        while True:
            rng = np.random.default_rng((self.seed, turn, number))
            prompt = maker(rng, f"{turn}-{self.seed}-{number}", self.size)
            number += 1
            if self.split in (None, split_of(prompt.text)):
                yield prompt


def split_of(text: str) -> Split:
    """By a hash of the text, white space and case aside: half of all texts are for training."""
    return "test" if hashlib.sha256(normalised(text).encode()).digest()[0] % 2 else "train"


def normalised(text: str) -> str:
    """The same for texts that differ in white space or case alone."""
    return " ".join(text.lower().split())
