import pytest

from jobs.identity import _RULES, Output, _profiles, compared, parser


def test_a_combination_without_accepted_drafts_is_said_to_have_checked_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = {"a": [1, 2], "b": [3]}
    row = compared("suffix", 4, expected, {"a": Output([1, 2]), "b": Output([3])})
    assert (row["accepted"], row["differing"]) == (0, [])
    assert "nothing was checked" in capsys.readouterr().out
    row = compared("suffix", 4, expected, {"a": Output([1, 2], accepted=1), "b": Output([4])})
    assert (row["accepted"], row["differing"]) == (1, ["b"])
    assert "1/2 identical" in capsys.readouterr().out


def test_every_combination_is_a_lossless_profile_of_its_own() -> None:
    flags = ["--placements", "colocated,separate", "--verifiers", "full,via", "--rules", ",".join(_RULES)]
    profiles = _profiles(parser().parse_args(["--prompts", "p.jsonl", *flags]))
    names = [profile.name for profile in profiles]
    assert len(set(names)) == len(names) == 2 * 2 * len(_RULES) * 2 * 2
    assert "separate-via-lambda-inf-suffix-batch8" in names
    assert all(profile.rule.is_lossless for profile in profiles)
