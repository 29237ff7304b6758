"""Who imports whom, and what `import sparseflash` does not need."""

import subprocess
import sys

import pytest

from layers import (
    BACKENDS,
    COMMANDS,
    CORE,
    KERNELS,
    LIBRARY,
    ROOT,
    Imports,
    belongs,
    belongs_to_any,
    loaded_by,
    reached_from,
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b as c", {"a.b"}),
        ("from a import b", {"a", "a.b"}),
        ("from . import x", {"p.q", "p.q.x"}),
        ("from .x import y", {"p.q.x", "p.q.x.y"}),
        ("from .. import x", {"p", "p.x"}),
        ("from ..x import y", {"p.x", "p.x.y"}),
    ],
)
def test_imports_are_read_with_their_full_names(source, expected):
    assert Imports(source, "p.q.module").everywhere == expected
    assert Imports(source, "p.q", is_package=True).everywhere == expected


def test_an_import_in_a_function_is_told_from_one_at_import_time():
    source = "if True:\n    import a\nclass C:\n    import b\n    def f(self):\n        import c\n"
    imports = Imports(source, "m")
    assert imports.at_import == {"a", "b"}
    assert imports.everywhere == {"a", "b", "c"}


def test_the_library_is_read_whole():
    assert {
        *CORE[:1],
        *BACKENDS,
        "sparseflash",
        "sparseflash.attention",
        "sparseflash.masks",
    } <= LIBRARY.keys()


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_do_not_import_one_another(backend):
    others = ("sparseflash.attention", *(b for b in BACKENDS if b != backend))
    for module in (m for m in LIBRARY if belongs(m, backend)):
        assert [m for m in reached_from(module) if belongs_to_any(m, others)] == [], module


@pytest.mark.parametrize("module", [m for m in LIBRARY if belongs_to_any(m, CORE)])
def test_the_mask_type_knows_no_backend_and_no_pattern(module):
    others = (*BACKENDS, "sparseflash.attention", "sparseflash.backends.registration", "sparseflash.masks")
    assert [m for m in reached_from(module) if belongs_to_any(m, others)] == []


@pytest.mark.parametrize("module", [m for m in LIBRARY if belongs(m, "sparseflash.masks")])
def test_patterns_import_the_mask_type_only(module):
    parts_of_core = set(CORE).union(*(reached_from(m) for m in CORE if m in LIBRARY))
    allowed = {m for m in LIBRARY if m in parts_of_core or belongs_to_any(m, (*CORE, "sparseflash.masks"))} | {
        "sparseflash",
        "sparseflash.backends.triton.launcher",  # how Triton's kernels are launched, theirs too
    }
    assert (LIBRARY[module].everywhere & LIBRARY.keys()) - allowed == set()


@pytest.mark.parametrize("module", [m for m in LIBRARY if belongs(m, "sparseflash.analysis")])
def test_analysis_runs_nothing(module):
    others = (*BACKENDS, "sparseflash.attention", "sparseflash.backends.registration", "sparseflash.masks")
    assert [m for m in reached_from(module) if belongs_to_any(m, others)] == []


@pytest.mark.parametrize("module", [m for m in LIBRARY if not belongs_to_any(m, ("sparseflash.masks", *COMMANDS))])
def test_the_library_does_not_import_the_patterns(module):
    assert [m for m in LIBRARY[module].everywhere if belongs_to_any(m, ("sparseflash.masks", "masks"))] == []


@pytest.mark.parametrize("module", [m for m in LIBRARY if not belongs_to_any(m, COMMANDS)])
def test_nothing_imports_the_command_line(module):
    assert [m for m in LIBRARY[module].everywhere if belongs_to_any(m, COMMANDS)] == []


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_imports_neither_experiments_nor_tests(module):
    assert [m for m in LIBRARY[module].everywhere if belongs_to_any(m, ("experiments", "tests"))] == []


@pytest.mark.parametrize("module", [m for m in LIBRARY if not belongs_to_any(m, KERNELS)])
def test_only_the_kernels_import_triton(module):
    """Themselves, or by what they import: `backends.triton` has modules that work without Triton, too."""
    loaded = loaded_by(module)
    assert [m for m in loaded if "triton" in {name.partition(".")[0] for name in LIBRARY[m].at_import}] == []


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
assert not any(name.partition(".")[0] == "scipy" for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_parts_of_the_library_need_no_import_of_their_own():
    program = """
import sys, sparseflash
for name in ("analysis", "draw", "interop", "masks", "testing", "huggingface"):
    assert name in dir(sparseflash)
    assert f"sparseflash.{name}" not in sys.modules
    assert getattr(sparseflash, name) is sys.modules[f"sparseflash.{name}"]
assert not hasattr(sparseflash, "attentions")
public = {name for name in dir(sparseflash) if name != "__version__"}
assert public >= {"BlockMask", "attention"} and not any(name.startswith("_") for name in public)
assert all(hasattr(sparseflash, name) for name in dir(sparseflash))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
