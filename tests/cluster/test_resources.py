"""What an application needs against what there is; the manifests say the same; sizes suit the machine."""

import json
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.resources import Bundle, Need, PlacementError, needs_of, preflight, sizes_for_one_machine
from serving.app import AppArgs
from serving.config import Profile, load_profile

MANIFESTS = sorted((Path(__file__).parents[2] / "cluster").glob("serve*.yaml"))
CPU = Bundle(num_cpus=1)
GPU = Bundle(num_cpus=1, num_gpus=1)

FITS = {
    "exactly": ([Need("target", 2, CPU)], [Bundle(2)]),
    "fractions": ([Need("target", 3, Bundle(0.1))], [Bundle(0.3)]),
    "nothing needed": ([Need("gateway", 1, Bundle())], [Bundle()]),
    "over two nodes": ([Need("target", 2, GPU)], [Bundle(1, 1), Bundle(1, 1)]),
    "the gpu node is left to those who need it": (
        [Need("gateway", 1, CPU), Need("target", 1, GPU)],
        [GPU, CPU],
    ),
}
LACKS = {
    "a cpu": ([Need("target", 1, CPU), Need("drafter", 1, CPU)], [CPU], "drafter x1"),
    "a gpu": ([Need("target", 1, GPU)], [Bundle(8)], "target x1"),
    "one node that has both": ([Need("target", 1, Bundle(2, 1))], [Bundle(1, 1), Bundle(1, 0)], "target x1"),
    "several": ([Need("target", 4, GPU)], [Bundle(8, 1)], "target x3"),
}


@pytest.mark.parametrize(("needs", "nodes"), FITS.values(), ids=FITS)
def test_what_fits_passes(needs, nodes):
    preflight(needs, nodes)


@pytest.mark.parametrize(("needs", "nodes", "missing"), LACKS.values(), ids=LACKS)
def test_case_36_what_lacks_is_named_and_shown_against_what_there_is(needs, nodes, missing):
    with pytest.raises(PlacementError) as caught:
        preflight(needs, nodes)
    first, *rows = str(caught.value).splitlines()
    assert first == f"placement: this Ray has no room for {missing}; nothing was placed"
    assert [row.split("  ")[1] for row in rows[1:]] == [
        *(need.role for need in needs),
        "needed in all",
        *(f"free on node {i + 1}" for i in range(len(nodes))),
    ]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_valid_and_names_a_profile_that_ships(manifest):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(manifest.read_text()))
    (application,) = schema.applications
    assert application.import_path == "serving.app:app"
    args = AppArgs.model_validate(application.args)
    load_profile(args.profile)


def test_the_cpu_manifest_fits_two_cpus():
    args = AppArgs.model_validate(
        yaml.safe_load(next(m for m in MANIFESTS if "cpu" in m.name).read_text())["applications"][0]["args"]
    )
    preflight(needs_of(args, load_profile(args.profile)), [Bundle(num_cpus=2)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"profil": "suffix"},
        {"profile": "suffix", "target": {"num_cpu": 1}},
        {"profile": "suffix", "replicas": 3},
        {"profile": "suffix", "target": {"min_replicas": 2}},
        {"profile": "suffix", "target": {"num_gpus": -1}},
    ],
)
def test_an_unknown_key_or_an_impossible_number_is_refused(wrong):
    with pytest.raises(ValidationError):
        AppArgs.model_validate(wrong)


@pytest.mark.parametrize("kind", ["none", "suffix", "model", "via"])
@pytest.mark.parametrize(("cpus", "gpus"), [(1, 0), (2, 0), (16, 0), (8, 1), (32, 2)])
def test_one_machine_is_used_and_never_overbooked(kind, cpus, gpus):
    roles = (
        {"drafter": {"kind": "model"}, "verifier": {"kind": "via"}} if kind == "via" else {"drafter": {"kind": kind}}
    )
    profile = Profile.model_validate({"name": "p"} | roles)
    args = AppArgs(profile="p", **sizes_for_one_machine(profile, num_cpus=cpus, num_gpus=gpus))
    preflight(needs_of(args, profile), [Bundle(cpus, gpus)])
    assert args.target.num_cpus >= cpus / 2
    if cpus < 4:
        assert args.target.num_cpus == cpus  # a core less would halve the Target's speed


def test_the_launcher_file_is_what_ray_up_expects_and_asks_for_a_token():
    launcher = yaml.safe_load((MANIFESTS[0].parent / "ray.yaml").read_text())
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(launcher, schema)
    assert any("RAY_AUTH_MODE=token" in command for command in launcher["setup_commands"])
