"""Where a replica's log lines go."""

import logging


def join_serve_log() -> None:
    """Send the lines of `serving.*` where Serve sends its own in this replica; it only looks after its own logger."""
    serve_log, ours = logging.getLogger("ray.serve"), logging.getLogger("serving")
    ours.handlers[:] = serve_log.handlers
    ours.setLevel(serve_log.getEffectiveLevel())
    ours.propagate = False
