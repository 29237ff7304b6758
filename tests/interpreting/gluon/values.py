import threading
from types import SimpleNamespace

import torch


class Block:
    def __init__(self, value):
        self.value = value
        self.type = SimpleNamespace(layout=None)
        self.dtype, self.shape = value.dtype, list(value.shape)

    def to(self, dtype):
        return Block(self.value.to(dtype))

    def reshape(self, shape):
        return Block(self.value.reshape(shape))

    def permute(self, order):
        return Block(self.value.permute(order))

    def expand_dims(self, axis):
        return Block(self.value.unsqueeze(axis))

    def broadcast_to(self, *shape):
        return Block(self.value.broadcast_to(shape))

    def __getitem__(self, places):
        return Block(self.value[places])


def _operator(name):
    def operate(self, other):
        if isinstance(other, Pointer):
            return other + self
        return Block(getattr(self.value, name)(plain(other)))

    return operate


_OPERATORS = "add sub mul truediv floordiv mod and or rshift lshift radd rsub rmul rtruediv rand ror lt le gt ge eq ne"
for _name in _OPERATORS.split():
    setattr(Block, f"__{_name}__", _operator(f"__{_name}__"))
Block.__rlshift__ = lambda self, other: Block(torch.as_tensor(other) << self.value)  # which PyTorch's tensors lack
Block.__hash__ = None  # as `==` is elementwise


def plain(x):
    return x.value if isinstance(x, Block) else x


def as_tensor(x, like):
    if isinstance(x, Block):
        return x.value
    alone = {int: torch.int32, float: torch.float32}
    return torch.tensor(x, dtype=like.dtype if isinstance(like, Block) else alone[type(x)])


class Pointer:
    """The elements of a tensor in the order of memory, and the index, or indices, pointed to."""

    def __init__(self, tensor, at=0):
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.flat, self.at = tensor.as_strided((span if tensor.numel() else 0,), (1,)), at

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.at + plain(more))

    def expand_dims(self, axis):
        return Pointer(self.flat, self.at.unsqueeze(axis))

    def reshape(self, shape):
        return Pointer(self.flat, self.at.reshape(shape))

    def checked(self, at):
        assert bool((at >= 0).all() and (at < len(self.flat)).all()), "out of bounds"
        return at


class Descriptor:
    """Boxes may reach past the tensor's end, not before its start."""

    def __init__(self, told):
        assert all(stride * told.base.element_size() % 16 == 0 for stride in told.strides[:-1])  # as TMA requires
        self.tensor, self.box = told.base.detach().as_strided(told.shape, told.strides), told.block_shape
        self.dtype, self.layout = told.base.dtype, told.layout
        self.block_type = SimpleNamespace(nbytes=torch.Size(self.box).numel() * told.base.element_size())

    def _overlap(self, coordinates):
        ends = [min(c + b, n) for c, b, n in zip(coordinates, self.box, self.tensor.shape, strict=True)]
        assert all(c >= 0 for c in coordinates)
        inside = tuple(slice(c, max(c, end)) for c, end in zip(coordinates, ends, strict=True))
        return inside, tuple(slice(0, max(0, end - c)) for c, end in zip(coordinates, ends, strict=True))

    def read(self, coordinates):
        inside, part = self._overlap(coordinates)
        box = torch.zeros(self.box, dtype=self.dtype)
        box[part] = self.tensor[inside]
        return box

    def write(self, coordinates, value):
        inside, part = self._overlap(coordinates)
        self.tensor[inside] = value.view(self.box)[part]

    def add(self, coordinates, value):
        inside, part = self._overlap(coordinates)
        self.tensor[inside] += value.view(self.box)[part]


class Shared:
    """`unfenced`: the threads with unfenced stores, which matrix instructions and copies must not overtake."""

    def __init__(self, value, unfenced):
        self.value, self.dtype, self.shape = value, value.dtype, value.shape
        self.unfenced = unfenced

    @classmethod
    def allocated(cls, dtype, shape, unfenced):
        """NaN, so that reading before writing shows."""
        return cls(torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype), unfenced)

    def assert_fenced(self):
        assert not self.unfenced, "stored to shared memory without a fence"

    def index(self, i):
        assert 0 <= i < len(self.value)
        return Shared(self.value[i], self.unfenced)

    def permute(self, order):
        return Shared(self.value.permute(order), self.unfenced)

    def slice(self, start, length, dim):
        return Shared(self.value.narrow(dim, start, length), self.unfenced)

    def reinterpreted(self, dtype, shape):
        return Shared(self.value.view(-1).view(dtype).view(shape), self.unfenced)

    def load(self, layout):
        return Block(self.value.clone())

    def store(self, block):
        assert block.value.dtype == self.value.dtype
        self.value.copy_(block.value)
        self.unfenced.append(threading.current_thread())


class Barrier:
    """Its phase turns when all expected arrivals and bytes have come."""

    def __init__(self):
        self.expected = self.pending = self.bytes = self.phase = 0

    def init(self, count):
        self.expected = self.pending = count

    def arrive(self, count):
        self.pending -= count
        assert self.pending >= 0, "more arrivals than the barrier expects"
        self._turn()

    def complete(self, count):
        self.bytes -= count
        self._turn()

    def _turn(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.expected, self.phase ^ 1


class Product:
    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc, self.result = a, b, acc, use_acc, None

    def retire(self):
        product = self.a.value.float() @ self.b.value.float()
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        self.result = Block(product + acc.value) if self.use_acc else Block(product)
