"""Triton 3.6 converts an array of one number by `int`, which NumPy 2.5 refuses."""

from triton.runtime import interpreter


def index_by_scalars(monkeypatch):
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
