from graphlib import CycleError, TopologicalSorter
from unittest import mock

import pytest

from tests.layering.imports import MODULES, ROOT, Imports, allowed, below, modules_of, path_of, read, row_of
from tests.layering.rules import BACKENDS, FACADE, GROUPS, KERNELS, MAY_IMPORT, PUBLIC
from tests.processes.forked import python

FOLDERS = [row for row in MAY_IMPORT if not row.endswith(".py") and row not in GROUPS]
TESTS = read(ROOT / "tests", "tests")


def modules_in(row):
    return [module for module in MODULES if row_of(path_of(module)) == row]


def refused(module, imports):
    return sorted(name for name in modules_of(imports) if not allowed(module, name))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b as c", ("a.b", "")), ("from a import b", ("a", "b")), ("from . import x", ("p.q", "x")),
        ("from .x import y", ("p.q.x", "y")), ("from .. import x", ("p", "x")), ("from ..x import y", ("p.x", "y")),
    ],
)  # fmt: skip
def test_imports_are_read_with_their_full_names(source, expected):
    assert Imports(source, "p.q.module").everywhere == {expected}
    assert Imports(source, "p.q", is_package=True).everywhere == {expected}


def test_imports_are_told_apart_by_when_they_run():
    imports = Imports(
        """
if True:
    import a
class C:
    import b
    def f(self):
        import c
if TYPE_CHECKING:
    import d
    def g():
        import e
else:
    import f
""",
        "m",
    )
    assert imports.at_import == {("a", ""), ("b", ""), ("f", "")}
    assert imports.in_functions == {("c", "")}
    assert imports.for_types == {("d", ""), ("e", "")}


def test_a_name_of_a_package_is_the_module_if_there_is_one():
    names = {
        ("sparseflash", "masks"),
        ("sparseflash.blockmask", "BlockMask"),
        ("experiments.lra.table.run", ""),
        ("re", ""),
    }
    assert modules_of(names) == {"sparseflash.masks", "sparseflash.blockmask", "experiments.lra.table.run"}


def test_every_folder_has_a_row_and_every_row_a_folder_or_file():
    folders = {path_of(module).rpartition("/")[0] for module in MODULES}
    assert folders == set(FOLDERS), "a new folder needs a row in tests/layering/rules.py"
    assert [row for row in MAY_IMPORT if modules_in(row) == [] and row not in FOLDERS] == []
    paths = {path_of(module) for module in MODULES}
    assert [file for files in GROUPS.values() for file in files if file not in paths] == []
    assert GROUPS.keys() <= MAY_IMPORT.keys() and set().union(*MAY_IMPORT.values()) <= MAY_IMPORT.keys()


@pytest.mark.parametrize("row", MAY_IMPORT)
def test_a_part_imports_only_what_it_may(row):
    found = {module: refused(module, MODULES[module].everywhere) for module in modules_in(row)}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize("row", MAY_IMPORT)
def test_a_part_may_import_only_what_it_does(row):
    used = {row_of(path_of(name)) for module in modules_in(row) for name in modules_of(MODULES[module].everywhere)}
    unused = MAY_IMPORT[row] - used
    for several in (PUBLIC, BACKENDS):
        if set(several) <= MAY_IMPORT[row] and used & set(several):
            unused -= set(several)
    assert unused == set()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sparseflash.backends.blockwise", "from sparseflash.backends import reference"),
        ("sparseflash.backends.reference", "from sparseflash.backends.triton.configs import TILES"),
        ("sparseflash.backends.triton.api", "from sparseflash import attention"),
        ("sparseflash.backends.triton.portable.forward", "from sparseflash.blockmask.ops.tilelist import TileList"),
        ("sparseflash.backends.triton.schedule.plan", "from sparseflash.backends.triton.portable import forward"),
        ("sparseflash.backends.triton.hopper.passes", "from sparseflash.backends.triton.portable import merging"),
        ("sparseflash.backends.triton.launch.merging", "from sparseflash.backends.triton.portable import choice"),
        ("sparseflash.blockmask.build", "def f():\n    from sparseflash.draw.text import to_string"),
        ("sparseflash.blockmask.ops.crop", "from sparseflash.backends.problem import Problem"),
        ("sparseflash.blockmask.mask", "from sparseflash.masks import causal"),
        ("sparseflash.analysis.flops", "from sparseflash.attention import attention"),
        ("sparseflash.distributed.routes", "from sparseflash.backends.problem import Problem"),
        ("sparseflash.interop.flex", "if TYPE_CHECKING:\n    from sparseflash import masks"),
        ("sparseflash.attention", "import sparseflash.cli"),
        ("sparseflash.attention", "import experiments.training.clock"),
        ("sparseflash.masks.local", "from sparseflash.attention import attention"),
        ("sparseflash.masks.tiling.band", "from sparseflash.masks import causal"),
        ("experiments.training.trainer", "from experiments.lra import config"),
        ("experiments.lra.train", "def f():\n    from experiments.pathx.data import packing"),
        ("experiments.lra.train", "from sparseflash.blockmask import bitmask"),
        ("experiments.pathx.train", "from experiments.benchmarks.speed import cases"),
        ("experiments.benchmarks.io", "from experiments.benchmarks.speed import cases"),
        ("sparseflash.backends.problem", "from sparseflash.backends import blockwise"),
        ("sparseflash.backends.blockwise_tiles", "from sparseflash.backends.cached import rows_of"),
        ("sparseflash.backends.triton.persistent.plan", "from sparseflash.backends.triton import dispatch"),
        ("sparseflash.backends.triton.portable.forward", "from sparseflash.backends.triton.hopper import forward"),
        ("sparseflash.backends.triton.changes.kinds", "from sparseflash.backends.triton.persistent import plan"),
        ("sparseflash.backends.triton.decode.api", "from sparseflash.backends.triton.schedule import plan"),
        ("sparseflash.backends.triton.launcher", "from sparseflash.backends.triton import family"),
        ("sparseflash.backends.triton.device", "from sparseflash.backends.triton.hopper import gluon_api"),
        ("sparseflash.decode", "from sparseflash.attention import attention"),
        ("sparseflash.nn.heads", "from sparseflash.interop import flex"),
        ("sparseflash.scores.softcap", "from sparseflash.backends.problem import Problem"),
        ("sparseflash.masks.fused.rows", "from sparseflash.backends.triton.api import forward"),
        ("sparseflash.testing.comparison", "from sparseflash.backends import blockwise"),
        ("experiments.lm.data.store", "from sparseflash import attention"),
        ("experiments.benchmarks.layer", "from sparseflash.backends import blockwise"),
    ],
)
def test_a_wrong_import_is_refused(module, source):
    assert module in MODULES
    assert len(refused(module, Imports(source, module).everywhere)) == 1


