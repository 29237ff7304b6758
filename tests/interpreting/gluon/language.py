"""The names of Gluon: global memory, shared memory, barriers, products, arithmetic.

An operation whose effect others can observe ends with `world.pause()`.
"""

import re
from types import SimpleNamespace

import torch

from tests.interpreting.gluon.schedule import Copy
from tests.interpreting.gluon.values import Barrier, Block, Product, Shared, as_tensor, plain

_BARRIERS = "barrier"


def names_of_gluon(world):
    memory, copies, barriers = GlobalMemory(world), Copies(world), Barriers(world)
    products = Products(world)
    assembly = Assembly(barriers, copies)
    nothing = SimpleNamespace(get_default_for=lambda *a: None)
    dtypes = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int32", "int64")}
    gl = SimpleNamespace(
        constexpr=lambda x: x, static_range=range, static_assert=lambda holds, why: None,
        program_id=lambda axis: world.me().program, num_programs=lambda axis: world.me().programs,
        load=memory.load, store=memory.store, atomic_add=memory.atomic_add,
        allocate_shared_memory=copies.allocate, warp_specialize=lambda *given: warp_specialize(world, *given),
        where=where, minimum=minimum, maximum=maximum, cdiv=lambda a, b: -(-a // b),
        arange=lambda start, stop, layout: Block(torch.arange(start, stop, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: Block(torch.full(shape, value, dtype=dtype)),
        cast=cast, to_tensor=lambda x: x, convert_layout=lambda x, layout, assert_trivial=False: x,
        exp2=lambda x: Block(torch.exp2(x.value)), log2=lambda x: Block(torch.log2(x.value)),
        fma=fma, abs=lambda x: Block(torch.abs(x.value)) if isinstance(x, Block) else abs(x),
        max=greatest, sum=total, split=lambda x: tuple(map(Block, x.value.unbind(-1))),
        inline_asm_elementwise=assembly.run,
        NVMMASharedLayout=nothing, BlockedLayout=lambda *a: None, SliceLayout=lambda *a: None,
        NVMMADistributedLayout=lambda **a: None, DotOperandLayout=lambda **a: None,
        DistributedLinearLayout=lambda *a: None, SwizzledSharedLayout=lambda *a: None,
        **dtypes,
    )  # fmt: skip
    return {
        "gl": gl,
        "gluon": SimpleNamespace(jit=jit, constexpr_function=lambda function: function),
        "mbarrier": SimpleNamespace(
            init=Barrier.init, wait=barriers.wait, arrive=barriers.arrive, expect=barriers.expect,
            MBarrierLayout=lambda: _BARRIERS,
        ),
        "async_copy": SimpleNamespace(mbarrier_arrive=barriers.arrive_with_all_threads),
        "tma": SimpleNamespace(store_wait=copies.wait_until_read),
        "fence_async_shared": copies.fence,
        "async_load": copies.load, "async_store": copies.store, "async_add": copies.add,
        "reinterpret": lambda shared, dtype, shape, layout: shared.reinterpreted(dtype, shape),
        "warpgroup_mma": products.begin, "warpgroup_mma_wait": products.wait,
        "local_mma_wait": lambda begun, pending: products.wait(pending, deps=(begun,)),
        "accumulator": lambda product: product if product.result is None else product.result,
    }  # fmt: skip


def jit(function=None, **options):
    return function if function is not None else lambda function: function


def warp_specialize(world, partitions, warps, registers):
    me = world.me()
    started = [world.add(lambda f=f, a=a: f(*a), me.program, me.programs) for f, a in partitions]
    world.pause(lambda: all(actor.done for actor in started))


class GlobalMemory:
    def __init__(self, world):
        self.world = world

    def load(self, pointer, mask=None, other=None, volatile=False, cache_modifier=""):
        if volatile:
            self._read_again(pointer)
        if not isinstance(pointer.at, torch.Tensor):
            return pointer.flat[pointer.checked(torch.tensor(pointer.at))].item()
        if mask is None:
            return Block(pointer.flat[pointer.checked(pointer.at)])
        mask, at = torch.broadcast_tensors(plain(mask), pointer.at)
        pointer.checked(at[mask])
        found = pointer.flat[torch.where(mask, at, 0)] if len(pointer.flat) else torch.zeros_like(at)
        return Block(torch.where(mask, found, other))

    def _read_again(self, pointer):
        """A second read waits for the number to change, so an endless loop is a deadlock."""
        actor, place = self.world.me(), (pointer.flat.data_ptr(), pointer.at)
        known = actor.read
        if known is not None and known[0] == place:
            self.world.pause(lambda: pointer.flat[pointer.at].item() != known[1])
        else:
            self.world.pause()
        actor.read = place, pointer.flat[pointer.at].item()

    def store(self, pointer, value, mask=None):
        at, value = torch.as_tensor(pointer.at), torch.as_tensor(plain(value))
        at, value = torch.broadcast_tensors(at, value)
        keep = torch.as_tensor(True if mask is None else plain(mask)).broadcast_to(at.shape)
        pointer.flat[pointer.checked(at[keep])] = value[keep].to(pointer.flat.dtype)

    def atomic_add(self, pointer, value, sem, scope, mask=None):
        self.world.pause()
        if isinstance(value, Block):
            keep = torch.as_tensor(True if mask is None else plain(mask))
            at, value, keep = torch.broadcast_tensors(pointer.at, value.value, keep)
            pointer.flat.index_add_(0, pointer.checked(at[keep]).long(), value[keep])
            return None
        old = pointer.flat[pointer.at].item()
        pointer.flat[pointer.at] += value
        return old


class Copies:
    def __init__(self, world):
        self.world = world

    def allocate(self, dtype, shape, layout):
        if layout == _BARRIERS:
            return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
        self.world.fenced.append([])
        return Shared.allocated(dtype, shape, self.world.fenced[-1])

    def fence(self):
        """Orders this thread's stores before the asynchronous operations that follow."""
        for threads in self.world.fenced:
            threads[:] = [each for each in threads if each is not self.world.me().thread]

    def load(self, descriptor, coordinates, bar, target):
        target.value.fill_(torch.nan)

        def arrive():
            target.value.copy_(descriptor.read(coordinates).view(target.value.shape))
            bar.complete(descriptor.block_type.nbytes)

        self.world.copies.append(Copy(arrive, self.world.speed()))
        self.world.pause()

    def store(self, descriptor, coordinates, source):
        self._send(descriptor.write, coordinates, source)

    def add(self, descriptor, coordinates, source):
        self._send(descriptor.add, coordinates, source)

    def _send(self, put, coordinates, source):
        source.assert_fenced()
        actor = self.world.me()

        def read():
            value = source.value.clone()
            actor.unseen.append(lambda: put(coordinates, value))

        actor.stores.append(read)
        self.world.pause()

    def wait_until_read(self, pending):
        stores = self.world.me().stores
        while len(stores) > pending:
            stores.pop(0)()

    def wait_until_seen(self):
        self.wait_until_read(0)
        unseen = self.world.me().unseen
        while unseen:
            unseen.pop(self.world.draw.randrange(len(unseen)))()
        self.world.pause()


class Barriers:
    """mbarriers in shared memory, and the barriers that PTX knows by a number."""

    def __init__(self, world):
        self.world, self.named = world, world.named

    def wait(self, bar, phase):
        self.world.pause(lambda: bar.phase != phase)

    def arrive(self, bar, count=1, pred=True):
        if pred:
            bar.arrive(count)
        self.world.pause()

    def arrive_with_all_threads(self, bar, increment_count):
        self.arrive(bar, self.world.threads)

    def expect(self, bar, size):
        bar.bytes += size
        self.arrive(bar)

    def by_number(self, operation, number, threads):
        me = self.world.me().program, number
        arrived, passed = self.named.get(me, (0, 0))
        arrived += self.world.threads
        assert arrived <= threads, "more arrive at a barrier than it waits for"
        self.named[me] = (0, passed + 1) if arrived == threads else (arrived, passed)
        self.world.pause(lambda: operation == "arrive" or self.named[me][1] > passed)


class Products:
    def __init__(self, world):
        self.world = world

    def begin(self, a, b, acc, use_acc=True, is_async=False):
        for x in (a, b):
            if isinstance(x, Shared):
                x.assert_fenced()
        product = Product(a, b, acc, use_acc)
        self.world.me().products.append(product)
        if not is_async:
            return self.wait(0, deps=(product,))
        self.world.pause()
        return product

    def wait(self, outstanding=0, deps=()):
        products = self.world.me().products
        while len(products) > outstanding:
            products.pop(0).retire()
        self.world.pause()
        found = tuple(x.result if isinstance(x, Product) and x.result is not None else x for x in deps)
        return found[0] if len(found) == 1 else found


class Assembly:
    UNCHANGED = (
        "shfl.sync.bfly.b32 $0, $1, 0, 31, -1;",
        "mov.b32 $0, $1;",
        "fence.acq_rel.gpu; mov.b32 $0, $1;",
    )
    UNPACKING = (
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
    )

    def __init__(self, barriers, copies):
        self.barriers, self.copies = barriers, copies

    def run(self, asm, constraints, args, dtype, is_pure, pack):
        if found := re.match(r"bar\.(sync|arrive) (\d+), (\d+); mov.b32 \$0, \$1;$", asm):
            self.barriers.by_number(found[1], found[2], int(found[3]))
            return args[0]
        if asm.startswith("cp.async.bulk.wait_group 0;"):
            self.copies.wait_until_seen()
            return args[0]
        if "vote.sync.any" in asm:  # a warp skips only multiplications by 1
            return Block(args[0].value * args[1].value)
        if asm == "shfl.sync.idx.b32 $0, $1, $2, 31, -1;":  # only for tensors with one number a thread, in order
            x, lane = (each.value.reshape(-1, 32) for each in args)
            return Block(x.gather(1, lane.long()).reshape(args[0].value.shape))
        if asm == "tanh.approx.f32 $0, $1;":
            return Block(torch.tanh(args[0].value))
        if asm in self.UNPACKING:
            return Block(args[0].value.float())
        assert asm in self.UNCHANGED, f"the emulator must know the assembly of a kernel; got {asm!r}"
        return args[0]


def where(condition, a, b):
    if not any(isinstance(x, Block) for x in (condition, a, b)):
        return a if condition else b
    a, b = (as_tensor(x, like=y) for x, y in ((a, b), (b, a)))
    return Block(torch.where(torch.as_tensor(plain(condition)), a, b))


def minimum(a, b):
    return _either(min, torch.minimum, a, b)


def maximum(a, b):
    return _either(max, torch.maximum, a, b)


def _either(of_numbers, of_tensors, a, b):
    if not isinstance(a, Block) and not isinstance(b, Block):
        return of_numbers(a, b)
    return Block(of_tensors(as_tensor(a, like=b), as_tensor(b, like=a)))


def greatest(x, axis):
    return _number_or_block(torch.max(x.value, axis).values)


def total(x, axis):
    return _number_or_block(torch.sum(x.value, axis))


def _number_or_block(x):
    return x.item() if x.ndim == 0 else Block(x)


def cast(x, dtype, bitcast=False):
    if not bitcast:
        return x
    return torch.tensor(x, dtype=torch.float32 if dtype == torch.int32 else torch.int32).view(dtype).item()


def fma(a, b, c):
    """Rounded once: the product of two numbers of fp32 is exact in fp64."""
    a, b, c = (torch.as_tensor(plain(x), dtype=torch.float64) for x in (a, b, c))
    return Block((a * b + c).to(torch.float32))
