"""Triton's interpreter replaces the functions of its language once in a launch, not at every call of a device function.

Otherwise each call searches the whole language, a third of a kernel's time in this package.
"""

import inspect

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch(monkeypatch):
    call, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    builtins = {}
    patched = set()
    seen_by = {}

    def launch(self, *args, **kwargs):
        patched.clear()
        return call(self, *args, **kwargs)

    def patch_the_rest(fn):
        if fn not in seen_by:
            seen_by[fn] = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
        seen = seen_by[fn]
        if seen and seen <= patched:
            return None  # a launch, which needs what is returned, begins with nothing patched
        patched.update(seen)
        return patch(fn)

    def patch_known(package, builder, scope):
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(name, member) for name, member in members if tl.core.is_builtin(member)]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_known)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_the_rest)
