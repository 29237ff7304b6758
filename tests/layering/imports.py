import ast
from functools import cache
from pathlib import Path

from tests.layering.rules import GROUPS, MAY_IMPORT

ROOT = Path(__file__).resolve().parents[2]


class Imports(ast.NodeVisitor):
    """The imports of a source: `(package, name)` of `from package import name`, `(module, "")` of `import module`."""

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
        if not isinstance(node, ast.expr):
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
    library = {name: imports for name, imports in library.items() if not below(name, "sparseflash.masks")}
    return library | read(ROOT / "masks", "sparseflash.masks") | read(ROOT / "experiments", "experiments")


def below(name, *parents, separator="."):
    return any(name == parent or name.startswith(parent + separator) for parent in parents)


def modules_of(names):
    found = {f"{base}.{name}" if f"{base}.{name}" in MODULES else base for base, name in names}
    return found & MODULES.keys()


@cache
def path_of(module):
    path = module.replace(".", "/")
    path = path.removeprefix("sparseflash/") if below(module, "sparseflash.masks") else path
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


@cache
def row_of(path):
    group, folder = next((name for name, files in GROUPS.items() if path in files), None), path.rpartition("/")[0]
    return next((row for row in (path, group) if row in MAY_IMPORT), folder)  # a new folder may have no row yet


def is_leaf(module):
    """Whether a module imports no other one; a folder is none."""
    return not path_of(module).endswith("/__init__.py") and not modules_of(MODULES[module].everywhere) - {module}


def allowed(module, imported):
    row, other = row_of(path_of(module)), row_of(path_of(imported))
    if other == row or other in MAY_IMPORT.get(row, ()):
        return True
    return is_leaf(imported) and below(module, imported.rpartition(".")[0])


MODULES = read_all()
