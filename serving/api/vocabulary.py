"""Token ids that a request names, checked against the model's vocabulary."""

import re
from collections.abc import Mapping, Sequence

from serving.errors import RequestError
from serving.types import Ids, as_ids

MAX_KEY_CHARS = 40
_DECIMAL = re.compile("0|[1-9][0-9]{0,9}")


def checked_ids(ids: Sequence[int], *, field: str, vocab_size: int) -> Ids:
    """`ids` as such. Raises RequestError naming `field` and the place of the first that is no token."""
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise _outside(f"{field}.{place}", vocab_size)
    return as_ids(ids)


def checked_biases(biases: Mapping[str, float], *, field: str, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's map from ids as text, by id. Raises RequestError naming `field` and the first wrong key."""
    for key in biases:
        place = f"{field}.{key[:MAX_KEY_CHARS]}"
        if not _DECIMAL.fullmatch(key):
            raise RequestError(place, "is not a token id; keys are ids in decimal, such as 42")
        if int(key) >= vocab_size:
            raise _outside(place, vocab_size)
    return tuple(sorted((int(key), bias) for key, bias in biases.items()))


def _outside(field: str, vocab_size: int) -> RequestError:
    return RequestError(field, f"is not a token id of this model; they go from 0 to {vocab_size - 1}")
