"""The modules of the library and what each of them imports."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


CORE = ("sparseflash.blockmask", "sparseflash.blockmask.bitmask", "sparseflash.blockmask.ops")


# Where Triton is needed; who imports these does so in a function.
KERNELS = ("sparseflash.backends.triton", "sparseflash.masks.fused.rows", "sparseflash.masks.fused.runs")


COMMANDS = ("sparseflash.cli", "sparseflash.__main__")


BACKENDS = ("sparseflash.backends.reference", "sparseflash.backends.blockwise", "sparseflash.backends.triton")


def belongs(module, package):
    return module == package or module.startswith(package + ".")


def belongs_to_any(module, packages):
    return any(belongs(module, package) for package in packages)


class Imports(ast.NodeVisitor):
    """All modules that a source names in its imports; apart, those imported as soon as the source is."""

    def __init__(self, source, module, is_package=False):
        self.everywhere, self.at_import = set(), set()
        self.package = module if is_package else module.rpartition(".")[0]
        self.in_function = False
        self.visit(ast.parse(source))

    def add(self, *names):
        self.everywhere.update(names)
        if not self.in_function:
            self.at_import.update(names)

    def visit_Import(self, node):
        self.add(*(alias.name for alias in node.names))

    def visit_ImportFrom(self, node):
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        # `from package import name`: the name may be a module. Where it is none, the name harms nothing.
        self.add(base, *(f"{base}.{alias.name}" for alias in node.names))

    def visit_FunctionDef(self, node):
        outside, self.in_function = self.in_function, True
        self.generic_visit(node)
        self.in_function = outside

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node):
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":  # never true at run time
            self.visit_FunctionDef(node)
        else:
            self.generic_visit(node)


def modules_below(folder, package):
    """`{module name: Imports}` of a package and its parts."""
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join([package, *(parts[:-1] if is_package else parts)])
        modules[module] = Imports(file.read_text(encoding="utf-8"), module, is_package)
    return modules


def library():
    """`{module name: Imports}` of sparseflash and masks."""
    masks = modules_below(ROOT / "masks", "sparseflash.masks")
    own = modules_below(ROOT / "sparseflash", "sparseflash")
    # sparseflash/masks is a symlink to masks, which is read above.
    return {name: imports for name, imports in own.items() if not belongs(name, "sparseflash.masks")} | masks


LIBRARY = library()


def reached_from(module):
    """Modules of the library that `module` imports, itself or through others, inside functions too.

    Only what is named counts: that Python runs `sparseflash/__init__.py` first couples nothing.
    """
    found, waiting = set(), [module]
    while waiting:
        for name in LIBRARY[waiting.pop()].everywhere & LIBRARY.keys():
            if name not in found and name != "sparseflash":
                found.add(name)
                waiting.append(name)
    return found - {module}


def loaded_by(module):
    """Modules of the library that importing `module` imports, with itself."""
    found, waiting = {module}, [module]
    while waiting:
        new = (LIBRARY[waiting.pop()].at_import & LIBRARY.keys()) - found - {"sparseflash"}
        found |= new
        waiting += new
    return found
