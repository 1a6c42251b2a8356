"""Whether two models speak of the same tokens."""

from serving.errors import ConfigError
from serving.models.tokenizer import ChatTokenizer


def check_same_vocabulary(*, target: ChatTokenizer, drafter: ChatTokenizer) -> None:
    """Raise ConfigError naming the first id that differs. Padding of either embedding matrix does not matter."""
    ours, theirs = target.tokens(), drafter.tokens()
    for token_id, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise ConfigError(
                f"drafter.model: {drafter.name!r} has another tokenizer than the target {target.name!r}: "
                f"id {token_id} is {b!r} there and {a!r} here"
            )
    if len(ours) != len(theirs):
        first = min(len(ours), len(theirs))
        raise ConfigError(
            f"drafter.model: {drafter.name!r} has {len(theirs)} tokens and the target {target.name!r} {len(ours)}; "
            f"id {first} is the first that only one of them has"
        )
