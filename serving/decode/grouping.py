"""Whether to split the batch in two that take turns: one drafts elsewhere while the other is verified."""


class Grouping:
    """Measured choice between one and two groups.

    Two groups pay when t_draft(B) + t_verify(B) > 2 max(t_draft(B/2), t_verify(B/2)); never when drafter and
    target share the same cores. Times are exponential averages by batch size, in seconds.
    """

    def __init__(self, *, shares_cores: bool, smoothing: float = 0.2) -> None:
        self._shares_cores = shares_cores
        self._smoothing = smoothing
        self._draft_s: dict[int, float] = {}
        self._verify_s: dict[int, float] = {}

    def record(self, batch_size: int, *, draft_s: float | None = None, verify_s: float | None = None) -> None:
        """One measurement; `draft_s` is from start to result, None where the drafts were already there."""
        if draft_s is not None:
            self._average(self._draft_s, batch_size, draft_s)
        if verify_s is not None:
            self._average(self._verify_s, batch_size, verify_s)

    def num_groups(self, batch_size: int) -> int:
        """1 or 2; 1 until both sizes have been measured."""
        half = (batch_size + 1) // 2
        if self._shares_cores or batch_size < 2:
            return 1
        times = [table.get(size) for size in (batch_size, half) for table in (self._draft_s, self._verify_s)]
        if any(time is None for time in times):
            return 1
        whole_draft, whole_verify, half_draft, half_verify = (time or 0.0 for time in times)
        return 2 if whole_draft + whole_verify > 2 * max(half_draft, half_verify) else 1

    def _average(self, table: dict[int, float], batch_size: int, seconds: float) -> None:
        before = table.get(batch_size, seconds)
        table[batch_size] = before + self._smoothing * (seconds - before)
