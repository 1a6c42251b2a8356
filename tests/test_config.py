"""Profiles: those that ship, and sentences for those that are wrong."""

import json
import pickle
from pathlib import Path

import pytest

from serving.app import AppArgs, app
from serving.config import (
    EngineConfig,
    ModelConfig,
    Profile,
    SuffixDrafter,
    ViaVerifier,
    check_servable,
    load_profile,
    profile_names,
)
from serving.config_mask import LayerMask, read_mask
from serving.config_rules import AsdRule, Calibration, CsdRule
from serving.errors import ConfigError
from tests.models.tiny import tiny_model


def test_shipped_profiles_load_under_their_names() -> None:
    assert profile_names() == ["asd", "asd-csd", "csd", "eagle3", "hybrid", "plain", "strict", "suffix", "via"]
    for name in profile_names():
        assert load_profile(name).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nunknown: 1", "unknown: Extra inputs"),
        ("name: a\ndrafter: {kind: magic}", "drafter"),
        ("name: a\nengine: {max_sessions: 0}", "engine.max_sessions"),
        ("name: a\ndrafter: {kind: suffix, max_draft: 65}", "max_draft"),
        ("name: a\nverifier: {kind: via, theta_accept: 0.4, theta_escalate: 0.6}", "at least theta_escalate"),
        ("name: a\nverifier: {kind: via}", "drafter 'none' makes none"),
        ("name: a\ndrafter: {kind: suffix}\nverifier: {kind: via, seed_from_full: true}", "placement: colocated"),
        ("name: a\ndrafter: {kind: flexdraft}\nverifier: {kind: via}", "drafter"),
        ("name: a b", "name"),
        ("name: a\nrule: {kind: asd}", "rule 'asd' judges drafts, but drafter 'none' makes none"),
        ("name: a\nrule: {kind: asd, max_exceptions: 0}", "budget is 8, but max_exceptions is 0"),
        ("name: a\nrule: {kind: asd, budget: -1}", "rule.asd.budget"),
        ("name: a\nrule: {kind: csd, min_ratio: 2.5}", "rule.csd.min_ratio"),
        ("name: a\nrule: {kind: csd, table: t.parquet}", "table and table_hash belong together"),
        (
            "name: a\nrule: {kind: asd, calibration: {num_mismatches: 1, shares: [0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]}}",
            "add up to 1",
        ),
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


NUMBERS = {
    "engine: {%s: %s}": ("max_sessions", "draft_timeout_s"),
    "drafter: {kind: suffix, %s: %s}": ("max_draft", "factor"),
    "drafter: {kind: model}\nrule: {kind: asd, %s: %s}": ("budget", "max_exceptions"),
    "drafter: {kind: model}\nrule: {kind: csd, %s: %s}": ("count_above", "max_pairs"),
    "drafter: {kind: hybrid, chooser: {kind: yield, %s: %s}}": ("tau",),
    "drafter: {kind: model}\nverifier: {kind: via, %s: %s}": ("theta_accept", "max_unverified"),
}
EACH_NUMBER = [(text, name) for text, names in NUMBERS.items() for name in names]


@pytest.mark.parametrize(("text", "name"), EACH_NUMBER)
@pytest.mark.parametrize("value", ["true", "'8'"])
def test_only_a_number_is_a_number(tmp_path: Path, text: str, name: str, value: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: a\n" + text % (name, value))
    with pytest.raises(ConfigError, match=rf"{name}(.float)?: Input should be a valid (number|integer)"):
        load_profile(str(path))


@pytest.mark.parametrize(("text", "name"), EACH_NUMBER)
def test_an_integer_will_do_for_any_number(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: a\n" + text % (name, 1))
    assert load_profile(str(path)).name == "a"


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nengine: {guard: 1}",
        "name: a\nallow_uncertified: 'yes'",
        "name: 7",
        "name: a\nrule: {kind: asd, calibration: {num_mismatches: 1, shares: ['1', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]}}",
        "name: a\nrule: {kind: asd, calibration: {num_mismatches: 1, shares: [true, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]}}",
    ],
)
def test_no_other_type_is_taken_for_another(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="Input should be a valid"):
        load_profile(str(path))


