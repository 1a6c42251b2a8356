"""`python -m jobs`: verbs are files, errors are one message."""

import sys

import pytest

import jobs.__main__ as entry
from serving.errors import ConfigError, ModelError


def test_every_verb_has_a_summary_and_help(capsys):
    assert entry.main(["--help"]) == 0
    listed = capsys.readouterr().out
    verbs = entry.verb_modules()
    assert {"demo", "serve"} <= set(verbs)
    assert all(f"  {verb:16}{entry.summary(path)}" in listed for verb, path in verbs.items())


@pytest.mark.parametrize("verb", entry.verb_modules())
def test_help_of_a_verb_exits_0(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        entry.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"jobs {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["no-such"], ["deploying"], ["__main__"], ["../demo"]])
def test_an_unknown_verb_is_one_line_and_status_2(argv, capsys):
    assert entry.main(argv) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_verb_at_all_shows_the_list(capsys):
    assert entry.main([]) == 2
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("rule: no"), 2), (ModelError("no such model"), 1), (KeyboardInterrupt(), 130)],
)
def test_an_error_becomes_a_status_and_never_a_traceback(error, status, capsys, monkeypatch):
    class Verb:
        @staticmethod
        def main(argv):
            raise error

    monkeypatch.setitem(sys.modules, "jobs.demo", Verb)
    assert entry.main(["demo"]) == status
    assert capsys.readouterr().err == (f"demo: {error}\n" if status < 3 else "")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--profile", "no-such"], "profile: 'no-such' is neither"),
        (["--api-keys-env", "NO_SUCH_VARIABLE"], "api_keys_env: the environment variable 'NO_SUCH_VARIABLE' holds no"),
        (["--api-keys-env", ""], "api_keys_env: the environment variable '' holds no key"),
        (["--port", "99999"], "--port: must be between 1 and 65535, got 99999"),
        (["--port", "0"], "--port: must be between 1 and 65535, got 0"),
    ],
)
def test_what_serve_is_asked_is_checked_before_it_looks_for_a_ray(argv, said, capsys):
    assert entry.main(["serve", "--address", "127.0.0.1:1", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"serve: {said}")


@pytest.mark.parametrize("argv", [["--profile", "no-such"], ["--port", "99999"]])
def test_so_is_what_demo_is_asked(argv, capsys):
    assert entry.main(["demo", *argv]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
