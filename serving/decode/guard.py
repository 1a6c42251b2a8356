"""How many tokens to draft for each session: as many as pay, none where speculation costs more than it gives.

Where the drafter knows how likely its tokens are, a draft ends before the first that does not pay; else K follows from
how far the session's drafts were right lately.

Everything is counted in tokens that plain decoding would emit in the same time, at the batch size of the round: a
drafted token costs its row and its share of drafting, an accepted token gives one. Each session has an account of gains
and costs, which starts with a small credit and earns an allowance a round. It drafts only while its balance is not
negative or, while drafts pay on the whole, a small debt is covered by what all sessions gained. So K falls as batches
grow, reaches 0 where drafts do not pay, comes back by trials that the allowance affords, and a session never loses more
than credit + allowance * rounds + one attempt, and at most MOST_LENT of what others gained. As much is lent before
anybody gained, once for all sessions: the first ones may have bad luck with a drafter that pays.

A drafter that was not asked for a while reads what it missed before it drafts, the whole prompt at first. What such a
round takes longer than drafting is an investment of all sessions, which `decode/reading.py` bounds, and no loss of that
round. So rounds without drafts do not make the next attempt dearer for the session.

Where drafts have not paid lately, in whatever session, new sessions get no credit and first save up for one attempt;
every so many get it all the same, so that a drafter which has become good is found out.
"""

import math
from collections.abc import Mapping
from typing import Protocol

from serving.decode.account import MEMORY, Account
from serving.decode.costs import CostModel
from serving.decode.reading import UNKNOWN_COST, ReadingFund, ReadingPace
from serving.types import Draft, DraftLimits

# A session starts as if it had tried so many draft tokens, accepted at the rate of all sessions lately.
_PRIOR_TRIED = 4.0
_PRIOR_ACCEPTANCE = 0.5  # before there is any
_SHARED_SMOOTHING = 0.05  # of what sessions learn from each other
_CREDIT_ANYWAY = 16  # one in so many sessions
_HOPED_GAIN = 0.25  # tokens a round, before there was one
_LEAST_PRICE = 1e-3
_MOST_ASKED = 32.0  # tokens: a drafter that hangs is left alone by other means than a debt of minutes
_MOST_OWED = 4.0  # tokens: what a new session saves up for at most
CREDIT = 0.5  # tokens
ALLOWANCE = 0.02  # tokens a round
_LEAST_JUDGED = 0.1  # tokens: readings that were cheaper have not decided whether a session's drafts paid
_MOST_SAVED = 2.0  # tokens: what past gains may fund
MOST_LENT = 1.0  # tokens of what all gained: a drafter that pays on the whole has runs of bad luck
_TOKEN_SMOOTHING = 0.1  # of the time that a drafted token takes
_MOST_RISE = 4.0  # a draft, or a reading, that was held up is no measure of the others


class DraftPolicy(Protocol):
    """Decides K for each session and round."""

    def limits(self, session_id: str, batch_size: int, num_tokens: int, *, is_greedy: bool = True) -> DraftLimits:
        """The most tokens to draft for a session in the coming round; where `most` is 0 nothing is asked for.

        `num_tokens` is the length of its text, prompt included. Of a session that is not greedy no drafter can tell how
        likely its tokens are to be accepted.
        """
        ...

    def observe(self, session_id: str, batch_size: int, draft: Draft, num_accepted: int) -> None:
        """What became of a session's round in which a draft was asked for."""
        ...

    def record_drafts(self, drafts: Mapping[str, Draft], draft_s: float) -> None:
        """These drafts, by session, held the loop up for `draft_s`. Comes before their outcomes are observed."""
        ...

    def record_pass(self, *, rows: int, verify_s: float) -> None:
        """One pass without prompts scored `rows` in `verify_s`. Comes before the round's outcomes are observed."""
        ...

    def forget(self, session_id: str) -> None: ...


class FixedDrafts:
    """No guard: always the profile's K."""

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft

    def limits(self, session_id: str, batch_size: int, num_tokens: int, *, is_greedy: bool = True) -> DraftLimits:
        return DraftLimits(self._max_draft, self._max_draft)

    def observe(self, session_id: str, batch_size: int, draft: Draft, num_accepted: int) -> None:
        """Nothing to learn."""

    def record_drafts(self, drafts: Mapping[str, Draft], draft_s: float) -> None:
        """Nothing to learn."""

    def record_pass(self, *, rows: int, verify_s: float) -> None:
        """Nothing to learn."""

    def forget(self, session_id: str) -> None:
        """Nothing to forget."""


