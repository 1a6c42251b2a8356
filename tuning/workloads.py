"""Prompts whose answers repeat most of what they are given: texts and code to be returned with a small change."""

from dataclasses import dataclass

import numpy as np

from tuning.prompts import Prompt

_PLACES = ("Lisbon", "Oslo", "Quito", "Nairobi", "Hanoi", "Turin", "Perth", "Gdansk", "Leeds", "Kyoto")
_PEOPLE = ("Ada", "Bruno", "Chiara", "Deniz", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_GOODS = ("lamps", "bicycles", "printers", "tables", "pumps", "cameras", "kettles", "radios", "drills", "scales")
_SENTENCES = (
    "On {day} the team in {place} counted {number} {goods} and found that {few} of them were damaged on the way.",
    "{person} wrote to the supplier in {place} and asked for {few} new {goods} before the end of the month.",
    "The price of the {goods} rose by {few} percent, while the cost of transport to {place} stayed the same.",
    "A second delivery of {number} {goods} is expected in {place} on {day}, if the weather allows it.",
    "{person} will visit the warehouse in {place} on {day} and check the new shelves for the {goods}.",
    "Last year the shop in {place} sold {number} {goods}, which was {few} more than the year before.",
)
_VERBS = ("count", "sum", "filter", "sort", "merge", "check", "split", "load", "store", "clean")
_NOUNS = ("orders", "items", "users", "prices", "events", "rows", "scores", "files", "names", "dates")
_FUNCTION = '''def {verb}_{noun}({noun}, limit={few}):
    """Return the {noun} that pass the {verb} step."""
    result = []
    for index, value in enumerate({noun}):
        if value is None or index >= limit:
            continue
        result.append(value + {number})
    return result
'''


@dataclass(frozen=True)
class EditWorkload:
    """`count` prompts, documents and code in turn; the same for the same seed. A text is about `size` tokens long."""

    count: int
    seed: int = 0
    size: int = 300

    def prompts(self) -> list[Prompt]:
        """Tasks are "edit-text" and "edit-code"; the reference is the text as it should come back."""
        made = []
        for number in range(self.count):
            rng = np.random.default_rng((self.seed, number))
            make = self._code if number % 2 else self._document
            made.append(make(rng, number))
        return made

    def _document(self, rng: np.random.Generator, number: int) -> Prompt:
        sentences = [_fill(rng, str(rng.choice(_SENTENCES))) for _ in range(self.size // 26)]
        text = " ".join(sentences)
        old = next((day for day in _DAYS if day in text), "the")
        new = "Sunday"
        ask = f'Copy the following text word for word, but replace "{old}" by "{new}". Answer with the text only.'
        return Prompt(
            id=f"edit-text-{self.seed}-{number}", task="edit-text", turns=(f"{ask}\n\n{text}",),
            reference=text.replace(old, new),
        )  # fmt: skip

    def _code(self, rng: np.random.Generator, number: int) -> Prompt:
        text = "\n\n".join(_fill(rng, _FUNCTION) for _ in range(max(1, self.size // 75)))
        ask = 'Write this Python file again with "result" renamed to "found". Answer with the code only.'
        return Prompt(
            id=f"edit-code-{self.seed}-{number}", task="edit-code", turns=(f"{ask}\n\n```python\n{text}```",),
            reference=text.replace("result", "found"),
        )  # fmt: skip


def _fill(rng: np.random.Generator, template: str) -> str:
    return template.format(
        day=rng.choice(_DAYS), place=rng.choice(_PLACES), person=rng.choice(_PEOPLE), goods=rng.choice(_GOODS),
        number=rng.integers(20, 900), few=rng.integers(2, 19), verb=rng.choice(_VERBS), noun=rng.choice(_NOUNS),
    )  # fmt: skip
