"""Flags that several verbs share."""

import argparse
from pathlib import Path

import pytest

from jobs.options import add_profile_options, profile_from

RULE = "name: mine\ndrafter: {{kind: suffix}}\nrule: {{kind: csd, memory: {}}}\n"


@pytest.mark.parametrize("memory", ["frozen", "online"])
def test_an_online_memory_is_said_to_end_with_an_offline_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    path, parser = tmp_path / "mine.yaml", argparse.ArgumentParser()
    path.write_text(RULE.format(memory))
    add_profile_options(parser)
    profile_from(parser.parse_args([]), str(path))
    said = capsys.readouterr().err
    assert ("profile 'mine': offline, `memory: online` begins empty" in said) is (memory == "online")
    assert said.count("\n") == (memory == "online")
