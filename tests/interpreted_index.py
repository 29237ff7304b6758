"""Bounds of loops in Triton's interpreter, whose scalars are arrays of one number.

Triton 3.6 makes a Python integer of such an array by `int`, which NumPy refuses from 2.5 on unless the array has no
dimension. Newer versions of Triton squeeze it first, and so does this.
"""

from triton.runtime import interpreter


def index_by_scalars(monkeypatch):
    """From now on a kernel may count up to a number that it has computed, whatever the version of NumPy."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
