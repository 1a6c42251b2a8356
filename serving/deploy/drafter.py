"""The Drafter: a Serve deployment that owns one actor and leases it to Targets, which call it directly."""

from serving.config import Profile
from serving.deploy.leased_replica import LeasedReplica
from serving.deploy.messages import DraftAnswer, DraftCall
from serving.deploy.table import DraftTable


class DrafterWorker:
    """The leased actor: one drafter, the sessions of every Target that leases it, one call at a time."""

    def __init__(self, profile: Profile, incarnation: str) -> None:
        from serving.build_drafter import build_drafter, shipped_features  # torch: not for those that only wire

        features = shipped_features(profile)
        self._table = DraftTable(build_drafter(profile, features=features), incarnation, features)

    def draft(self, call: DraftCall) -> DraftAnswer:
        return self._table.handle(call)

    def release(self, owner: str) -> int:
        """Forget every session of `owner`."""
        return self._table.release(owner)

    def sessions(self) -> list[tuple[str, str]]:
        """(owner, session_id) of every session held."""
        return self._table.sessions

    def ping(self) -> bool:
        return True


class DrafterReplica(LeasedReplica):
    """Keeps and leases a DrafterWorker."""

    role = "drafter"
    worker_class = DrafterWorker
