"""Bounds of loops in Triton's interpreter, whose scalars are arrays of one number.

Triton 3.6 converts the array by `int`, which NumPy 2.5 and later refuse unless the array has no dimension. Newer
versions of Triton squeeze it first, as does this.
"""

from triton.runtime import interpreter


def index_by_scalars(monkeypatch):
    """Lets a kernel count up to a computed number, with any version of NumPy."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
