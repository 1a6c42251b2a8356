import pytest

from jobs.identity import Output, compared


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
