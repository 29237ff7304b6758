"""Kernels run from their source; imports from Triton are replaced."""

import ast
import copy
import importlib
import inspect
import itertools
import random
from functools import lru_cache

import torch
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction

from sparseflash.backends.triton.changes.kind import Changes
from tests.interpreting.gluon.language import names_of_gluon
from tests.interpreting.gluon.schedule import World
from tests.interpreting.gluon.values import Descriptor, Pointer

_numbers = itertools.count()


class Interpreted:
    """A kernel of a module, which replaces it where the launcher finds it.

    `seed`: of the interleaving. `edits`: functions that put a fault into the source of a module, by its path: the
    kernel's own module, one that it imports, or one of score modifications.
    """

    def __init__(self, module, name, seed=0, edits=None):
        self.module, self.name, self.seed, self.edits = module, name, seed, edits or {}
        self.__name__ = f"{name} interpreted as number {next(_numbers)}"  # launches are shared by this name
        self.arg_names = list(inspect.signature(getattr(module, name).fn).parameters)

    def warmup(self, *arguments, **options):
        pass

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            world = World(random.Random(self.seed), threads=32 * options["num_warps"])
            kernel = _functions_of(self.module, world, self.edits)[self.name]
            given = zip(self.arg_names, arguments, strict=True)
            named = {name: _as_argument(x, world, self.edits) for name, x in given}
            for program in range(grid[0]):
                world.add(lambda: kernel(**named), program, grid[0])
            world.run()

        return launch


def _as_argument(x, world, edits):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        return tuple(_as_argument(each, world, edits) for each in x)
    if isinstance(x, Changes):
        x = copy.copy(x)
        x.kinds = tuple(_interpreted_functions(each, world, edits) for each in x.kinds)
        return x
    return Descriptor(x) if hasattr(x, "block_shape") else x


def _interpreted_functions(kind, world, edits):
    kind = copy.copy(kind)
    for name, function in vars(kind).items():
        if isinstance(function, GluonJITFunction):
            module = importlib.import_module(function.__module__)
            found = _functions_of(module, world, edits)
            setattr(kind, name, found[function.__name__])
    return kind


def _functions_of(module, world, edits):
    edit = edits.get(module.__file__, lambda source: source)
    imports, code = _compiled(edit(inspect.getsource(module)), module.__file__)
    names = {**_names_of_ours(imports, world, edits), **names_of_gluon(world)}
    exec(code, names)
    return names


@lru_cache(64)
def _compiled(source, path):
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    tree.body = [node for node in tree.body if node not in imports and not _is_of_host(node)]
    return imports, compile(tree, path, "exec")


def _is_of_host(node):
    if isinstance(node, ast.FunctionDef):
        return not any("gluon." in ast.unparse(each) for each in node.decorator_list)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(each, ast.Attribute) and each.attr == "constexpr" for each in ast.walk(node))
    return isinstance(node, (ast.ClassDef, ast.If))


def _names_of_ours(imports, world, edits):
    found = {}
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("sparseflash."):
            module = importlib.import_module(node.module)
            given = {each.asname or each.name: getattr(module, each.name) for each in node.names}
            if any(isinstance(x, GluonJITFunction) for x in given.values()):
                replaced = _functions_of(module, world, edits)
                given |= {each.asname or each.name: replaced[each.name] for each in node.names if each.name in replaced}
            found |= given
    return {name: x.value if isinstance(x, tl.constexpr) else x for name, x in found.items()}
