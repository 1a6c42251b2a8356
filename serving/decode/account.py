"""What the guard knows of one session and a drafter: how far drafts were right, what they cost, what was read."""

from dataclasses import dataclass

MEMORY = 0.9  # weight of the past after each round with a draft


@dataclass
class Account:
    """One session: decayed counts of tried and accepted draft tokens, and its balance in tokens.

    `asked` counts its rounds with this drafter, `won` what they accepted and `spent` what they cost, decayed as well;
    `belief` is what the estimate from before the first of them still weighs, in rounds.
    `length` is that of its text, `num_read` what of it the drafter has read. A reading that is under way has
    `num_unread` positions, of which the fund has paid `read_s`. The fund has paid `paid` tokens in all, last in a batch
    of `paid_at`, and drafts gained `gained`.
    """

    tried: float
    accepted: float
    balance: float
    belief: float = 1.0
    asked: float = 0.0
    won: float = 0.0
    spent: float = 0.0
    length: int = 0
    num_read: int = 0
    num_unread: int = 0
    read_s: float = 0.0
    is_behind: bool = True
    paid: float = 0.0
    paid_at: int = 0
    gained: float = 0.0

    @property
    def acceptance(self) -> float:
        """Probability that a draft token is accepted once those before it are."""
        return self.accepted / self.tried

    def add_round(self, won: int, spent: float) -> None:
        """One more round with this drafter."""
        self.belief *= MEMORY
        self.asked = MEMORY * self.asked + 1.0
        self.won = MEMORY * self.won + won
        self.spent = MEMORY * self.spent + spent

    def grow(self, length: int) -> None:
        """The text has now `length` tokens."""
        self.length = length
        if self.read_s == 0.0:
            self.num_unread = max(1, length - self.num_read)

    def catch_up(self) -> None:
        """The drafter has read the whole text."""
        self.num_read, self.read_s, self.is_behind = self.length, 0.0, False
