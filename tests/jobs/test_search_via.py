"""What a search makes of arms without a judged mask, and what a sweep of thresholds takes for the same arm."""

import json
from pathlib import Path

import pytest

from jobs.search_via import found_by
from jobs.search_via_theta import arm_key, plot_speed
from serving.config import Profile, SuffixDrafter, ViaVerifier
from serving.errors import ConfigError
from tuning.mask_log import History
from tuning.mask_space import Space


def test_an_arm_without_a_judged_mask_is_left_out_and_a_size_without_one_is_an_error() -> None:
    judged, empty = History("random", Space(12, 4), masks=[(1, 2, 3, 4)], costs=[0.5]), History("even", Space(12, 4))
    assert found_by([judged, empty], [4], Path("out")) == [judged]
    with pytest.raises(ConfigError, match="no mask that skips 3 layers could be judged; out/trials says why"):
        found_by([judged, empty, History("random", Space(12, 3))], [4, 3], Path("out"))


def test_another_mask_in_the_same_file_is_another_arm(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"
    profile = Profile(
        name="a",
        drafter=SuffixDrafter(),
        verifier=ViaVerifier(mask=str(file)),
    )
    keys = []
    for kept, found in (([0, 2], 1.0), ([0, 2], 2.0), ([0, 1, 2], 2.0)):
        file.write_text(json.dumps({"model": "m", "num_layers": 3, "kept": kept, "found": found}))
        keys.append(arm_key(profile, 8, ["hello"]))
    assert keys[0] == keys[1] != keys[2]


def test_the_plot_of_speed_against_quality_is_a_picture_and_may_have_one_pair_of_thetas(tmp_path: Path) -> None:
    rows = [
        {"thetas": "strict", "regret/token": 0.0, "tokens/s": 107.2},
        {"thetas": "0.9:0.7", "regret/token": 0.135, "tokens/s": 67.2},
        {"thetas": "0.3:0.1", "regret/token": 0.3249, "tokens/s": 69.4},
    ]
    for count in (2, 3):
        path = tmp_path / "plots" / f"{count}.png"
        plot_speed(rows[:count], path)
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000
