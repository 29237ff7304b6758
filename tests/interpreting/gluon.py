"""Runs the Gluon kernels of a module on the CPU, from their own source, in PyTorch: Gluon itself has no interpreter.

Every partition of every program is an actor. One actor runs at a time. At each operation that others can observe, the
next actor is drawn, so a seed determines an interleaving, and a deadlock is found at once. Asynchronous operations of
the hardware take effect as late as they may, and destroy what they may overwrite at once:

- a matrix instruction reads shared memory when it is waited for;
- a copy to global memory reads shared memory when it is waited for, and is visible to others when that, too, is waited
  for, or when the partition ends;
- a copy to shared memory fills it with NaN when it is issued, and with the numbers at some later time.

So a barrier that is missing, or has a wrong phase, shows as NaN or as a deadlock. Layouts are not checked.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import random
import re
import sys
import threading
from functools import lru_cache
from types import SimpleNamespace

import torch
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction

_numbers = itertools.count()


class Deadlock(AssertionError):
    """No actor can go on."""


class Interpreted:
    """A kernel of a module, launched like Triton's; it replaces the kernel where the launcher finds it.

    `seed`: of the interleaving. `change`: edits the module's source, to check that a fault is noticed.
    """

    def __init__(self, module, name, seed=0, change=lambda source: source):
        self.source, self.path = change(inspect.getsource(module)), module.__file__
        self.name, self.seed = name, seed
        self.__name__ = f"{name} interpreted as number {next(_numbers)}"  # launches are shared by this name
        self.arg_names = list(inspect.signature(getattr(module, name).fn).parameters)

    def warmup(self, *arguments, **options):
        """Compiles nothing, as Triton's own interpreter does."""

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            world = _World(random.Random(self.seed), 32 * options["num_warps"])
            kernel = _functions(self.source, self.path, world)[self.name]
            named = {name: _as_argument(x) for name, x in zip(self.arg_names, arguments, strict=True)}
            for program in range(grid[0]):
                world.add(lambda: kernel(**named), program, grid[0])
            world.run()

        return launch


def _as_argument(x):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return Descriptor(x) if hasattr(x, "block_shape") else x


class Pointer:
    """The tensor that a pointer points into, and the indices there."""

    def __init__(self, tensor, at=0):
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.flat, self.at = tensor.as_strided((span if tensor.numel() else 0,), (1,)), at

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.at + (more.value if isinstance(more, Block) else more))

    def expand_dims(self, axis):
        return Pointer(self.flat, self.at.unsqueeze(axis))

    def reshape(self, shape):
        return Pointer(self.flat, self.at.reshape(shape))

    def checked(self, at):
        assert bool((at >= 0).all() and (at < len(self.flat)).all()), "out of bounds"
        return at


class Descriptor:
    """A tensor descriptor, made from the launcher's."""

    def __init__(self, told):
        assert all(stride * told.base.element_size() % 16 == 0 for stride in told.strides[:-1])
        self.tensor, self.box = told.base.detach().as_strided(told.shape, told.strides), told.block_shape
        self.dtype, self.layout = told.base.dtype, told.layout
        self.block_type = SimpleNamespace(nbytes=torch.Size(self.box).numel() * told.base.element_size())

    def _overlap(self, coordinates):
        """The part of the tensor that a box covers, and the same part of the box."""
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


class Block:
    """A tensor in registers."""

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


def _plain(x):
    return x.value if isinstance(x, Block) else x


def _as_tensor(x, like):
    """A number in the dtype of the operand beside it, or in the one that Triton gives it."""
    if isinstance(x, Block):
        return x.value
    return torch.tensor(
        x, dtype=like.dtype if isinstance(like, Block) else {int: torch.int32, float: torch.float32}[type(x)]
    )


def _binary(name):
    def forward(self, other):
        if isinstance(other, Pointer):
            return other + self
        return Block(getattr(self.value, name)(_plain(other)))

    return forward


_OPERATORS = "add sub mul truediv floordiv mod and or rshift lshift radd rsub rmul rtruediv rand ror lt le gt ge eq ne"
for _name in _OPERATORS.split():
    setattr(Block, f"__{_name}__", _binary(f"__{_name}__"))
