"""The makers of workload prompts: each draws one prompt from a generator, named by its suffix, about `size` tokens."""

import json

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
_FUNCTIONS = (
    '''def {verb}_{noun}({noun}, limit={few}):
    """Return the {noun} that pass the {verb} step."""
    result = []
    for index, value in enumerate({noun}):
        if value is None or index >= limit:
            continue
        result.append(value + {number})
    return result
''',
    '''def {verb}_{noun}_by_key({noun}, key="{place}"):
    """Group the {noun} by `key` and {verb} each group."""
    result = {{}}
    for entry in {noun}:
        name = entry.get(key, "{person}")
        result.setdefault(name, []).append(entry)
    return {{name: len(group) + {few} for name, group in result.items()}}
''',
    '''class {person}{place}:
    """Keeps {noun} until they are asked to {verb}."""

    def __init__(self, limit={number}):
        self.limit = limit
        self.result = []

    def {verb}(self, value):
        if len(self.result) < self.limit:
            self.result.append(value)
        return self.result[-{few}:]
''',
)
_RENAMES = (("result", "found"), ("limit", "maximum"), ("value", "element"))
_TOOLS: tuple[tuple[str, dict[str, object]], ...] = (
    ("read_file", {"path": "src/{noun}/{verb}.py", "encoding": "utf-8", "start_line": 1, "end_line": "{number}"}),
    ("search_code", {"query": "{verb}_{noun}", "path": "src/{noun}", "max_results": "{few}", "is_regex": False}),
    ("send_message", {"channel": "{place}", "author": "{person}", "text": "The {goods} arrive on {day}."}),
    ("update_order", {"customer": "{person}", "city": "{place}", "goods": "{goods}", "amount": "{number}"}),
)
_CHANGES = (
    "Change every number to one that is one higher", "Write it in the past tense", "Make the tone more formal",
    "Correct the grammar", "Replace the names of the towns by London",
)  # fmt: skip
_TOPICS = (
    "photosynthesis", "the French Revolution", "compound interest", "a healthy breakfast", "black holes",
    "the water cycle", "learning to swim", "renewable energy", "the Roman Empire", "writing a good email",
    "machine learning", "the human heart", "chess openings", "the causes of inflation", "planting tomatoes",
    "a long train journey", "the history of bread", "public speaking", "the moons of Jupiter", "recycling plastic",
    "choosing a first bicycle", "how vaccines work", "earthquakes", "the printing press", "meditation",
    "saving money as a student", "the Great Barrier Reef", "sleep", "volcanoes", "the invention of the telephone",
    "being a good friend", "space travel", "the stock market", "friendship between a cat and a dog", "bees",
    "the first day at a new school", "glaciers", "electric cars", "a lighthouse keeper", "time zones",
)  # fmt: skip
_QUESTIONS = (
    "Explain {topic} to a ten-year-old.", "Write a short story about {topic}.", "Give me five facts about {topic}.",
    "What are common misunderstandings about {topic}?", "Write a poem about {topic}.",
    "What should a beginner know about {topic}?", "Summarize what matters most about {topic}.",
    "Discuss advantages and disadvantages of {topic}.", "Why is {topic} important?",
    "Write a dialogue between two people about {topic}.", "How would you teach a lesson on {topic}?",
    "Which three questions would you ask an expert on {topic}, and why?", "Describe {topic} in detail.",
    "What might change about {topic} in the next fifty years?", "Tell me something surprising about {topic}.",
    "Write the opening paragraph of an essay on {topic}.",
)  # fmt: skip
_WISHES = (
    "",
    " Use simple words.",
    " Keep it short.",
    " Write for a newspaper in {place}.",
    " Answer {person} kindly.",
)


def text_edit(rng: np.random.Generator, name: str, size: int) -> Prompt:
    """A document to be copied with one word replaced throughout."""
    text = _document(rng, size)
    old = next((day for day in _DAYS if day in text), "the")
    ask = f'Copy the following text word for word, but replace "{old}" by "Sunday". Answer with the text only.'
    return _prompt("edit-text", name, f"{ask}\n\n{text}", text.replace(old, "Sunday"))


def code_edit(rng: np.random.Generator, name: str, size: int) -> Prompt:
    """A Python file to be written again with one name changed."""
    makers = rng.integers(len(_FUNCTIONS), size=max(1, size // 75))
    text = "\n\n".join(_fill(rng, _FUNCTIONS[maker]) for maker in makers)
    old, new = next(pair for pair in rng.permutation(_RENAMES).tolist() if pair[0] in text)
    ask = f'Write this Python file again with "{old}" renamed to "{new}". Answer with the code only.'
    return _prompt("edit-code", name, f"{ask}\n\n```python\n{text}```", text.replace(old, new))


def tool_calls(rng: np.random.Generator, name: str, size: int) -> Prompt:
    """A log of JSON tool calls to be gone on with: the same shape, other arguments."""
    tool, template = _TOOLS[rng.integers(len(_TOOLS))]
    arguments = [_arguments(rng, template) for _ in range(max(4, size // 40))]
    calls = [json.dumps({"tool": tool, "arguments": one}) for one in arguments]
    half = len(calls) // 2
    wanted = "\n".join("- " + ", ".join(str(value) for value in one.values()) for one in arguments[half:])
    ask = "You are an agent that calls tools. Write one JSON call a line, in the same form, with these arguments:"
    log = "\n".join(calls[:half])
    return _prompt("tool-calls", name, f"Calls so far:\n{log}\n\n{ask}\n{wanted}", "\n".join(calls[half:]))


def revision(rng: np.random.Generator, name: str, size: int) -> Prompt:
    """A document to be revised by an instruction that leaves most of it as it is."""
    text = _document(rng, size)
    ask = f"{rng.choice(_CHANGES)} in the following report, and leave everything else as it is. Answer with the report."
    return _prompt("revision", name, f"{ask}\n\n# Report\n\n{text}", None)


def chat_question(rng: np.random.Generator, name: str, size: int) -> Prompt:
    """A question whose answer is not in it."""
    question = str(rng.choice(_QUESTIONS)).format(topic=rng.choice(_TOPICS))
    return _prompt("chat", name, question + _fill(rng, str(rng.choice(_WISHES))), None)


def _prompt(task: str, name: str, text: str, reference: str | None) -> Prompt:
    return Prompt(id=f"{task}-{name}", task=task, turns=(text,), reference=reference)


def _document(rng: np.random.Generator, size: int) -> str:
    return " ".join(_fill(rng, str(rng.choice(_SENTENCES))) for _ in range(max(1, size // 26)))


def _arguments(rng: np.random.Generator, arguments: dict[str, object]) -> dict[str, object]:
    return {key: _fill(rng, value) if isinstance(value, str) else value for key, value in arguments.items()}


def _fill(rng: np.random.Generator, template: str) -> str:
    return template.format(
        day=rng.choice(_DAYS), place=rng.choice(_PLACES), person=rng.choice(_PEOPLE), goods=rng.choice(_GOODS),
        number=rng.integers(20, 900), few=rng.integers(2, 19), verb=rng.choice(_VERBS), noun=rng.choice(_NOUNS),
    )  # fmt: skip
