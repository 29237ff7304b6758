"""An extension of griffe for mkdocstrings: shows `crop = moves.crop` in a class as a method."""

from copy import copy
from typing import Any

from griffe import Attribute, Class, Expr, ExprCall, Extension, Function, Module, Parameters


class Methods(Extension):
    """Replaces such attributes of every class of a package by the functions."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for module in every_module(pkg):
            for cls in module.classes.values():
                if not cls.is_alias:
                    bind(cls, pkg)


def every_module(module: Module) -> list[Module]:
    """A package and all modules below it."""
    below = [each for each in module.modules.values() if not each.is_alias]
    return [module, *(found for each in below for found in every_module(each))]


def bind(cls: Class, pkg: Module) -> None:
    """Replaces the attributes of one class that are functions of the package."""
    for name, member in [*cls.members.items()]:
        bound = member.value if isinstance(member, Attribute) else None
        of_class = isinstance(bound, ExprCall) and str(bound.function) == "classmethod"
        path = (bound.arguments[0] if of_class else bound).canonical_path if isinstance(bound, Expr) else ""
        if not path.startswith(f"{pkg.path}."):
            continue
        try:
            found = pkg[path.removeprefix(f"{pkg.path}.")]
        except KeyError:
            continue
        if isinstance(found, Function):
            method = Function(
                name, lineno=found.lineno, endlineno=found.endlineno, returns=found.returns,
                docstring=copy(found.docstring),  # a copy, because another extension rewrites each object's docstring
                parameters=Parameters(*[*found.parameters][1:]),  # without the mask, or the class
            )  # fmt: skip
            method.labels = {"classmethod"} if of_class else set()
            cls.set_member(name, method)
