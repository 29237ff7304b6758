import ast
import re

import pytest

from tests.layering.imports import MODULES, ROOT, path_of

ARCHITECTURE = "sparseflash.backends.triton.architecture"
LIBRARY = [module for module in MODULES if path_of(module).startswith(("sparseflash", "masks", "experiments"))]


def compared_capabilities(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {each.id for side in sides for each in ast.walk(side) if isinstance(each, ast.Name)}
            names |= {each.attr for side in sides for each in ast.walk(side) if isinstance(each, ast.Attribute)}
            is_constant = any(
                isinstance(each, ast.Constant) and type(each.value) is int
                for side in sides
                for each in ([side] if isinstance(side, ast.Constant) else getattr(side, "elts", []))
            )
            if is_constant and any(re.fullmatch(r"(\w*_)?(capability|arch|sm|major)", name) for name in names):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("capability == (9, 0)", 1), ("request.capability >= (8, 0)", 1), ("request.capability[0] in (9, 10)", 1),
        ("torch.cuda.get_device_capability()[0] == 9", 1), ("arch < 90", 1),
        ("torch.cuda.get_device_capability(device) != request.capability", 0), ("capability is None", 0),
    ],
)  # fmt: skip
def test_comparisons_of_capabilities_are_found(source, found):
    assert len(compared_capabilities(source)) == found


def test_no_other_module_compares_a_capability():
    found = {}
    for module in LIBRARY:
        path = ROOT / path_of(module)
        path = path if path.suffix else path / "__init__.py"
        if compared := compared_capabilities(path.read_text()):
            found[module] = compared
    assert list(found) == [ARCHITECTURE], found
