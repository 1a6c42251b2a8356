"""Profiles: those that ship, and sentences for those that are wrong."""

from pathlib import Path

import pytest

from serving.config import Profile, load_profile, profile_names
from serving.errors import ConfigError


def test_shipped_profiles_load_under_their_names() -> None:
    assert profile_names() == ["eagle3", "plain", "strict", "suffix"]
    for name in profile_names():
        assert load_profile(name).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nunknown: 1", "unknown: Extra inputs"),
        ("name: a\ndrafter: {kind: magic}", "drafter"),
        ("name: a\nengine: {max_sessions: 0}", "engine.max_sessions"),
        ("name: a\ndrafter: {kind: suffix, max_draft: 65}", "max_draft"),
        ("name: a b", "name"),
        ("- a\n- b", "document"),
        ("name: [", "while parsing"),
    ],
)
def test_a_wrong_profile_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_profile(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="plain, strict, suffix"):
        load_profile("nope")


def test_a_profile_without_a_drafter_never_drafts() -> None:
    assert Profile(name="a").max_draft == 0