@pytest.mark.parametrize("kept", ['["0", 2]', "[true, 2]", '"02"'])
def test_kept_layers_are_integers(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "mask.json"
    path.write_text(f'{{"model": "m", "num_layers": 3, "kept": {kept}}}')
    with pytest.raises(ConfigError, match="kept"):
        read_mask(str(path))


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="asd, asd-csd, csd, eagle3, hybrid, plain, strict, suffix"):
        load_profile("nope")


def test_a_profile_without_a_drafter_never_drafts() -> None:
    assert Profile(name="a").max_draft == 0


def test_case_28_three_tiers_are_not_served_by_accident() -> None:
    lossy = Profile(name="a", drafter=SuffixDrafter(), verifier=ViaVerifier())
    assert not lossy.is_lossless
    with pytest.raises(ConfigError, match=r"verifier 'via'.*allow_uncertified"):
        check_servable(lossy)
    check_servable(lossy.model_copy(update={"allow_uncertified": True}))


LOSSY = "name: mine\ndrafter: {kind: suffix}\nrule: {kind: %s}\n"


@pytest.mark.parametrize("kind", ["asd", "csd", "asd-csd"])
def test_case_28_a_lossy_profile_without_certificate_or_opt_in_is_not_served(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(LOSSY % kind)
    with pytest.raises(ConfigError, match=f"'mine' is lossy .rule '{kind}'. and has no certificate") as caught:
        app(AppArgs(profile=str(path)))
    assert "allow_uncertified: true" in str(caught.value)
    path.write_text(LOSSY % kind + "allow_uncertified: true\n")
    check_servable(load_profile(str(path)))


def test_a_mask_of_another_target_is_refused_before_anything_is_placed(tmp_path: Path) -> None:
    mask, path, target = tmp_path / "mask.json", tmp_path / "mine.yaml", tmp_path / "target"
    tiny_model("llama", num_hidden_layers=4).config.save_pretrained(target)
    mask.write_text(json.dumps({"model": str(target), "num_layers": 3, "kept": [0, 2]}))
    path.write_text(
        f"name: mine\ntarget: {{model: {target}}}\ndrafter: {{kind: suffix}}\nallow_uncertified: true\n"
        f"verifier: {{kind: via, mask: {mask}}}\n"
    )
    with pytest.raises(ConfigError, match=r"mask: was searched for .* with 3 layers, .* with 4; search again"):
        app(AppArgs(profile=str(path)))


@pytest.mark.parametrize("rule", [AsdRule(budget=0.0), AsdRule(gate=0.0), CsdRule(min_ratio=1.5)])
def test_a_rule_with_nothing_to_accept_needs_no_opt_in(rule: AsdRule | CsdRule) -> None:
    check_servable(Profile(name="a", drafter=SuffixDrafter(), rule=rule))


def test_a_table_lies_beside_its_profile_and_its_place_is_no_part_of_the_hash(tmp_path: Path) -> None:
    hashes = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        path = folder / "mine.yaml"
        path.write_text(
            "name: mine\ndrafter: {kind: suffix}\nrule: {kind: csd, table: t.parquet, table_hash: '%s'}" % ("0" * 16)
        )
        profile = load_profile(str(path))
        assert isinstance(profile.rule, CsdRule)
        assert profile.rule.table == str(folder / "t.parquet")
        hashes.add(profile.hash)
    other = profile.model_copy(update={"rule": profile.rule.model_copy(update={"table_hash": "1" * 16})})
    assert len(hashes) == 1
    assert other.hash not in hashes


def test_kept_layers_are_part_of_the_hash_and_the_place_of_their_file_is_not(tmp_path: Path) -> None:
    hashes = []
    for number, (kept, found) in enumerate([([0, 2], 1.0), ([0, 2], 2.0), ([0, 1, 2], 2.0)]):
        mask = tmp_path / f"{number}.json"
        mask.write_text(json.dumps({"model": "m", "num_layers": 3, "kept": kept, "found": found}))
        verifier = ViaVerifier(mask=str(mask))
        hashes.append(Profile(name="a", drafter=SuffixDrafter(), verifier=verifier).hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_mask_lies_beside_its_profile_or_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "m.json").write_text(json.dumps({"model": "m", "num_layers": 3, "kept": [0, 2]}))
    path = folder / "a.yaml"
    text = "name: a\ndrafter: {kind: suffix}\nverifier: {kind: via, mask: %s}"
    for mask, kept in (("m.json", 2), (folder / "m.json", 2), ("smollm2-135m-via", 26)):
        path.write_text(text % mask)
        assert len(load_profile("mine/a.yaml").verifier.layers.kept) == kept  # type: ignore[union-attr]
    path.write_text(text % "nope.json")
    with pytest.raises(ConfigError, match=f"neither a shipped mask nor a file .there is no {folder}/nope.json"):
        load_profile("mine/a.yaml")


def test_whether_a_mask_has_a_digest_of_its_model_is_no_part_of_the_hash() -> None:
    hashes = set()
    for digest in (None, "f00"):
        layers = LayerMask(model="m", num_layers=3, kept=(0, 2), digest=digest)
        hashes.add(BASE.model_copy(update={"verifier": ViaVerifier(layers=layers)}).hash)
    assert len(hashes) == 1


def test_a_loaded_profile_keeps_its_layers_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    """Target and slim verifier get the same profile, wherever and whenever they start."""
    mask, path = tmp_path / "mask.json", tmp_path / "a.yaml"
    mask.write_text(json.dumps({"model": "m", "num_layers": 3, "kept": [0, 2]}))
    path.write_text(f"name: a\ndrafter: {{kind: suffix}}\nverifier: {{kind: via, mask: {mask}}}")
    before = load_profile(str(path))
    mask.write_text(json.dumps({"model": "m", "num_layers": 3, "kept": [0, 1, 2]}))
    after = load_profile(str(path))
    assert before != after
    assert before.hash != after.hash
    travelled = pickle.loads(pickle.dumps(before))
    mask.unlink()
    assert travelled.verifier.layers.kept == (0, 2)
    assert travelled.hash == before.hash
    with pytest.raises(ConfigError, match=r"verifier.mask: .*neither a shipped mask nor a file"):
        load_profile(str(path))


CALIBRATED = Calibration(num_mismatches=9, shares=(1.0, *[0.0] * 10), provenance="2026-11-30")
BASE = Profile(name="a", drafter=SuffixDrafter(), rule=AsdRule())


@pytest.mark.parametrize(
    "other",
    [
        {"name": "b"},
        {"allow_uncertified": True},
        {"engine": EngineConfig(max_sessions=2, max_length=64, guard=False)},
        {"placement": "colocated"},
        {"rule": AsdRule(calibration=CALIBRATED)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_the_hash_is_the_same_wherever_and_however_large_a_profile_runs(other: dict[str, object]) -> None:
    assert BASE.model_copy(update=other).hash == BASE.hash


@pytest.mark.parametrize(
    "other",
    [
        {"target": ModelConfig(dtype="float32")},
        {"drafter": SuffixDrafter(max_draft=2)},
        {"rule": AsdRule(budget=7.0)},
        {"verifier": ViaVerifier()},
    ],
    ids=lambda other: next(iter(other)),
)
def test_the_hash_names_models_rule_and_verifier(other: dict[str, object]) -> None:
    assert BASE.model_copy(update=other).hash != BASE.hash