def test_what_begins_to_import_is_no_longer_open_to_all():
    user = "sparseflash.backends.reference"
    assert refused(user, {("sparseflash", "dropout")}) == []
    changed = Imports("from sparseflash.validation import check", "sparseflash.dropout")
    with mock.patch.dict(MODULES, {"sparseflash.dropout": changed}):
        assert refused(user, {("sparseflash", "dropout")}) == ["sparseflash.dropout"]


def test_no_two_modules_need_each_other_to_be_imported():
    assert circle({module: modules_of(imports.at_import) for module, imports in MODULES.items()}) == []


def test_every_circle_of_imports_passes_through_the_methods_of_the_mask():
    graph = {module: modules_of(imports.at_import | imports.in_functions) for module, imports in MODULES.items()}
    assert circle({module: others - {FACADE} for module, others in graph.items()}) == []
    assert FACADE in circle(graph)


def circle(graph):
    try:
        TopologicalSorter({module: others - {module} for module, others in graph.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize(
    "module", [m for m in MODULES if not below(path_of(m), "experiments", *KERNELS, separator="/")]
)
def test_only_the_kernels_import_triton(module):
    loaded, waiting = {module}, [module]
    while waiting:
        new = modules_of(MODULES[waiting.pop()].at_import) - loaded
        loaded |= new
        waiting += new
    assert [m for m in loaded if "triton" in {base.partition(".")[0] for base, _ in MODULES[m].at_import}] == []


def loaded_by(start):
    loaded, waiting = set(start), list(start)
    while waiting:
        imports = MODULES[waiting.pop()]
        new = modules_of(imports.at_import | imports.in_functions) - loaded
        loaded |= new
        waiting += new
    return loaded


def test_no_module_of_the_library_has_400_lines():
    ours = [module for module in MODULES if below(module, "sparseflash")]
    lengths = {module: (ROOT / path_of(module)).read_text().count("\n") for module in ours}
    assert len(ours) > 400 and not {module: length for module, length in lengths.items() if length >= 400}


def test_hopper_needs_nothing_of_the_portable_kernels():
    backend = "sparseflash.backends.triton"
    loaded = loaded_by({module for module in MODULES if below(module, f"{backend}.hopper")})
    assert sorted(module for module in loaded if below(module, f"{backend}.portable")) == []


@pytest.mark.parametrize(
    "package", ["experiments.training", "experiments.lra", "experiments.lra.data", "experiments.pathfinder"]
)
def test_packages_of_worker_processes_import_nothing(package):
    assert MODULES[package].everywhere == set()


def test_nothing_imports_the_tests():
    found = {m for m, imports in MODULES.items() if any(below(base, "tests") for base, _ in imports.everywhere)}
    assert found == set()


def test_test_files_do_not_import_one_another():
    found = {name: {base for base, _ in imports.everywhere if ".test_" in base} for name, imports in TESTS.items()}
    assert {name: imported for name, imported in found.items() if imported} == {}


def test_every_folder_of_tests_is_a_package():
    """Otherwise two test files of one name collide."""
    folders = {file.parent for file in (ROOT / "tests").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_import_works_without_triton_needs_no_scipy_and_asks_no_device():
    program = """
import sys, torch

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError("triton is blocked")

def asked(*args, **kwargs):
    raise AssertionError("a device was asked for at import")

sys.meta_path.insert(0, NoTriton())
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_name",
             "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, asked)

import sparseflash
import sparseflash.masks

assert not torch.cuda.is_initialized()
assert "sparseflash.analysis" not in sys.modules
assert "triton" not in sys.modules
assert "torch._dynamo" not in sys.modules  # whose import takes as long as that of torch itself
assert not any(name.partition(".")[0] == "scipy" for name in sys.modules)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_parts_of_the_library_need_no_import_of_their_own():
    program = """
import sys, sparseflash
for name in ("analysis", "distributed", "draw", "interop", "masks", "testing", "huggingface"):
    assert name in dir(sparseflash)
    assert f"sparseflash.{name}" not in sys.modules
    assert getattr(sparseflash, name) is sys.modules[f"sparseflash.{name}"]
assert not hasattr(sparseflash, "attentions")
public = {name for name in dir(sparseflash) if name != "__version__"}
assert public >= {"BlockMask", "attention"} and not any(name.startswith("_") for name in public)
assert all(hasattr(sparseflash, name) for name in dir(sparseflash))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
