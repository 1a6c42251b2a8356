"""What Ray's processes inherit."""

import os
import socket
import sys
from pathlib import Path

import pytest

from cluster.connect import ROOT, connect, is_listened_to, prepare_environment
from serving.errors import ConfigError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A copy, so that nothing leaks into the tests that start Ray."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return os.environ


def test_python_and_our_packages_are_found_first(environment):
    environment["PATH"] = "/usr/bin"
    environment["PYTHONPATH"] = "/elsewhere"
    prepare_environment()
    prepare_environment()
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["PYTHONPATH"] == f"{ROOT}:/elsewhere"


def test_the_auth_mode_is_left_as_it_was_when_ray_was_imported(environment):
    before = environment.get("RAY_AUTH_MODE")
    prepare_environment()
    assert environment.get("RAY_AUTH_MODE") == before


def test_threads_are_left_to_ray(environment):
    environment["OMP_NUM_THREADS"] = "64"
    prepare_environment()
    assert "OMP_NUM_THREADS" not in environment


def test_an_address_without_a_cluster_is_one_line():
    with pytest.raises(ConfigError, match=r"^address: no Ray cluster could be joined at '127.0.0.1:1': \S.*$"):
        connect("127.0.0.1:1")


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_is_taken_also_where_its_owner_would_share_it(is_shared):
    """Ray's proxies share theirs: a second server would get half of the first one's connections."""
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        if is_shared:
            owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.bind(("127.0.0.1", 0))
        port = owner.getsockname()[1]
        owner.listen()
        assert is_listened_to("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)):
            client, _ = owner.accept()
            client.close()  # first: its end of the connection lingers
    assert not is_listened_to("127.0.0.1", port)
