"""Imports go down only: the layers of ARCHITECTURE.md, read from the source of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("serving", "tuning", "jobs", "cluster")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}

LAYERS = {  # the longest matching prefix wins; a module without a layer fails
    "serving.types": 0, "serving.requests": 0, "serving.session": 0, "serving.errors": 0, "serving.config": 0,
    "serving.config_rules": 0, "serving.config_mask": 0,
    "serving.compiling": 0,
    "serving.rules": 1, "serving.memory": 1, "serving.trace": 1,
    "serving.protocols": 2, "serving.drafters": 2, "serving.verifiers": 2, "serving.decode": 2,
    "serving.models": 3, "serving.build": 4, "serving.build_drafter": 4, "serving.build_rules": 4,
    "serving.build_via": 4, "serving.deploy": 4,
    "serving.api": 5, "serving.app": 5,
    "tuning": 6, "cluster": 7, "jobs": 8,
}  # fmt: skip
LIBRARIES = {
    "pyarrow": 1, "torch": 3, "transformers": 3, "deepspeed": 3, "ray": 4, "fastapi": 5, "starlette": 5,
}  # fmt: skip
HEAVY = ("torch", "transformers", "deepspeed", "serving.models")

# What the numbers cannot say. Importing modules -> what they (and all below them) must not, or may, import.
FORBIDDEN = {
    "serving.build": ("ray", "serving.deploy"),
    "serving.build_via": ("ray", "serving.deploy"),
    "serving.build_drafter": ("ray", "serving.deploy"),
    "serving.build_rules": ("ray", "serving.deploy"),
    "serving.api": ("ray",),
    "tuning": ("ray", "fastapi", "serving.deploy", "serving.api", "serving.app", *HEAVY),
}
ALLOWED = {
    "tuning.search": ("ray", "cluster.connect"),
    "tuning.train_*": HEAVY,
    "tuning.via": HEAVY,
}


def within(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(prefix.rstrip("*") if prefix.endswith("*") else f"{prefix}.")


def layer(module: str) -> int | None:
    prefixes = [prefix for prefix in LAYERS | LIBRARIES if within(module, prefix)]
    return (LAYERS | LIBRARIES)[max(prefixes, key=len)] if prefixes else None


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names(rules: dict[str, tuple[str, ...]], module: str, name: str) -> bool:
    return any(within(module, m) and within(name, n) for m, imported in rules.items() for n in imported)


def is_wrong(module: str, name: str) -> bool:
    mine, other = layer(module), layer(name)
    goes_up = mine is not None and other is not None and other > mine
    return (goes_up or names(FORBIDDEN, module, name)) and not names(ALLOWED, module, name)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below(module):
    tree = ast.parse(MODULES[module].read_text())
    assert module == "serving" or layer(module) is not None, f"{module} needs a layer in LAYERS"
    assert [name for name in sorted(imports(tree)) if is_wrong(module, name)] == []


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        ("serving.rules.asd", "serving.types.Draft", False),
        ("serving.types", "serving.rules.prefix", True),
        ("serving.decode.round", "torch", True),
        ("serving.models.packed_lm", "torch.nn", False),
        ("serving.models.packed_lm", "ray", True),
        ("serving.build", "ray", True),
        ("serving.deploy.target", "ray.serve", False),
        ("serving.api.chat", "ray", True),
        ("serving.app", "ray.serve", False),
        ("serving.app", "jobs.serve", True),
        ("serving.deploy.target", "tuning.artifacts", True),
        ("tuning.asd", "serving.rules.asd", False),
        ("tuning.asd", "serving.models.packed_lm", True),
        ("tuning.asd", "torch", True),
        ("tuning.train_drafter", "torch.nn", False),
        ("tuning.search", "ray.tune", False),
        ("tuning.replay", "ray", True),
        ("cluster.connect", "jobs.demo", True),
        ("jobs.demo", "cluster.connect", False),
    ],
)
def test_the_rule_itself(module, name, wrong):
    assert is_wrong(module, name) is wrong
