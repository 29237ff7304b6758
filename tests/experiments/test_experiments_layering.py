"""Which folder of experiments may import which, and that test files import helper modules only."""

import pytest

from layers import ROOT, belongs, belongs_to_any, modules_below

EXPERIMENTS = modules_below(ROOT / "experiments", "experiments")

# Beside itself.
ALLOWED = {
    "training": (),
    "benchmarks": ("training",),
    "pathfinder": ("training",),
    "lra": ("training", "pathfinder", "benchmarks.timing"),
    "pathx": ("training", "pathfinder", "benchmarks.timing"),
}


def named(folders):
    return tuple(f"experiments.{folder}" for folder in folders)


def test_every_folder_with_code_has_a_rule():
    assert {name.split(".")[1] for name in EXPERIMENTS if "." in name} == ALLOWED.keys()


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_may(folder):
    own = f"experiments.{folder}"
    # `from experiments.benchmarks import timing` names the folder, too.
    parents = {name.rpartition(".")[0] for name in named(ALLOWED[folder])} - {own}
    allowed = named((folder, *ALLOWED[folder]))
    for module in (module for module in EXPERIMENTS if belongs(module, own)):
        found = {name for name in EXPERIMENTS[module].everywhere & EXPERIMENTS.keys() if name not in parents}
        assert [name for name in found if not belongs_to_any(name, allowed)] == [], module


@pytest.mark.parametrize(
    "folder", ["experiments.training", "experiments.lra", "experiments.lra.data", "experiments.pathfinder"]
)
def test_packages_of_worker_processes_import_nothing(folder):
    assert EXPERIMENTS[folder].everywhere == set()


def test_test_files_do_not_import_one_another():
    tests = modules_below(ROOT / "tests", "tests")
    names = [name.rpartition(".")[2] for name in tests]
    files = {name for name in names if name.startswith("test_")}
    assert len(files) == sum(name.startswith("test_") for name in names)  # pytest needs their names to be unique
    found = {name: {each.split(".")[0] for each in imports.everywhere} & files for name, imports in tests.items()}
    assert {name: imported for name, imported in found.items() if imported} == {}
