import json
from pathlib import Path

import pytest

from jobs import identity
from jobs.__main__ import main
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--verifiers", "full", "--mask", "nosuch"], "--mask: is of the verifier `via`"),
        (
            ["--verifiers", "full,via", "--mask", "nosuch"],
            "verifier.mask: 'nosuch' is neither a shipped mask",
        ),
        (["--verifiers", "via", "--mask", "other.json"], "was searched for 'other' with 3 layers"),
    ],
)
def test_a_mask_is_checked_before_anything_is_generated(
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(identity, "_reference", lambda *_: pytest.fail("transformers has begun"))
    Path("p.jsonl").write_text(json.dumps({"id": "a", "turns": ["hello"]}))
    Path("other.json").write_text(json.dumps({"model": "other", "num_layers": 3, "kept": [0, 2]}))
    assert main(["identity", "--prompts", "p.jsonl", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
