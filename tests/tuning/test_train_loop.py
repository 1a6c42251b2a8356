"""A checkpoint goes on with its own training and with no other."""

from pathlib import Path

import pytest
import torch

from serving.errors import ConfigError
from tuning.train_loop import Checkpoint

MADE_WITH = {"seed": "0", "learning_rate": "0.001"}


def module(fill: float) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    made = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(made.weight, fill)
    return made, torch.optim.AdamW(made.parameters())


def test_no_file_is_the_beginning(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint.pt", MADE_WITH)
    checkpoint.check()
    assert checkpoint.restore(*module(1.0)) == 0


def test_the_same_training_goes_on(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint.pt", MADE_WITH).of_text("a")
    checkpoint.save(*module(1.0), step=7)
    restored, optimiser = module(2.0)
    assert checkpoint.restore(restored, optimiser) == 7
    assert torch.equal(restored.weight, torch.ones(2, 2))


@pytest.mark.parametrize("other", [{"seed": "1"}, {"learning_rate": "0.01"}, {"text": "b"}])
def test_another_training_is_refused_and_told_by_name(tmp_path: Path, other: dict[str, str]) -> None:
    path = tmp_path / "checkpoint.pt"
    Checkpoint(path, MADE_WITH).of_text("a").save(*module(1.0), step=7)
    different = Checkpoint(path, {**MADE_WITH, "text": "a"} | other)
    (name,) = other
    for use in (different.check, lambda: different.restore(*module(2.0))):
        with pytest.raises(ConfigError, match=f"--work: .*checkpoint.pt is of a training with other {name};"):
            use()


def test_what_is_not_known_yet_is_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    Checkpoint(path, MADE_WITH).of_text("a").save(*module(1.0), step=7)
    early = Checkpoint(path, MADE_WITH)
    early.check()
    with pytest.raises(ConfigError, match="other text"):
        early.of_text("b")


def test_a_checkpoint_that_does_not_say_what_it_is_of_is_refused(tmp_path: Path) -> None:
    torch.save({"step": 1, "trained": {}, "optimiser": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="other seed, learning_rate"):
        Checkpoint(tmp_path / "checkpoint.pt", MADE_WITH).check()
