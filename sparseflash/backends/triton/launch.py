"""Launches the kernels: picks configurations, plans and descriptors for the tensors at hand.

A launch is prepared once for a plan and the layout of the tensors, and kept with the plan; the calls after that only
look it up. Half of the time of a call on short sequences would go into preparing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseflash.backends.triton.alignment import aligned, is_aligned
from sparseflash.backends.triton.configs import (
    Arithmetic,
    Config,
    Kernel,
    arithmetic_of,
    config_for,
    has_room_for_pieces,
    held_first,
    padded_dims,
    resident_programs,
    roomier,
)
from sparseflash.backends.triton.cuda_graphs import refuse_to_record
from sparseflash.backends.triton.launcher import Prepared
from sparseflash.backends.triton.portable.backward import dk_dv_kernel, dq_kernel
from sparseflash.backends.triton.portable.combine import (
    combine_gradients_kernel,
    combine_means_kernel,
    combine_rows_kernel,
)
from sparseflash.backends.triton.portable.forward import forward_kernel
from sparseflash.backends.triton.portable.fp32_split import COUNT, PIECES, WITHOUT_PIECES, in_pieces
from sparseflash.backends.triton.schedule.plan import Plan, Side
from sparseflash.backends.triton.schedule.tilings import FP32, HALF, Tile, Tiling
from sparseflash.dropout import amplification

LOG2E = 1.4426950408889634
_TOKENS_TO_COMBINE = 16
# Making descriptors costs the host about 15 us a call, which pays once the kernel runs for longer than that.
_PRODUCTS_FOR_DESCRIPTORS = 10_000_000_000
# Other tiles than the mask's have to be counted and made, once a mask, for which there must be something to win.
_PRODUCTS_FOR_TILINGS = 1_000_000_000
_ANY_BLOCK = (256, 256)


class Problem(NamedTuple):
    """One attention as the launcher sees it."""

    plan: Plan
    lengths: Tensor | None
    block: tuple[int, int]
    scale: float
    tf32: bool
    seed: Tensor | None = None  # one int64, of the dropout; None: nothing is dropped
    dropped: int = 0  # of 256


def operands(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *dout: Tensor) -> tuple[Tensor, ...]:
    """The same as the kernels read them: with aligned rows, or in full fp32 in pieces `[B, H, N, 3, padded]`."""
    if q.dtype != torch.float32 or problem.tf32 or not _is_read_often(problem.plan, problem.block, k):
        return tuple(map(aligned, (q, k, v, *dout)))
    capability = capability_of(q.device)
    padded, padded_v = padded_dims(q.shape[-1], v.shape[-1], capability, itemsize=2)
    if not has_room_for_pieces(capability, max(padded, padded_v)):
        return tuple(map(aligned, (q, k, v, *dout)))
    return in_pieces(q, padded), in_pieces(k, padded), *(in_pieces(x, padded_v) for x in (v, *dout))


def _is_read_often(plan: Plan, block: tuple[int, int], k: Tensor) -> bool:
    """Whether splitting all keys before costs less than to split those that are read whenever they are read.

    To read and write a key once costs about what reading it twice does; a mask of a long cache reads a few keys only.
    """
    batch, heads, tokens = k.shape[:3]
    return plan.tiles_total * block[1] >= 2 * batch * heads * tokens


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor) -> None:
    """Writes `out`, `lse` and, unless it is empty, `kept`. q, k, v, here and in all others: of `operands`."""
    run_forward(prepared_forward(problem, q, k, v, out), problem, q, k, v, out, lse, kept)


def prepared_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Launch:
    """The launch that `forward` would make for tensors of this layout."""
    return _prepared("forward", problem, q, k, v, out)


def run_forward(
    launch: Launch, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor
) -> None:
    """`forward` by a launch that is known."""
    side, parts = launch.side, launch.parts()
    maximum, inverse = _halves(kept)
    launch.run(*launch.tokens(q, k, v), out, lse, maximum, inverse, *_last_arguments(launch, problem, parts))
    if parts is not None:
        launch.combine(
            parts, side.merged, out, lse, maximum, inverse, problem.lengths, amplification(problem.dropped),
            problem.scale, problem.scale * LOG2E,
        )  # fmt: skip


def bound_forward(
    launch: Launch, problem: Problem, kept: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """`run_forward` as a function of `q, k, v, out, lse`, for calls of which nothing else changes."""
    if launch.descriptors or launch.side.merged is not None:
        return lambda q, k, v, out, lse: run_forward(launch, problem, q, k, v, out, lse, kept)
    return launch.bound(*_halves(kept), *_last_arguments(launch, problem, None))


def backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor, dout: Tensor,
    dlse: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes `dq`, `dk` and `dv`."""
    if kept.numel():
        lse2, inverse = kept[0], kept[1]
        delta = torch.empty_like(lse)
        inverse = row_means(problem, q, k, v, out, dout, lse2, inverse, delta)
    else:
        lse2, inverse, delta = empty_rows(lse), None, empty_rows(lse)
    query_gradients(problem, q, k, v, out, lse, dout, dlse, lse2, inverse, delta, dq)
    if inverse is None:
        dlse = None  # is in delta now
    key_gradients(problem, q, k, v, dout, lse2, inverse, delta, dlse, dk, dv)


