import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor made; arrays of the given masks and their views do not count."""

    def __init__(self, *given_masks):
        super().__init__()
        self._known = {a.data_ptr() for mask in given_masks for a in mask._arrays() if a is not None}
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.element_size())
        return made