Block.__rlshift__ = lambda self, other: Block(torch.as_tensor(other) << self.value)
Block.__hash__ = None


class _Shared:
    """Shared memory, or a view of it."""

    def __init__(self, value, unfenced):
        self.value, self.dtype, self.shape = value, value.dtype, value.shape
        self.unfenced = unfenced  # the threads that have stored to the allocation, and have not fenced it since

    def index(self, i):
        assert 0 <= i < len(self.value)
        return _Shared(self.value[i], self.unfenced)

    def permute(self, order):
        return _Shared(self.value.permute(order), self.unfenced)

    def slice(self, start, length, dim):
        return _Shared(self.value.narrow(dim, start, length), self.unfenced)

    def load(self, layout):
        return Block(self.value.clone())

    def store(self, block):
        assert block.value.dtype == self.value.dtype
        self.value.copy_(block.value)
        self.unfenced.append(threading.current_thread())


class _Barrier:
    """An mbarrier, as in the PTX manual."""

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


class _Product:
    """A matrix instruction that may not have read its operands yet."""

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc, self.result = a, b, acc, use_acc, None

    def retire(self):
        product = self.a.value.float() @ self.b.value.float()
        acc = self.acc.result if isinstance(self.acc, _Product) else self.acc
        self.result = Block(product + acc.value) if self.use_acc else Block(product)


class _Actor:
    def __init__(self, world, run, program, programs):
        self.program, self.programs, self.ready, self.done = program, programs, lambda: True, False
        self.products, self.stores, self.unseen, self.speed = [], [], [], world.speed()
        self.turn, self.world = _passed(), world
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self.thread.actor = self
        self.thread.start()

    def _main(self, run):
        self.turn.acquire()
        try:
            if not self.world.stopped:
                run()
            assert not self.products and not self.stores, "a partition ends before what it has begun"
            for write in self.unseen:
                write()
            self.done = True
            self.world.go_on()
        except _Stopped:
            self.done = True
        except BaseException as error:
            self.done = True
            self.world.end(error)

    def whereabouts(self):
        """The lines of the kernel that the actor is at, and its numbers there."""
        frame, lines = sys._current_frames()[self.thread.ident], []
        while frame is not None:
            if not frame.f_code.co_filename.endswith(("gluon.py", "threading.py")):
                numbers = {name: x for name, x in frame.f_locals.items() if isinstance(x, int)}
                lines.append(f"  program {self.program}, {frame.f_code.co_name}, line {frame.f_lineno}: {numbers}")
            frame = frame.f_back
        return "\n".join(lines)


class _Stopped(BaseException):
    pass


def _passed():
    """A lock that another thread releases: a semaphore of one, which Python's own is in many steps."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _World:
    """The actors, and the copies under way."""

    def __init__(self, draw, threads):
        self.draw, self.actors, self.copies, self.ended, self.error, self.stopped = draw, [], [], _passed(), None, False
        self.threads = threads  # of a partition that multiplies
        self.fenced = []  # the `unfenced` of every allocation, whichever module makes or fences it

    def add(self, run, program, programs):
        actor = _Actor(self, run, program, programs)
        self.actors.append(actor)
        return actor

    def run(self):
        try:
            self.go_on()
            self.ended.acquire()
            if self.error is not None:
                raise self.error
            assert not self.copies, "a program ends before its copies"
        finally:
            self.stopped = True
            for actor in self.actors:
                if not actor.done:
                    actor.turn.release()

    def go_on(self, me=None):
        """Draws whose turn is next, and returns whether it is mine; so threads change where actors do."""
        while not all(actor.done for actor in self.actors):
            choices = [a for a in self.actors if not a.done and a.ready()] + self.copies
            if not choices:
                raise Deadlock("\n".join(["all wait for ever:", *(a.whereabouts() for a in self.actors if not a.done)]))
            (chosen,) = self.draw.choices(choices, [each.speed for each in choices])
            if isinstance(chosen, _Actor):
                if chosen is not me:
                    chosen.turn.release()
                return chosen is me
            self.copies.remove(chosen)
            chosen.arrive()
        self.end()
        return False

    def end(self, error=None):
        if not self.stopped:
            self.error = error
            self.ended.release()

    def speed(self):
        """Some run far ahead of others, and some copies take long: how often one is drawn."""
        return 10.0 ** self.draw.uniform(-1.5, 1.5)

    def pause(self, ready=lambda: True):
        """Lets others run, and goes on when `ready()`."""
        actor = self.me()
        actor.ready = ready
        if self.go_on(actor):
            return
        actor.turn.acquire()
        if self.stopped:
            raise _Stopped

    @staticmethod
    def me():
        return threading.current_thread().actor


def _ours(imports, world):
    """The names that the project's own modules provide: constants as numbers, Gluon functions interpreted."""
    found = {}
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("sparseflash."):
            module = importlib.import_module(node.module)
            given = {each.name: getattr(module, each.name) for each in node.names}
            if any(isinstance(x, GluonJITFunction) for x in given.values()):
                replaced = _functions(inspect.getsource(module), module.__file__, world)
                given = {name: replaced[name] for name in given}
            found |= given
    return {name: x.value if isinstance(x, tl.constexpr) else x for name, x in found.items()}


