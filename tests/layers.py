"""Which module may import which, and the imports of each module of the repository."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Modules that experiments import as any user does.
PUBLIC = (
    "sparseflash/__init__.py",
    "sparseflash/attention.py",
    "sparseflash/decode.py",
    "sparseflash/grouped.py",
    "sparseflash/nn",
    "sparseflash/scaled_dot_product.py",
    "sparseflash/varlen.py",
    "sparseflash/analysis",
    "sparseflash/distributed",
    "sparseflash/draw",
    "sparseflash/interop",
    "sparseflash/scores",
    "sparseflash/testing",
    "masks",
)
_BACKENDS, _TRITON, _BENCHMARKS = "sparseflash/backends", "sparseflash/backends/triton", "experiments/benchmarks"
_LIMITS = "sparseflash/limits.py"
_PATTERN_TEXT = "sparseflash/cli/pattern_text.py"  # patterns on the command lines of experiments
_FLEX, _INTERPRETER = f"{_BENCHMARKS}/speed/peers/flexattention.py", f"{_BENCHMARKS}/interpreter.py"
_HARNESS = f"{_BENCHMARKS}/harness"

# For each folder, the paths that its modules may import besides one another, and everything below these paths. Imports
# inside functions and for types count. Every folder has a row, and some files have their own; a module belongs to the
# longest path that it lies below.
MAY_IMPORT = {
    "sparseflash": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/explain.py",
        "sparseflash/performance.py",
        "sparseflash/scaled_dot_product.py",
        "sparseflash/varlen.py",
    ),
    "sparseflash/__main__.py": ("sparseflash/cli",),
    "sparseflash/cuda_driver.py": (),
    "sparseflash/dropout.py": (),
    "sparseflash/performance.py": (),
    _LIMITS: (),
    "sparseflash/remedies.py": (),
    "sparseflash/validation.py": ("sparseflash/blockmask", "sparseflash/scores"),
    "sparseflash/scores": ("sparseflash/blockmask", _LIMITS),
    "sparseflash/attention.py": (
        "sparseflash/blockmask",
        "sparseflash/backends",
        "sparseflash/dropout.py",
        "sparseflash/remedies.py",
        "sparseflash/scores",
        "sparseflash/validation.py",
    ),
    "sparseflash/explain.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/backends",
        "sparseflash/dropout.py",
        "sparseflash/scores",
        "sparseflash/validation.py",
    ),
    "sparseflash/huggingface": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/decode.py",
        "sparseflash/interop",
        "sparseflash/scores",
    ),
    "sparseflash/grouped.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask/arguments.py",
        "sparseflash/validation.py",
        "masks/block_index.py",
    ),
    "sparseflash/pattern.py": ("sparseflash/blockmask",),
    "sparseflash/varlen.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/pattern.py",
        "masks/causal.py",
        "masks/dense.py",
        "masks/documents.py",
    ),
    "sparseflash/scaled_dot_product.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/interop",
        "sparseflash/scores",
        "masks/causal.py",
    ),
    "sparseflash/nn": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/decode.py",
        "sparseflash/pattern.py",
        "sparseflash/scaled_dot_product.py",
        "sparseflash/scores",
        "sparseflash/validation.py",
        "masks/causal.py",
    ),
    "sparseflash/decode.py": (
        "sparseflash/blockmask",
        _LIMITS,
        "sparseflash/validation.py",
        f"{_BACKENDS}/cached.py",
        f"{_BACKENDS}/direct.py",
        f"{_TRITON}/decode",
    ),
    "sparseflash/blockmask": ("sparseflash/blockmask/mask.py", "sparseflash/cuda_driver.py", _LIMITS),
    "sparseflash/blockmask/mask.py": ("sparseflash/blockmask", "sparseflash/draw", "masks/block_index.py"),
    "sparseflash/blockmask/ops": ("sparseflash/blockmask",),
    _BACKENDS: (),
    f"{_BACKENDS}/problem.py": ("sparseflash/blockmask", "sparseflash/dropout.py"),
    f"{_BACKENDS}/flop_counter.py": (f"{_BACKENDS}/problem.py", "sparseflash/blockmask/arguments.py"),
    f"{_BACKENDS}/saved.py": (),
    f"{_BACKENDS}/direct.py": (f"{_BACKENDS}/saved.py",),
    f"{_BACKENDS}/refused_derivatives.py": (),
    f"{_BACKENDS}/registration.py": (
        _LIMITS,
        f"{_BACKENDS}/direct.py",
        f"{_BACKENDS}/flop_counter.py",
        f"{_BACKENDS}/problem.py",
        f"{_BACKENDS}/refused_derivatives.py",
        f"{_BACKENDS}/saved.py",
    ),
    f"{_BACKENDS}/scored.py": (
        f"{_BACKENDS}/direct.py",
        f"{_BACKENDS}/problem.py",
        f"{_BACKENDS}/refused_derivatives.py",
        f"{_BACKENDS}/registration.py",
        f"{_BACKENDS}/saved.py",
        f"{_BACKENDS}/scored_function.py",
        "sparseflash/blockmask/arguments.py",
        "sparseflash/scores",
    ),
    f"{_BACKENDS}/scored_function.py": (
        f"{_BACKENDS}/problem.py",
        f"{_BACKENDS}/refused_derivatives.py",
        f"{_BACKENDS}/scored.py",
        "sparseflash/scores",
    ),
    f"{_BACKENDS}/reference.py": ("sparseflash/blockmask", "sparseflash/dropout.py", "sparseflash/scores"),
    f"{_BACKENDS}/cached.py": ("sparseflash/blockmask", f"{_BACKENDS}/reference.py"),
    f"{_BACKENDS}/blockwise.py": (
        f"{_BACKENDS}/blockwise_tiles.py",
        f"{_BACKENDS}/problem.py",
        f"{_BACKENDS}/registration.py",
        f"{_BACKENDS}/saved.py",
        f"{_BACKENDS}/scored.py",
        "sparseflash/scores",
    ),
    f"{_BACKENDS}/blockwise_tiles.py": (
        "sparseflash/blockmask",
        "sparseflash/dropout.py",
        f"{_BACKENDS}/problem.py",
        "sparseflash/scores",
    ),
    _TRITON: (
        _TRITON,
        "sparseflash/blockmask",
        "sparseflash/dropout.py",
        "sparseflash/performance.py",
        _LIMITS,
        "sparseflash/scores",
        f"{_BACKENDS}/direct.py",
        f"{_BACKENDS}/problem.py",
        f"{_BACKENDS}/registration.py",
        f"{_BACKENDS}/saved.py",
        f"{_BACKENDS}/scored.py",
    ),
    f"{_TRITON}/versions.py": (),
    # Run on its own, not imported: it tries the kernels as a user of the library would.
    f"{_TRITON}/kernel_check.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/scores",
        "sparseflash/testing",
        f"{_TRITON}/gate.py",
        f"{_TRITON}/hopper/configs.py",
    ),
    f"{_TRITON}/direct_start.py": ("sparseflash/cuda_driver.py",),
    f"{_TRITON}/availability.py": (f"{_TRITON}/device.py",),
    f"{_TRITON}/cuda_graphs.py": ("sparseflash/blockmask/streams.py",),
    f"{_TRITON}/shared_memory.py": (),
    f"{_TRITON}/launcher.py": (
        _LIMITS,
        f"{_TRITON}/cuda_graphs.py",
        f"{_TRITON}/direct_start.py",
        f"{_TRITON}/shared_memory.py",
        f"{_TRITON}/versions.py",
    ),
    f"{_TRITON}/configs.py": (f"{_TRITON}/versions.py",),
    f"{_TRITON}/schedule": (
        "sparseflash/blockmask",
        _LIMITS,
        f"{_BACKENDS}/problem.py",
        f"{_TRITON}/alignment.py",
        f"{_TRITON}/cuda_graphs.py",
        f"{_TRITON}/device.py",
        f"{_TRITON}/launcher.py",
        f"{_TRITON}/overrides.py",
    ),
    # Device functions use the portable kernels' functions for tokens and for the softmax.
    f"{_TRITON}/changes": (
        "sparseflash/blockmask/cache.py",
        _LIMITS,
        "sparseflash/scores",
        f"{_TRITON}/alignment.py",
        f"{_TRITON}/availability.py",
        f"{_TRITON}/portable",
        f"{_TRITON}/schedule",
    ),
    f"{_TRITON}/portable": (
        "sparseflash/blockmask/cache.py",
        "sparseflash/dropout.py",
        _LIMITS,
        "sparseflash/scores",
        f"{_BACKENDS}/registration.py",
        f"{_BACKENDS}/saved.py",
        f"{_TRITON}/alignment.py",
        f"{_TRITON}/availability.py",
        f"{_TRITON}/changes",
        f"{_TRITON}/configs.py",
        f"{_TRITON}/cuda_graphs.py",
        f"{_TRITON}/family.py",
        f"{_TRITON}/launcher.py",
        f"{_TRITON}/overrides.py",
        f"{_TRITON}/schedule",
    ),
    f"{_TRITON}/hopper": (
        "sparseflash/blockmask/bitmask.py",
        "sparseflash/blockmask/cache.py",
        "sparseflash/blockmask/streams.py",
        "sparseflash/blockmask/transfer.py",
        "sparseflash/dropout.py",
        _LIMITS,
        "sparseflash/scores/change.py",
        f"{_BACKENDS}/registration.py",
        f"{_BACKENDS}/saved.py",
        f"{_TRITON}/alignment.py",
        f"{_TRITON}/changes",
        f"{_TRITON}/family.py",
        f"{_TRITON}/launcher.py",
        f"{_TRITON}/portable",  # merges chunks, and shares launches and score modifications
        f"{_TRITON}/schedule",
    ),
    f"{_TRITON}/decode": (
        "sparseflash/blockmask/cache.py",
        _LIMITS,
        f"{_BACKENDS}/cached.py",
        f"{_TRITON}/availability.py",
        f"{_TRITON}/device.py",
        f"{_TRITON}/launcher.py",
        f"{_TRITON}/portable/softmax.py",
    ),
    "sparseflash/distributed": (
        "sparseflash/attention.py",
        f"{_TRITON}/device.py",
        f"{_TRITON}/launcher.py",
        "sparseflash/blockmask",
        "sparseflash/dropout.py",
        "sparseflash/scores",
        "sparseflash/validation.py",
    ),
    "sparseflash/interop": ("sparseflash/blockmask", "sparseflash/scores"),
    # Whole functions of other libraries, imported on first access.
    "sparseflash/interop/fastvideo.py": ("sparseflash/attention.py", "sparseflash/blockmask", "sparseflash/scores"),
    "sparseflash/interop/flash_attn.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/interop/alibi.py",
        "sparseflash/interop/tokens_first.py",
        "sparseflash/pattern.py",
        "sparseflash/scores",
        "sparseflash/varlen.py",
        "masks/causal.py",
        "masks/local.py",
    ),
    "sparseflash/interop/flash_attn_cache.py": (
        "sparseflash/blockmask",
        "sparseflash/decode.py",
        "sparseflash/interop/tokens_first.py",
    ),
    "sparseflash/interop/flex_attention.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/interop",
        "sparseflash/scores",
    ),
    "sparseflash/interop/natten.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/interop/tokens_first.py",
        "masks/neighborhood.py",
        "masks/order.py",
        "masks/tiling/grid.py",
    ),
    "sparseflash/interop/xformers.py": (
        "sparseflash/attention.py",
        "sparseflash/blockmask",
        "sparseflash/interop/tokens_first.py",
        "sparseflash/scaled_dot_product.py",
        "masks/local.py",
    ),
    "sparseflash/analysis": ("sparseflash/blockmask",),
    "sparseflash/draw": ("sparseflash/blockmask",),
    "sparseflash/testing": (
        "sparseflash/blockmask",
        "sparseflash/scores",
        "sparseflash/validation.py",
        f"{_BACKENDS}/reference.py",
    ),
    "sparseflash/cli": (
        "sparseflash/__init__.py",
        "sparseflash/analysis",
        "sparseflash/attention.py",
        "sparseflash/draw",
        "sparseflash/explain.py",
        "sparseflash/interop",
        "sparseflash/testing",
        "masks",
    ),
    "masks": ("masks/tiling", "masks/fused", "sparseflash/blockmask", _LIMITS),
    "masks/tiling": ("sparseflash/blockmask", _LIMITS),
    "masks/fused": (
        "masks/tiling",
        "sparseflash/blockmask",
        f"{_TRITON}/device.py",
        f"{_TRITON}/launcher.py",
    ),
    "experiments": (),
    "experiments/measurements.py": ("experiments/training/environment.py", "sparseflash/__init__.py"),
    "experiments/training": PUBLIC,
    "experiments/training/layers": PUBLIC,
    "experiments/pathfinder": ("experiments/pathfinder/cnn", "experiments/training"),
    "experiments/pathfinder/cnn": ("experiments/pathfinder", "experiments/training"),
    "experiments/lra": ("experiments/lra", "experiments/training", *PUBLIC),
    "experiments/lra/data": ("experiments/lra/tasks/task.py", "experiments/training"),
    "experiments/lra/data/listops": ("experiments/training",),
    "experiments/lra/tasks": (
        "experiments/lra/data",
        "experiments/lra/model/positions.py",
        "experiments/pathfinder",
        "experiments/training",
    ),
    "experiments/lra/model": ("experiments/lra", "experiments/training", _PATTERN_TEXT, *PUBLIC),
    "experiments/lra/table": (
        "experiments/lra",
        "experiments/measurements.py",
        "experiments/training",
        f"{_BENCHMARKS}/timing.py",
    ),
    "experiments/pathx": ("experiments/pathx", "experiments/training", "experiments/pathfinder", *PUBLIC),
    "experiments/pathx/data": (
        "experiments/pathx/config.py",
        "experiments/pathx/masks",
        "experiments/pathx/model/gather.py",
        "experiments/training",
        "experiments/pathfinder",
        *PUBLIC,
    ),
    "experiments/pathx/masks": (
        "sparseflash/blockmask/bitmask.py",
        "sparseflash/cli/expression.py",
        _PATTERN_TEXT,
        *PUBLIC,
    ),
    "experiments/pathx/model": (
        "experiments/pathfinder/cnn/network.py",
        "experiments/pathx/data",
        "experiments/pathx/masks",
        "experiments/training/layers",
        "sparseflash/nn",
    ),
    "experiments/selection": ("experiments/training", _PATTERN_TEXT, *PUBLIC),
    "experiments/lm": ("experiments/lm", "experiments/training", _PATTERN_TEXT, *PUBLIC),
    "experiments/lm/data": ("experiments/training",),
    "experiments/lm/model": ("experiments/lm", "experiments/training", *PUBLIC),
    _BENCHMARKS: (),
    f"{_BENCHMARKS}/__main__.py": (_HARNESS, "experiments/measurements.py"),
    _HARNESS: (
        _HARNESS,
        _INTERPRETER,
        f"{_BENCHMARKS}/timing.py",
        "experiments/measurements.py",
        "experiments/training",
    ),
    f"{_BENCHMARKS}/timing.py": ("experiments/training/clock.py",),
    f"{_BENCHMARKS}/calls": (
        _HARNESS,
        f"{_BENCHMARKS}/timing.py",
        f"{_BENCHMARKS}/fresh_process.py",
        f"{_TRITON}/launcher.py",
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/speed": (
        f"{_BENCHMARKS}/speed",
        _HARNESS,
        f"{_BENCHMARKS}/fresh_process.py",
        f"{_BENCHMARKS}/timing.py",
        "experiments/measurements.py",
        "sparseflash/blockmask/arguments.py",
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/speed/peers": (_HARNESS, f"{_BENCHMARKS}/speed", *PUBLIC),
    f"{_BENCHMARKS}/io": (_HARNESS, "experiments/training", *PUBLIC),
    _INTERPRETER: (),
    f"{_BENCHMARKS}/compile": (
        _HARNESS,
        _INTERPRETER,
        "experiments/training/atomic_files.py",
        "sparseflash/blockmask/arguments.py",
        "sparseflash/dropout.py",
        _BACKENDS,
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/tune": (
        _HARNESS,
        "experiments/measurements.py",
        _INTERPRETER,
        f"{_BENCHMARKS}/compile",
        f"{_BENCHMARKS}/speed",
        f"{_BENCHMARKS}/timing.py",
        "experiments/training",
        _BACKENDS,
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/blocks": (
        _HARNESS,
        _INTERPRETER,
        "experiments/measurements.py",
        f"{_BENCHMARKS}/speed",
        f"{_BENCHMARKS}/tune",
        "experiments/training",
        _BACKENDS,
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/distributed": (f"{_BENCHMARKS}/distributed", _HARNESS, "experiments/training", *PUBLIC),
    f"{_BENCHMARKS}/exactness": (
        _HARNESS,
        "experiments/measurements.py",
        _INTERPRETER,
        f"{_BENCHMARKS}/timing.py",
        "experiments/training",
        f"{_BACKENDS}/reference.py",
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/selection.py": (_HARNESS, f"{_BENCHMARKS}/speed", f"{_BENCHMARKS}/timing.py", *PUBLIC),
    f"{_BENCHMARKS}/decode.py": (_HARNESS, f"{_BENCHMARKS}/speed", *PUBLIC),
    f"{_BENCHMARKS}/huggingface": (
        _HARNESS,
        "experiments/measurements.py",
        f"{_BENCHMARKS}/timing.py",
        "experiments/training",
        "sparseflash/huggingface",
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/layer.py": (_HARNESS, f"{_BENCHMARKS}/speed"),
    f"{_BENCHMARKS}/scores": (
        _FLEX,
        _HARNESS,
        _INTERPRETER,
        f"{_BENCHMARKS}/timing.py",
        f"{_BENCHMARKS}/fresh_process.py",
        "experiments/measurements.py",
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/patterns": (
        _HARNESS,
        f"{_BENCHMARKS}/patterns/entries",
        "experiments/training",
        "sparseflash/blockmask/arguments.py",
        *PUBLIC,
    ),
    f"{_BENCHMARKS}/patterns/entries": PUBLIC,
}

# The one deliberate circle: `BlockMask` has the operations on masks as methods, and these import it.
FACADE = "sparseflash.blockmask.mask"

# Modules that need Triton when they are imported; other modules import them inside functions.
KERNELS = (
    _TRITON,
    "masks/fused/index.py",
    "masks/fused/rows.py",
    "masks/fused/runs.py",
    "masks/fused/unused.py",
    "sparseflash/distributed/fused_merge.py",
)


class Imports(ast.NodeVisitor):
    """The imports of a source: `(package, name)` of `from package import name`, `(module, "")` of `import module`.

    `at_import` run when the source is imported, `in_functions` when a function is called, and `for_types`, under
    `if TYPE_CHECKING`, never.
    """

    def __init__(self, source, module, is_package=False):
        self.at_import, self.in_functions, self.for_types = set(), set(), set()
        self.package = module if is_package else module.rpartition(".")[0]
        self.found = self.at_import
        self.visit(ast.parse(source))

    def visit_Import(self, node):
        self.found.update((alias.name, "") for alias in node.names)

    def visit_ImportFrom(self, node):
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        self.found.update((base, alias.name) for alias in node.names)

    def visit_FunctionDef(self, node):
        self.visit_all(ast.iter_child_nodes(node), self.in_functions)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node):
        for_types = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        self.visit_all(node.body, self.for_types if for_types else self.found)
        self.visit_all(node.orelse, self.found)

    def visit_all(self, nodes, found):
        outside = self.found
        self.found = outside if outside is self.for_types else found
        for node in nodes:
            self.visit(node)
        self.found = outside

    def visit(self, node):
        if not isinstance(node, ast.expr):  # expressions are most of a source and contain no import
            super().visit(node)

    @property
    def everywhere(self):
        return self.at_import | self.in_functions | self.for_types


def read(folder, package):
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join([package, *(parts[:-1] if is_package else parts)])
        modules[module] = Imports(file.read_text(encoding="utf-8"), module, is_package)
    return modules


def read_all():
    library = read(ROOT / "sparseflash", "sparseflash")
    # sparseflash/masks is a symlink to masks; whether a search follows it depends on the version of Python.
    library = {name: imports for name, imports in library.items() if not below(name, "sparseflash.masks")}
    return library | read(ROOT / "masks", "sparseflash.masks") | read(ROOT / "experiments", "experiments")


def below(name, *parents, separator="."):
    """Whether a dotted name, or a path, is one of `parents` or lies below one."""
    return any(name == parent or name.startswith(parent + separator) for parent in parents)


def modules_of(names):
    """The repository's modules among the imports of a source. `from package import name` is the module `name` if it
    exists, and otherwise the package."""
    found = {f"{base}.{name}" if f"{base}.{name}" in MODULES else base for base, name in names}
    return found & MODULES.keys()


@cache
def path_of(module):
    """`masks/local.py` of `sparseflash.masks.local`."""
    path = module.replace(".", "/")
    path = path.removeprefix("sparseflash/") if below(module, "sparseflash.masks") else path
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


@cache
def row_of(path):
    """The row of the table for a path: the longest one that it lies below."""
    return max((row for row in MAY_IMPORT if below(path, row, separator="/")), key=len)


def allowed(path, imported):
    row = row_of(path)
    return row_of(imported) == row or below(imported, *MAY_IMPORT[row], separator="/")


MODULES = read_all()