def empty_rows(lse: Tensor) -> Tensor:
    """Room for one number a query, fp32 `[B, Hq, >= Nq]`, with rows that the copy engine can read in half precision."""
    return lse.new_empty(*lse.shape[:2], _row_stride(lse.shape[2], False))


def query_gradients(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    lse2: Tensor, inverse: Tensor | None, delta: Tensor, dq: Tensor,
) -> None:  # fmt: skip
    """Writes `dq`; and in half precision, where `inverse` is None, `lse2` and `delta`, which hold `dlse` then."""
    launch = _prepared("dq", problem, q, k, v, dout, out, dq, dlse=dlse)
    side, parts = launch.side, launch.parts()
    launch.run(
        *launch.tokens(q, k, v), dout, out, lse, dlse, lse2, inverse, delta, dq, None,
        *_last_arguments(launch, problem, parts),
    )  # fmt: skip
    if parts is not None:
        launch.combine(parts, side.merged, dq, None, None, 1.0, problem.scale)


def row_means(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, maximum: Tensor, inverse: Tensor,
    delta: Tensor,
) -> Tensor:  # fmt: skip
    """Writes what the two passes need of each query, in fp32: `delta`; returns the inverse they take."""
    own_inverse = torch.empty_like(delta)
    launch = _prepared("delta", problem, q, k, v, dout, out)
    side, parts = launch.side, launch.parts()
    launch.run(
        *launch.tokens(q, k, v), dout, out, None, None, maximum, inverse, delta, None, own_inverse,
        *_last_arguments(launch, problem, parts),
    )  # fmt: skip
    if parts is not None:
        launch.combine(parts, side.merged, inverse, delta, own_inverse)
    return own_inverse