def _functions(source, path, world):
    """The functions of a module, with their imports from Triton replaced."""
    imports, code = _compiled(source, path)
    names = {**_ours(imports, world), **_replacements(world)}
    exec(code, names)
    return names


@lru_cache(32)
def _compiled(source, path):
    """The imports of a module, and the code of the rest."""
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    tree.body = [node for node in tree.body if node not in imports]
    return imports, compile(tree, path, "exec")


def _replacements(world):
    def jit(function=None, **options):
        return function if function is not None else lambda function: function

    def number(x):
        return x.item() if isinstance(x, torch.Tensor) and x.ndim == 0 else Block(x)

    def load(pointer, mask=None, other=None, volatile=False, cache_modifier=""):
        if volatile:
            read_again(pointer)
        if not isinstance(pointer.at, torch.Tensor):
            return pointer.flat[pointer.checked(torch.tensor(pointer.at))].item()
        if mask is None:
            return Block(pointer.flat[pointer.checked(pointer.at)])
        mask, at = torch.broadcast_tensors(_plain(mask), pointer.at)
        pointer.checked(at[mask])
        found = pointer.flat[torch.where(mask, at, 0)] if len(pointer.flat) else torch.zeros_like(at)
        return Block(torch.where(mask, found, other))

    def read_again(pointer):
        """Who reads the same number twice in a row waits for another: so a deadlock is seen."""
        actor, place = world.me(), (pointer.flat.data_ptr(), pointer.at)
        known = actor.__dict__.get("read")
        if known is not None and known[0] == place:
            world.pause(lambda: pointer.flat[pointer.at].item() != known[1])
        else:
            world.pause()
        actor.read = place, pointer.flat[pointer.at].item()

    def store(pointer, value, mask=None):
        at, value = torch.as_tensor(pointer.at), torch.as_tensor(_plain(value))
        at, value = torch.broadcast_tensors(at, value)
        keep = (
            torch.ones_like(at, dtype=torch.bool)
            if mask is None
            else torch.as_tensor(_plain(mask)).broadcast_to(at.shape)
        )
        pointer.flat[pointer.checked(at[keep])] = value[keep].to(pointer.flat.dtype)

    def atomic_add(pointer, value, sem, scope, mask=None):
        world.pause()
        if isinstance(value, Block):
            at, value, keep = torch.broadcast_tensors(
                pointer.at, value.value, _plain(mask or Block(torch.tensor(True)))
            )
            pointer.flat.index_add_(0, pointer.checked(at[keep]).long(), value[keep])
            return None
        old = pointer.flat[pointer.at].item()
        pointer.flat[pointer.at] += value
        return old

    def where(condition, a, b):
        if not any(isinstance(x, Block) for x in (condition, a, b)):
            return a if condition else b
        a, b = (_as_tensor(x, like=y) for x, y in ((a, b), (b, a)))
        return Block(torch.where(torch.as_tensor(_plain(condition)), a, b))

    def choose(name):
        def apply(a, b):
            if not isinstance(a, Block) and not isinstance(b, Block):
                return max(a, b) if name == "maximum" else min(a, b)
            return Block(getattr(torch, name)(_as_tensor(a, like=b), _as_tensor(b, like=a)))

        return apply

    fenced = world.fenced

    def allocate(dtype, shape, layout):
        if layout == "barrier":
            return SimpleNamespace(index=[_Barrier() for _ in range(shape[0])].__getitem__)
        empty = (
            torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
        )
        fenced.append([])
        return _Shared(empty, fenced[-1])

    def warp_specialize(partitions, warps, registers):
        me = world.me()
        started = [world.add(lambda f=f, a=a: f(*a), me.program, me.programs) for f, a in partitions]
        world.pause(lambda: all(actor.done for actor in started))

    def async_load(descriptor, coordinates, bar, target):
        target.value.fill_(torch.nan)

        def arrive():
            target.value.copy_(descriptor.read(coordinates).view(target.value.shape))
            bar.complete(descriptor.block_type.nbytes)

        world.copies.append(SimpleNamespace(arrive=arrive, speed=world.speed()))
        world.pause()

    def send(descriptor, coordinates, source, put):
        assert not source.unfenced, "stored to shared memory without a fence"
        actor = world.me()

        def read():
            value = source.value.clone()
            actor.unseen.append(lambda: put(coordinates, value))

        actor.stores.append(read)
        world.pause()

    def async_store(descriptor, coordinates, source):
        send(descriptor, coordinates, source, descriptor.write)

    def async_add(descriptor, coordinates, source):
        send(descriptor, coordinates, source, descriptor.add)

    def store_wait(pending):
        """Until the sources have been read; what is written is seen later, in whichever order."""
        stores = world.me().stores
        while len(stores) > pending:
            stores.pop(0)()

    def wait_until_seen():
        store_wait(0)
        unseen = world.me().unseen
        while unseen:
            unseen.pop(world.draw.randrange(len(unseen)))()

    def fence():
        for threads in fenced:
            threads[:] = [each for each in threads if each is not threading.current_thread()]

    def mma(a, b, acc, use_acc=True, is_async=False):
        for x in (a, b):
            assert isinstance(x, Block) or not x.unfenced, "stored to shared memory without a fence"
        product = _Product(a, b, acc, use_acc)
        world.me().products.append(product)
        if not is_async:
            return mma_wait(0, deps=(product,))
        world.pause()
        return product

    def mma_wait(outstanding=0, deps=()):
        products = world.me().products
        while len(products) > outstanding:
            products.pop(0).retire()
        world.pause()
        found = tuple(x.result if isinstance(x, _Product) and x.result is not None else x for x in deps)
        return found[0] if len(found) == 1 else found

    def local_mma_wait(products, pending):
        return mma_wait(pending, deps=(products,))

    def wait(bar, phase):
        world.pause(lambda: bar.phase != phase)

    def arrive(bar, count=1, pred=True):
        if pred:
            bar.arrive(count)
        world.pause()

    def expect(bar, size):
        bar.bytes += size
        arrive(bar)

    def cast(x, dtype, bitcast=False):
        """Numbers keep what they are: torch takes them as they come."""
        return (
            torch.tensor(x, dtype=torch.float32 if dtype == torch.int32 else torch.int32).view(dtype).item()
            if bitcast
            else x
        )

    def fma(a, b, c):
        """Rounded once: the product of two numbers of fp32 is exact in fp64."""
        a, b, c = (torch.as_tensor(_plain(x), dtype=torch.float64) for x in (a, b, c))
        return Block((a * b + c).to(torch.float32))

    def reduce(name):
        def apply(x, axis):
            found = getattr(torch, name)(x.value, axis)
            return number(found.values if name == "max" else found)

        return apply

    named = {}  # of each program: the barriers that are known by a number, and how often each was passed

    def named_barrier(operation, name, threads):
        arrived, passed = named.get((me := (world.me().program, name)), (0, 0))
        arrived += world.threads
        assert arrived <= threads, "more arrive at a barrier than it waits for"
        named[me] = (0, passed + 1) if arrived == threads else (arrived, passed)
        world.pause(lambda: operation == "arrive" or named[me][1] > passed)

    def elementwise_asm(asm, constraints, args, dtype, is_pure, pack):
        if found := re.match(r"bar\.(sync|arrive) (\d+), (\d+); mov.b32 \$0, \$1;$", asm):
            named_barrier(found[1], found[2], int(found[3]))
        elif "vote.sync.any" in asm:  # a warp skips only multiplications by 1
            return Block(args[0].value * args[1].value)
        elif asm.startswith("cp.async.bulk.wait_group 0;"):
            wait_until_seen()
            world.pause()
        else:
            fences = "fence.acq_rel.gpu; mov.b32 $0, $1;"  # the interpreter has one memory for all
            if asm == "shfl.sync.idx.b32 $0, $1, $2, 31, -1;":
                # Only for tensors with one number a thread, in order.
                x, lane = (each.value.reshape(-1, 32) for each in args)
                return Block(x.gather(1, lane.long()).reshape(args[0].value.shape))
            if asm == "tanh.approx.f32 $0, $1;":
                return Block(torch.tanh(args[0].value))
            assert asm in ("shfl.sync.bfly.b32 $0, $1, 0, 31, -1;", "mov.b32 $0, $1;", fences)  # each thread's own
        return args[0]

    def reinterpret(shared, dtype, shape, layout):
        return _Shared(shared.value.view(-1).view(dtype).view(shape), shared.unfenced)

    dtypes = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int32", "int64")}
    nothing = SimpleNamespace(get_default_for=lambda *a: None)
    gl = SimpleNamespace(
        constexpr=lambda x: x, static_range=range, static_assert=lambda holds, why: None,
        program_id=lambda axis: world.me().program, num_programs=lambda axis: world.me().programs,
        load=load, store=store, atomic_add=atomic_add, where=where,
        minimum=choose("minimum"), maximum=choose("maximum"), cdiv=lambda a, b: -(-a // b),
        arange=lambda start, stop, layout: Block(torch.arange(start, stop, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: Block(torch.full(shape, value, dtype=dtype)),
        cast=cast, to_tensor=lambda x: x, convert_layout=lambda x, layout, assert_trivial=False: x,
        exp2=lambda x: Block(torch.exp2(x.value)), log2=lambda x: Block(torch.log2(x.value)),
        fma=fma, abs=lambda x: Block(torch.abs(x.value)) if isinstance(x, Block) else abs(x),
        max=reduce("max"), sum=reduce("sum"), split=lambda x: tuple(map(Block, x.value.unbind(-1))),
        inline_asm_elementwise=elementwise_asm,
        allocate_shared_memory=allocate, warp_specialize=warp_specialize,
        NVMMASharedLayout=nothing, BlockedLayout=lambda *a: None, SliceLayout=lambda *a: None,
        NVMMADistributedLayout=lambda **a: None, DotOperandLayout=lambda **a: None,
        DistributedLinearLayout=lambda *a: None, SwizzledSharedLayout=lambda *a: None,
        **dtypes,
    )  # fmt: skip
    return {
        "gluon": SimpleNamespace(jit=jit, constexpr_function=lambda function: function), "gl": gl,
        "mbarrier": SimpleNamespace(
            init=_Barrier.init, wait=wait, arrive=arrive, expect=expect, MBarrierLayout=lambda: "barrier"
        ),
        "async_copy": SimpleNamespace(mbarrier_arrive=lambda bar, increment_count: arrive(bar, world.threads)),
        "tma": SimpleNamespace(store_wait=store_wait), "fence_async_shared": fence,
        "warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait, "async_load": async_load, "async_store": async_store,
        "async_add": async_add, "reinterpret": reinterpret, "local_mma_wait": local_mma_wait,
        "accumulator": lambda products: products if products.result is None else products.result,
    }  # fmt: skip
