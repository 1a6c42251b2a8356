"""One Ray; applications that end with their module: a tiny random Llama that drafts for itself, a real tokenizer."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROFILE = {
    "rule": {"kind": "strict"},
    # Every round is a chunk: what tests do at the tenth falls early in a stream.
    "engine": {
        "max_sessions": 8,
        "max_length": 2048,
        "max_queued": 256,
        "draft_timeout_s": 1.0,
        "guard": False,
        "stream_period_ms": 0,
    },
}


def save_tiny(folder: Path, *, seed: int) -> str:
    """A Llama of random weights that is built in a second and answers in a millisecond a token."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from serving.models.embedded import ensure_embedded_model

    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded_model())
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True,
        initializer_range=0.3, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Its folder."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def poor_model(tiny_model, tmp_path_factory) -> str:
    """The same model with some noise in its weights: a drafter that is often wrong, though seldom by much."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("poor")
    save_tiny(folder, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.1 * weights.std() * torch.randn_like(weights))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def profile_file(tiny_model, tmp_path_factory):
    """Writes a profile over the tiny model and returns its path."""

    def write(name: str, drafter: dict[str, object], **fields: object) -> str:
        path = Path(tmp_path_factory.mktemp("profile")) / f"{name}.yaml"
        target = {"model": tiny_model, "dtype": "float32"}
        path.write_text(yaml.safe_dump(PROFILE | {"name": name, "target": target, "drafter": drafter} | fields))
        return str(path)

    return write


@pytest.fixture(scope="session")
def model_profile(profile_file, tiny_model) -> str:
    return profile_file("tiny", {"kind": "model", "model": tiny_model, "max_draft": 4})


@pytest.fixture(scope="session")
def run_id() -> str:
    """In the environment of every process of this test run's Ray, so that no other one is ever touched."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def ray_port(run_id) -> Iterator[int]:
    """A Ray with two CPUs and Serve's HTTP proxy on the port that is returned: one for the whole run.

    In a process that starts Ray anew, Ray 2.60 leaves the metric reader of the one before running, and such a reader
    may call what is gone while Python exits: a crash after the last test.
    """
    from ray import serve

    from cluster.connect import connected, start_serve

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("DRAFTHOUSE_TEST_RUN", run_id)
        environment.delenv("RAY_ADDRESS", raising=False)
        port = free_port()
        with connected(num_cpus=2):
            start_serve("127.0.0.1", port)
            yield port
            serve.shutdown()


@pytest.fixture(scope="module")
def local_ray(ray_port, processes) -> Iterator[int]:
    """The port of Serve; what a module deploys ends with it."""
    from ray import serve

    yield ray_port
    for name in serve.status().applications:
        serve.delete(name)
    roles = ("ray::ServeReplica", "ray::DrafterWorker", "ray::SlimWorker")
    wait_for(lambda: not any(map(processes.pids, roles)), what="the end of all roles")


@pytest.fixture
def ray_address(ray_port) -> str:
    """Where another process joins the Ray of this run."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """The processes of this run's Ray, by the title that Ray gives them."""

    def __init__(self, run_id: str) -> None:
        self._mark = f"DRAFTHOUSE_TEST_RUN={run_id}".encode()

    def pids(self, title: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and self._is_ours(entry)
                    and (entry / "cmdline").read_bytes().startswith(title.encode())
                ):
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return found

    def signal(self, title: str, number: signal.Signals) -> int:
        (pid,) = self.pids(title)
        os.kill(pid, number)
        return pid

    def _is_ours(self, entry: Path) -> bool:
        return self._mark in (entry / "environ").read_bytes()


@pytest.fixture(scope="session")
def processes(run_id) -> Processes:
    return Processes(run_id)


def wait_for(condition, *, timeout_s: float = 60.0, what: str = "condition"):
    """The first true value of `condition()`."""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what} not within {timeout_s} s")


def jobs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m jobs` in a process of its own, which knows of no Ray but by its arguments."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-m", "jobs", *arguments],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment,
    )  # fmt: skip
