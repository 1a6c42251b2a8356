"""The one place that starts or joins Ray."""

import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve

from serving.errors import ConfigError

ROOT = Path(__file__).parents[1]
_CONNECT_TIMEOUT_S = 5.0


def prepare_environment() -> None:
    """What Ray's processes inherit from this one; values that are set already win, search paths apart.

    RAY_AUTH_MODE is not among them: this process read it when it imported Ray, and all must agree. Where it is
    not set, `ray.init` itself turns token authentication on for a cluster that it starts.
    """
    # Ray resolves `python`, and DeepSpeed `ninja`, from PATH; workers import our packages wherever they are.
    _put_first("PATH", str(Path(sys.executable).parent))
    _put_first("PYTHONPATH", str(ROOT))
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # An actor without a GPU must not see one: Ray would not know of the memory it takes there.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
        # The engine thread waits for its drafter; the event loop of the same process does not.
        "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Ray gives each actor as many threads as it has CPUs; one number for all of them would undo that.
    os.environ.pop("OMP_NUM_THREADS", None)


def connect(address: str | None = None, *, num_cpus: int | None = None, num_gpus: int | None = None) -> None:
    """Join the Ray cluster at `address` (or RAY_ADDRESS), or else start one of this machine's own.

    Raises ConfigError in one line when there is no cluster at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    prepare_environment()
    if address is not None:
        _join(address)
        return
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


@contextmanager
def connected(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """`connect`, and leave at the end; a Ray that was started here goes down with everything on it."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    connect(address, num_cpus=num_cpus)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray put a handler there that aborts with a stack trace
    try:
        yield
    finally:
        ray.shutdown()


def start_serve(host: str, port: int) -> None:
    """Serve with its HTTP proxy on the head node. Where Serve runs already, it keeps the port that it has.

    Raises ConfigError where the port is taken.
    """
    # Proxies of two clusters can share a port, and connections would then go to either.
    if not _serve_runs() and _is_head() and is_listened_to(host, port):
        raise _taken(host, port)
    try:
        serve.start(
            http_options={"host": host, "port": port},
            proxy_location="HeadOnly",
            logging_config={"enable_access_log": False},
        )
    except RuntimeError as error:
        if "bind" not in str(error):
            raise
        raise _taken(host, port) from None


def is_listened_to(host: str, port: int) -> bool:
    """Whether any program on this machine accepts connections there, also one that lets others do the same."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else connections that have ended count
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _taken(host: str, port: int) -> ConfigError:
    return ConfigError(f"--port: {host}:{port} is taken by another program; choose another port")


def _serve_runs() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _is_head() -> bool:
    """Whether this process runs on the cluster's head node."""
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and "node:__internal_head__" in node["Resources"] for node in ray.nodes())


def _join(address: str) -> None:
    reason = _unreachable(address)
    if reason is None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise ConfigError(f"address: no Ray cluster could be joined at {address!r}: {reason}")


def _unreachable(address: str) -> str | None:
    """Why nothing can be there, if so: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return None  # "auto" and the like
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _put_first(variable: str, folder: str) -> None:
    others = [entry for entry in os.environ.get(variable, "").split(os.pathsep) if entry and entry != folder]
    os.environ[variable] = os.pathsep.join([folder, *others])
