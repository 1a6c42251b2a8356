"""Search the settings of a method.

`search via` finds the layers that a slim verifier can do without, `search via-theta` what its thresholds cost and give.
"""

import importlib
from collections.abc import Sequence

from serving.errors import ConfigError

SUMMARY = "search a method's settings offline: via (which layers the slim verifier skips), via-theta (its thresholds)"
METHODS = {"via": "jobs.search_via", "via-theta": "jobs.search_via_theta"}


def main(argv: Sequence[str]) -> int:
    """Dispatch to the method's own job."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: python -m jobs search METHOD [--help] ...\n\n{__doc__}\n\nmethods: {', '.join(METHODS)}")
        return 0 if argv else 2
    if argv[0] not in METHODS:
        raise ConfigError(f"method: {argv[0]!r} cannot be searched; one of: {', '.join(METHODS)}")
    status: int = importlib.import_module(METHODS[argv[0]]).main(argv[1:])
    return status