def key_gradients(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, inverse: Tensor | None,
    delta: Tensor, dlse: Tensor | None, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes `dk` and `dv`, from what `query_gradients` found."""
    launch = _prepared("dk_dv", problem, q, k, v, dout, dk, dv, dlse=dlse)
    side, parts = launch.side, launch.parts()
    launch.run(
        *launch.tokens(q, k, v, dout), launch.rows(lse2), inverse, launch.rows(delta), dlse, dk, dv,
        *_last_arguments(launch, problem, parts),
    )  # fmt: skip
    if parts is not None:
        launch.combine(
            parts, side.merged, dk, dv, problem.lengths, amplification(problem.dropped), problem.scale
        )  # fmt: skip


def _last_arguments(launch: Launch, problem: Problem, parts: Tensor | None) -> tuple[Any, ...]:
    """Those that all kernels over tiles have in common."""
    side = launch.side
    return (
        side.work, parts, side.index, side.tile, side.words, problem.lengths, problem.seed, problem.dropped,
        amplification(problem.dropped), problem.scale, problem.scale * LOG2E, *launch.numbers,
    )  # fmt: skip


class Launch:
    """One kernel, and the one that merges its partial results if there are any, ready for tensors of one layout."""

    def __init__(self, name: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        kernel: Kernel = "dq" if name == "delta" else name  # type: ignore[assignment]
        capability = capability_of(q.device)
        of_pieces = q.ndim == 5
        (heads, q_len), (kv_heads, k_len) = q.shape[1:3], k.shape[1:3]
        if kernel == "dk_dv":
            dim, v_dim = rest[1].shape[-1], rest[2].shape[-1]
        else:  # pieces have been padded, what is written has not
            dim, v_dim = (rest[2] if name == "dq" else q).shape[-1], rest[0 if name == "forward" else 1].shape[-1]
        arithmetic: Arithmetic
        if of_pieces:
            arithmetic, itemsize, is_kept = "fp32", 2 * COUNT, True
            padded_dim, padded_v = q.shape[-1], v.shape[-1]
        else:
            arithmetic = arithmetic_of(q.dtype, problem.tf32)
            itemsize, is_kept = q.element_size(), q.dtype == torch.float32
            # Matrix instructions read pieces in bf16 here, too.
            padded_dim, padded_v = padded_dims(dim, v_dim, capability, 2 if arithmetic == "fp32" else itemsize)
        padded = max(padded_dim, padded_v)
        loaded = (q, k, v, rest[0]) if kernel == "dk_dv" else (q, k, v)
        products = problem.plan.tiles_total * problem.block[0] * problem.block[1] * (dim + v_dim)
        may_describe = (
            capability >= (9, 0) and products >= _PRODUCTS_FOR_DESCRIPTORS and all(map(_can_describe, loaded))
        )
        columns = kernel == "dk_dv"

        def config_of(block: tuple[int, int], descriptors: bool) -> Config:
            return config_for(kernel, capability, arithmetic, padded, block, descriptors)

        def warps(tile: Tile, is_gathered: bool) -> int:
            return config_of(tile[::-1] if columns else tile, may_describe and not is_gathered).num_warps

        tiling = None
        if products >= _PRODUCTS_FOR_TILINGS:
            wanted = [config_of(_ANY_BLOCK, descriptors)[:2] for descriptors in (may_describe, False)]
            whole, gathered = ((n, m) if columns else (m, n) for m, n in wanted)
            tiling = problem.plan.tiling(int(columns), whole, gathered, FP32 if arithmetic == "fp32" else HALF, warps)
        if tiling is None:
            tiling = Tiling(*(problem.block[::-1] if columns else problem.block))
        self.tiling: Tiling = tiling
        block = (tiling.streamed, tiling.held) if columns else (tiling.held, tiling.streamed)
        # Tiles too small for the matrix instructions that read shared memory are multiplied from registers, and so are
        # all where there are none; wide heads, and pieces, cannot afford that tiles come through shared memory, too.
        from_shared = capability[0] in (9, 10) and min(block) >= 64
        if of_pieces:
            from_shared = capability[0] in (9, 10) and held_first(kernel, config_of(block, True)[:2])[0] >= 64
        few_registers = padded <= 128 and arithmetic != "fp32"
        self.descriptors = may_describe and tiling.gathered == 0 and (few_registers or from_shared)
        config = config_of(block, self.descriptors)
        config = roomier(config, lengths=problem.lengths is not None, dropout=problem.seed is not None)
        self.config: Config = config
        # The copy engine writes to multiples of 128 bytes of shared memory; 16 numbers are fewer.
        self._describes_rows = self.descriptors and not is_kept and config.block_m >= 32
        self._q_len = q_len
        tile_of = (config.block_m, config.block_n, config.block_n, config.block_m)
        widths = (padded_dim, padded_dim, padded_v, padded_v)
        self.boxes = [[1, 1, tile, width] for _, tile, width in zip(loaded, tile_of, widths, strict=False)]
        plan = problem.plan
        tile, side = (config.block_n, plan.columns) if columns else (config.block_m, plan.rows)
        self.side: Side = side(tile, tiling, resident=resident_programs(kernel, config, padded, itemsize))
        tiles = -(-k_len // config.block_n) if columns else -(-q_len // config.block_m)
        self.numbers = (
            *((1.0,) if kernel == "forward" else ()), kv_heads if columns else heads, heads // kv_heads, q_len, k_len,
            tiles,
            *(() if kernel == "forward" else (_row_stride(q_len, is_kept),)),
            *map(_strides, (q, k, v, *rest, *(rest[-1:] if name == "delta" else ()))),
            dim, v_dim, padded_dim, padded_v, *block, config.block_m, config.block_n, tiling.gathered,
            problem.lengths is not None, problem.seed is not None, is_kept, self.descriptors,
            PIECES.value if of_pieces else WITHOUT_PIECES if arithmetic == "fp32" else "tf32",
            {"forward": config.q_in_registers, "dq": name == "delta", "dk_dv": self._describes_rows}[kernel],
        )  # fmt: skip
        self._main = Prepared(_KERNELS[kernel], len(self.side.work), q.device, *config[2:5])
        self._parts: tuple[int, int] | None = None  # their number, and the fp32 numbers of each
        if self.side.merged is not None:
            # Few tokens a program, because there may be few items that are cut, each with many parts.
            tokens = tile if name == "delta" else _TOKENS_TO_COMBINE
            heads_tokens_tiles = kv_heads if columns else heads, k_len if columns else q_len, tiles
            dims = dim, v_dim, padded_dim, padded_v
            dropping, keeping = problem.seed is not None, is_kept
            numbers: tuple[Any, ...]
            if name == "forward":
                numbers = *heads_tokens_tiles, _strides(rest[0]), *dims[1::2], tile, tokens, dropping, keeping
                size = padded_v + 2
            elif name == "delta":
                numbers = *heads_tokens_tiles[1:], tile
                size = 3
            else:
                strides = map(_strides, rest[1:] if columns else (rest[-1], rest[-1]))
                numbers = *heads_tokens_tiles, *strides, *dims, tile, tokens, dropping
                size = padded_dim + (padded_v if columns else 0)
            self._parts = self.side.parts, tile * size
            programs = len(self.side.merged) * (tile // tokens)
            self._combining, self._numbers_to_combine = Prepared(_COMBINING[name], programs, q.device, 4, 2), numbers

    def parts(self) -> Tensor | None:
        """Room for the partial results of items that are chunks of longer ones; None if there are none."""
        return None if self._parts is None else torch.empty(self._parts, dtype=torch.float32, device=self._main.device)

    def run(self, *arguments: Any) -> None:
        """Launches the kernel."""
        self.side.made.wait()
        self._main.run(*arguments)

    def bound(self, *last: Any) -> Callable[..., None]:
        """`run` as a function of the first arguments, which are tensors; the `last` are always these."""
        wait, launch = self.side.made.wait, self._main.bound(*last)

        def run(*first: Tensor) -> None:
            wait()
            launch(*first)

        return run

    def combine(self, *arguments: Any) -> None:
        """Launches the kernel that merges the parts."""
        self._combining.run(*arguments, *self._numbers_to_combine)

    def rows(self, x: Tensor) -> Tensor | TensorDescriptor:
        """What `dk_dv_kernel` loads numbers of queries by, of an array `[B, Hq, row_stride]`."""
        if not self._describes_rows:
            return x
        batch, heads, stride = x.shape
        return TensorDescriptor(x, [batch * heads, self._q_len], [stride, 1], [1, self.config.block_m])

    def tokens(self, *tensors: Tensor) -> tuple[Tensor | TensorDescriptor, ...]:
        """What the kernel loads tiles of these tensors by: pointers, or descriptors for the copy engine."""
        if not self.descriptors:
            return tensors
        return tuple(
            TensorDescriptor(x, [*x.shape[:3], x.stride(2)] if x.ndim == 5 else x.shape, _describable_strides(x), box)
            for x, box in zip(tensors, self.boxes, strict=True)
        )


_KERNELS: dict[Kernel, Any] = {"forward": forward_kernel, "dk_dv": dk_dv_kernel, "dq": dq_kernel}
_COMBINING: dict[str, Any] = {
    "forward": combine_rows_kernel, "dk_dv": combine_gradients_kernel, "dq": combine_gradients_kernel,
    "delta": combine_means_kernel,
}  # fmt: skip


def _prepared(name: str, problem: Problem, *tensors: Tensor, dlse: Tensor | None = None) -> Launch:
    # All that a compiled kernel is specialised to and the plan does not say: head dims, which strides do not tell of
    # slices; strides; which arguments are None; and whether addresses are multiples of 16 bytes. All other arrays come
    # from our own allocations, which are, or are as far from their start for every call of a plan.
    key = (
        name, problem.tf32, tensors[0].dtype, *[x.shape[-1] for x in tensors],
        *[x.stride() for x in tensors], *[x.data_ptr() % 16 for x in tensors],
        *[None if x is None else x.data_ptr() % 16 for x in (dlse, problem.lengths, problem.seed)],
    )  # fmt: skip
    launch: Launch | None = problem.plan.launches.get(key)
    if launch is None:
        if problem.plan.lasting:
            refuse_to_record(problem.plan.device)
        launch = problem.plan.launches[key] = Launch(name, problem, *tensors)
    return launch


def _halves(kept: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return (kept[0], kept[1]) if kept.numel() else (None, None)


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _row_stride(q_len: int, kept: bool) -> int:
    """How far apart the numbers of two heads lie; the copy engine wants a multiple of 16 bytes."""
    return q_len if kept else -(-q_len // 4) * 4


def _can_describe(x: Tensor) -> bool:
    """Whether the copy engine can read it: rows at multiples of 16 bytes, nothing broadcast."""
    return is_aligned(x) and all(_describable_strides(x))


def _describable_strides(x: Tensor) -> list[int]:
    # The stride of a dimension of size 1 is never used, but must look right.
    return [16 if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)] + [1]


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; the interpreter on the CPU stands for an H100, so that its tiles are tested."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
