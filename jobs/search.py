"""Search the settings of a method.

`search via` finds the layers that a slim verifier can do without, `search via-theta` what its thresholds cost and give.
"""

import argparse
import importlib
from collections.abc import Sequence

SUMMARY = "search a method's settings offline: via (which layers the slim verifier skips), via-theta (its thresholds)"
METHODS = {"via": "jobs.search_via", "via-theta": "jobs.search_via_theta"}


def parser() -> argparse.ArgumentParser:
    """The method; its own flags are read by its own job."""
    p = argparse.ArgumentParser(prog="python -m jobs search", description=__doc__)
    p.add_argument("method", choices=sorted(METHODS), help="`search METHOD --help` lists its flags")
    return p


def main(argv: Sequence[str]) -> int:
    """Dispatch to the method's own job."""
    method = parser().parse_args(argv[:1]).method
    status: int = importlib.import_module(METHODS[method]).main(argv[1:])
    return status
