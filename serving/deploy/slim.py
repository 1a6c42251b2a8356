"""The SlimVerifier: a Serve deployment whose actor holds the kept layers of the target, leased to Targets."""

from serving.config import Profile, ViaVerifier
from serving.deploy.leased_replica import LeasedReplica
from serving.deploy.slim_messages import SlimAnswer, SlimCall
from serving.deploy.slim_table import SlimTable
from serving.errors import ConfigError


class SlimWorker:
    """The leased actor: one slim model, the sessions of every Target that leases it, one call at a time."""

    def __init__(self, profile: Profile, incarnation: str) -> None:
        from serving.build_via import build_slim  # torch: not for the processes that only wire deployments

        if not isinstance(profile.verifier, ViaVerifier):
            raise ConfigError(f"verifier: {profile.verifier.kind!r} has no slim verifier")
        self._table = SlimTable(build_slim(profile, profile.verifier), incarnation)

    def score(self, call: SlimCall) -> SlimAnswer:
        return self._table.handle(call)

    def release(self, owner: str) -> int:
        """Forget every session of `owner`."""
        return self._table.release(owner)

    def sessions(self) -> list[tuple[str, str]]:
        """(owner, session_id) of every session held."""
        return self._table.sessions

    def ping(self) -> bool:
        return True


class SlimReplica(LeasedReplica):
    """Keeps and leases a SlimWorker."""

    role = "slim verifier"
    worker_class = SlimWorker
