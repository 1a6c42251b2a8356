"""pyproject.toml (ranges), constraints.txt (the lock) and environment.yml (conda) tell one story."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = [PROJECT["project"]["dependencies"], *EXTRAS.values()]
RANGES = [Requirement(line) for group in GROUPS for line in group]
LOCK_TEXT = (ROOT / "constraints.txt").read_text()
LOCK_LINES = [line for line in LOCK_TEXT.splitlines() if line and not line.startswith("#")]
LOCK = {canonicalize_name(pin.name): pin for pin in map(Requirement, LOCK_LINES)}
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
CONDA_NAMES = [entry for entry in CONDA if isinstance(entry, str)]
CONDA_PIP = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))
GPU_ONLY = re.compile(r"^(nvidia-|cuda-|triton|cupy)")


def pinned(name: str) -> Version:
    (pin,) = LOCK[canonicalize_name(name)].specifier
    return Version(pin.version)


@pytest.mark.parametrize("requirement", RANGES, ids=lambda requirement: requirement.name)
def test_the_lock_pins_each_dependency_inside_its_range(requirement):
    assert pinned(requirement.name) in requirement.specifier


@pytest.mark.parametrize("requirement", RANGES, ids=lambda requirement: requirement.name)
def test_a_range_is_bounded_on_both_sides(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    calendar_versioned_stubs = requirement.name.startswith("types-")
    assert operators == {">=", "<"} or (calendar_versioned_stubs and operators == {">="})


def test_each_lock_line_is_one_exact_pin_without_a_local_tag():
    exact = re.compile(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*")
    assert [line for line in LOCK_LINES if not exact.fullmatch(line)] == []


def test_the_lock_is_sorted_without_duplicates_gpu_packages_or_ourselves():
    names = [Requirement(line).name.lower() for line in LOCK_LINES]
    assert names == sorted(names)
    assert len(LOCK) == len(LOCK_LINES)
    assert not [name for name in LOCK if GPU_ONLY.match(name)]
    assert PROJECT["project"]["name"] not in LOCK


def test_conda_supplies_only_interpreter_and_compiler():
    names = {re.split("[=<>]", entry)[0] for entry in CONDA_NAMES}
    assert names == {"python", "pip", "gxx_linux-64", "ninja"}


def test_conda_takes_every_python_package_from_the_project_at_the_lock():
    assert "-c constraints.txt" in CONDA_PIP
    (editable,) = [line for line in CONDA_PIP if line.startswith("-e ")]
    assert set(re.findall(r"\w+", editable)) - {"e"} <= set(EXTRAS)
    assert len(CONDA_PIP) == 2


def test_python_versions_agree():
    (conda,) = [entry.removeprefix("python=") for entry in CONDA_NAMES if entry.startswith("python=")]
    required = SpecifierSet(PROJECT["project"]["requires-python"])
    assert Version(conda) in required
    assert PROJECT["tool"]["mypy"]["python_version"] == conda
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + conda.replace(".", "")
    assert f">={conda}" in str(required)