class Guard:
    """Implements DraftPolicy from measured costs. Belongs to one engine; called from its thread only.

    `ask_s` and `token_s` are what drafting takes by a measurement at start-up, once a round and for each token; 0 where
    that is next to nothing, or unknown: then all of it is taken for the tokens'. `is_judged`: the drafter says how
    likely its tokens are and ends a draft at `floor`, so that K need not be guessed from how far drafts were right.
    """

    def __init__(
        self, costs: CostModel, *, max_draft: int, ask_s: float = 0.0, token_s: float = 0.0, is_judged: bool = False
    ) -> None:
        self._costs = costs
        self._max_draft = max_draft
        self._is_judged = is_judged
        self._accounts: dict[str, Account] = {}
        self._num_opened = 0
        self._acceptance = _PRIOR_ACCEPTANCE
        self._gain = _HOPED_GAIN
        self._cost = 0.0
        self._fund = ReadingFund(MOST_LENT)
        self._pace = ReadingPace()
        self._position_s = 0.0  # of the texts that were read in the last round
        self._asked_s = 0.0  # of a session in the last round, whatever was read
        self._ask_s = ask_s
        self._token_s = token_s
        self._rows = 0

    def limits(self, session_id: str, batch_size: int, num_tokens: int, *, is_greedy: bool = True) -> DraftLimits:
        floor = self.floor(batch_size, is_greedy=is_greedy)
        limit = self.limit(session_id, batch_size, num_tokens, floor=floor)
        return DraftLimits(limit, limit, model_floor=floor)

    def limit(self, session_id: str, batch_size: int, num_tokens: int, *, floor: float = 0.0) -> int:
        """K of a drafter with one source; all there may be where a draft ends at `floor` by itself."""
        account = self._account(session_id)
        account.grow(num_tokens)
        account.balance = min(_MOST_SAVED, account.balance + ALLOWANCE)
        self._fund.allow(ALLOWANCE, batch_size)
        if not self._may_draft(account, batch_size):
            account.is_behind = True
            return 0
        if floor > 0.0:
            return self._max_draft
        price = max(self._token_price(batch_size), _LEAST_PRICE)
        acceptance = account.acceptance
        if acceptance <= price:
            return min(1, self._max_draft)  # a trial: too dear by what is known so far
        if acceptance >= 1.0:
            return self._max_draft
        return min(self._max_draft, int(math.log(price) / math.log(acceptance)))

    def floor(self, batch_size: int, *, is_greedy: bool) -> float:
        """How likely a drafted token must be to be right, with all before it, to pay; 0 where nobody can tell.

        By what each token costs where all are drafted: the first row beside the plain one costs more than the others,
        which would not be reached if it had to pay for itself.
        """
        if not (self._is_judged and is_greedy):
            return 0.0
        rows = self._costs.price(batch_size, batch_size * (1 + self._max_draft))
        return max(_LEAST_PRICE, rows + self._costs.plain_tokens(self._token_s, batch_size))

    def row_price(self, batch_size: int) -> float:
        """What one row more for each session costs, in tokens."""
        return self._costs.next_price(batch_size, max(self._rows, batch_size))

    def rate(self, session_id: str, batch_size: int, num_drafted: int) -> float:
        """Tokens that a round with a draft of so many is expected to emit, by those of plain decoding in its time.

        Of rounds that were, as many as there are: a draft may end before it has so many tokens.
        """
        if num_drafted == 0:
            return 1.0
        account = self._account(session_id)
        believed = sum(account.acceptance**n for n in range(1, num_drafted + 1))
        num_rounds = account.belief + account.asked
        won = (account.belief * believed + account.won) / num_rounds
        price = num_drafted * self._token_price(batch_size) + self._costs.plain_tokens(self._ask_s, batch_size)
        spent = (account.belief * price + account.spent) / num_rounds
        reading = self._reading_cost(account, batch_size) if account.is_behind else 0.0
        return (1.0 + won) / (1.0 + spent + reading)

    def fall_behind(self, session_id: str) -> None:
        """The session's round was drafted for by somebody else."""
        self._account(session_id).is_behind = True

    def observe(self, session_id: str, batch_size: int, draft: Draft, num_accepted: int) -> None:
        account, num_drafted = self._account(session_id), len(draft)
        if account.is_behind:
            self._charge_reading(account, batch_size)
        if _num_steps(draft):
            self._end_reading(account)
        if num_drafted:
            tried = min(num_drafted, num_accepted + 1)
            account.tried = MEMORY * account.tried + tried
            account.accepted = MEMORY * account.accepted + num_accepted
            self._acceptance += _SHARED_SMOOTHING * (num_accepted / tried - self._acceptance)
        rows = max(self._rows, batch_size + num_drafted)
        asking = min(_MOST_ASKED, self._costs.plain_tokens(self._asked_s, batch_size))
        cost = num_drafted * self._costs.price(batch_size, rows) + asking
        account.add_round(num_accepted, cost)
        account.balance += num_accepted - cost
        account.gained += num_accepted - cost
        self._fund.earn(num_accepted - cost)
        self._cost = cost if self._cost == 0.0 else self._cost + _SHARED_SMOOTHING * (cost - self._cost)
        self._gain += _SHARED_SMOOTHING * (num_accepted - cost - self._gain)

    def record_drafts(self, drafts: Mapping[str, Draft], draft_s: float) -> None:
        self._fund.end_round()
        num_steps, num_unread = sum(map(_num_steps, drafts.values())), sum(map(self._num_unread, drafts))
        expected_s = self._ask_s + self._token_s * num_steps
        steps_s = min(draft_s, expected_s) if num_unread else draft_s
        self._position_s = (draft_s - steps_s) / num_unread if num_unread else 0.0
        self._asked_s = steps_s / len(drafts) if drafts else 0.0
        if num_steps and not num_unread:
            if not self._token_s:
                self._token_s = expected_s = draft_s / num_steps
            change = 1.0 + _TOKEN_SMOOTHING * (min(draft_s / expected_s, _MOST_RISE) - 1.0) if expected_s else 1.0
            self._ask_s *= change
            self._token_s *= change

    def record_pass(self, *, rows: int, verify_s: float) -> None:
        self._costs.record(rows, verify_s)
        self._rows = rows

    def forget(self, session_id: str) -> None:
        account = self._accounts.pop(session_id, None)
        if account is not None and account.paid >= _LEAST_JUDGED:
            self._fund.judge(account.paid_at, paid=account.paid, gained=account.gained)

    def _may_draft(self, account: Account, batch_size: int) -> bool:
        """Whether the session can afford an attempt, and all sessions the reading that comes before it."""
        lent = min(MOST_LENT, self._fund.savings) if self._gain > 0.0 else 0.0
        if account.balance < -lent:
            return False
        if not account.is_behind:
            return True
        return self._fund.grant(self._reading_cost(account, batch_size))

    def _token_price(self, batch_size: int) -> float:
        """What one drafted token more for each session costs, in tokens."""
        return self.row_price(batch_size) + self._costs.plain_tokens(self._token_s, batch_size)

    def _reading_cost(self, account: Account, batch_size: int) -> float:
        """What is left of the session's reading, in tokens."""
        left_s = max(0.0, self._expected_s(account, batch_size) - account.read_s)
        return self._costs.plain_tokens(left_s, batch_size)

    def _expected_s(self, account: Account, batch_size: int) -> float:
        """What the session's reading is expected to take as a whole."""
        seconds = self._pace.seconds(account.num_unread)
        return self._unknown_s(batch_size) if seconds is None else seconds

    def _unknown_s(self, batch_size: int) -> float:
        return UNKNOWN_COST / self._costs.plain_tokens(1.0, batch_size)

    def _charge_reading(self, account: Account, batch_size: int) -> None:
        """The fund pays, up to a multiple of what was expected; a session that reads on and on pays the rest."""
        seconds = self._position_s * account.num_unread
        most_s = max(self._unknown_s(batch_size), _MOST_RISE * self._expected_s(account, batch_size))
        paid_s = min(seconds, max(0.0, most_s - account.read_s))
        paid = self._costs.plain_tokens(paid_s, batch_size)
        account.read_s += paid_s
        account.paid, account.paid_at = account.paid + paid, batch_size
        self._fund.pay(paid)
        account.balance -= min(_MOST_ASKED, self._costs.plain_tokens(seconds - paid_s, batch_size))

    def _end_reading(self, account: Account) -> None:
        if account.is_behind:
            self._pace.record(account.num_unread, account.read_s)
        account.catch_up()

    def _num_unread(self, session_id: str) -> int:
        """Positions that the drafter reads beyond those of a step; 0 where it follows the session."""
        account = self._accounts.get(session_id)
        return account.num_unread if account is not None and account.is_behind else 0

    def _account(self, session_id: str) -> Account:
        if session_id not in self._accounts:
            has_credit = self._gain >= 0.0 or self._num_opened % _CREDIT_ANYWAY == 0
            self._num_opened += 1
            balance = CREDIT if has_credit else -min(_MOST_OWED, self._cost)
            self._accounts[session_id] = Account(_PRIOR_TRIED, _PRIOR_TRIED * self._acceptance, balance)
        return self._accounts[session_id]


def _num_steps(draft: Draft) -> int:
    """Steps of the drafter: one that found its token too doubtful took as long as the others."""
    return max(len(draft), draft.num_passes)
