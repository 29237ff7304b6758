"""The portable kernels, prepared for tensors of one layout and bound to the work of one plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from sparseflash.backends.triton.alignment import describable_strides
from sparseflash.backends.triton.configs import Kernel
from sparseflash.backends.triton.device_functions.fp32_split import PIECE_COUNT, precision_of
from sparseflash.backends.triton.device_functions.softmax import LOG2E
from sparseflash.backends.triton.family import KernelChoice, Setting
from sparseflash.backends.triton.launch.launches import (
    SOME_COORDINATES,
    SOME_LENGTHS,
    SOME_PARTS,
    SOME_SEED,
    launch_of,
    of_call,
)
from sparseflash.backends.triton.launcher import BoundLaunch, Describe, Launch
from sparseflash.backends.triton.portable.choice import Choice, Chooser
from sparseflash.backends.triton.portable.dk_dv import dk_dv_kernel
from sparseflash.backends.triton.portable.dq import dq_kernel
from sparseflash.backends.triton.portable.fitting import resident_programs
from sparseflash.backends.triton.portable.forward import forward_kernel
from sparseflash.backends.triton.schedule.plan import Plan
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.schedule.work_item import ITEM_COUNT
from sparseflash.backends.triton.schedule.worklists import Worklist
from sparseflash.dropout import Dropout, amplification

if TYPE_CHECKING:
    from sparseflash.backends.triton.changes.kind import Part
    from sparseflash.backends.triton.changes.kinds import Changed

FUNCTIONS: dict[Kernel, Any] = {"forward": forward_kernel, "dk_dv": dk_dv_kernel, "dq": dq_kernel}
STRIDES: dict[Kernel, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "out"), "dk_dv": ("q", "k", "v", "dout", "dk", "dv"),
    "dq": ("q", "k", "v", "dout", "out", "dq"),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The compile-time argument SHAPE of the kernels: their tiles, and what of them is compiled.

    Triton identifies a compile-time argument by its text, in which a dataclass has all its fields.

    In Triton 3.6 a field is no compile-time argument of `tl.zeros`, hence `tl.full`; and a text such as PRECISION must
    be bound to a `tl.constexpr` first.
    """

    D: int
    DV: int
    PADDED_D: int
    PADDED_DV: int
    BLOCK_Q: int  # the tiles of the lists
    BLOCK_K: int
    BLOCK_M: int  # the kernel's tiles; divisors of BLOCK_Q and BLOCK_K
    BLOCK_N: int
    # Block size in tokens of a gathered tile, of keys or in dk_dv_kernel of queries, or 0: see loads.py.
    GATHERED: int
    HAS_LENGTHS: bool
    DROPOUT: bool
    KEEP: bool  # whether maxima are kept unscaled and sums inverted, see softmax.py
    TMA: bool  # whether tiles are loaded by descriptors
    PRECISION: str
    Q_IN_REGISTERS: bool = False  # of forward_kernel
    ROWS_TMA: bool = False  # of dk_dv_kernel: whether lse2 and delta are loaded by descriptors
    DELTA: bool = False  # of dq_kernel, see there


class Numbers(NamedTuple):
    """The numeric arguments of the kernels."""

    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    dims: tuple[int, int]  # D and Dv
    scale: float
    dropped: int


class Bound(NamedTuple):
    """A kernel bound to the work of a plan."""

    launch: BoundLaunch
    work: Worklist
    choice: Choice
    tile: int  # tokens held per program

    def described(self, kernel: str) -> KernelChoice:
        self.work.ready.wait()
        choice, config = self.choice, self.choice.config
        walked = self.work.work[..., ITEM_COUNT.value].sum(1)
        held, streamed, gathered = choice.tiling
        tiles = f"tiles of {held} x {streamed}"
        if gathered:
            tiles += f", gathered from blocks of {gathered}"
        return KernelChoice(
            kernel, config.block_m, config.block_n, config.num_warps, self.launch.launch.variant.options["num_stages"],
            choice.arithmetic + (" in pieces" if choice.pieces else ""),
            f"{'descriptors' if choice.descriptors else 'pointers'}: {choice.why_descriptors}",
            f"{tiles}: {choice.why_tiling}", len(walked), int(walked.sum()), int(walked.max()) if len(walked) else 0,
            self.work.parts,
        )  # fmt: skip


class KernelLayout:
    """A kernel over tiles of queries or of keys, for tensors of one layout and any plan."""

    def __init__(
        self, kernel: Kernel, setting: Setting, numbers: Numbers, tiles: Mapping[str, Tensor],
        varying: Mapping[str, Any], strides: Mapping[str, Tensor], *, row_stride: int | None = None,
        means: bool = False, changed: Changed | None = None, sink: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """All tensors are examples on the meta device, by the names of the kernel's arguments.

        tiles: tensors that are loaded by tiles, with aligned rows. varying: the other tensors of a call, or tuples of
        them. strides: tensors whose strides are arguments. row_stride: the stride between heads of lse2 and delta.
        means: dq_kernel with DELTA. changed: the score modifications. sink: the argument `sink_ptr`, for a kernel that
        completes sums of exponentials.
        """
        self.kernel, self.numbers = kernel, numbers
        self._architecture, self.lengths, self.dropout = setting.architecture, setting.lengths, setting.dropout
        self._coordinates = setting.coordinates
        self.device = setting.plan.device
        self._described = {name: describable_strides(x) for name, x in tiles.items()}
        self._chooser = Chooser(
            kernel, setting, numbers.dims, tiles["q"], tiles["v"],
            is_expanded=any([0 in strides for strides in self._described.values()]),
            changes=() if changed is None else changed.kinds,
        )  # fmt: skip
        self._tiles, self._varying, self._strides = dict(tiles), dict(varying), dict(strides)
        self._row_stride, self._means = row_stride, means
        self._changed, self._sink = changed, dict(sink or {})
        self._part: Part = "forward"
        if kernel != "forward" and not means:
            self._part = "rows" if kernel == "dq" else "columns"
        # The softmax multiplies scores by these factors, in base e and in base 2. Modified scores include the scale.
        self.softmax_scale, self.qk_scale = numbers.scale, numbers.scale * LOG2E.value
        if changed is not None and changed.are_changed:
            self.softmax_scale, self.qk_scale = 1.0, LOG2E.value
        self._launches: dict[tuple[Tiling, bool], Launch] = {}  # not bound to work; bounded by the number of tilings

    def bind(self, plan: Plan) -> Bound:
        over_columns = self.kernel == "dk_dv"
        choice = self._chooser.choice(plan)
        config = choice.config
        tile = config.block_n if over_columns else config.block_m
        itemsize = 2 * PIECE_COUNT if choice.pieces else self._tiles["q"].element_size()
        resident = resident_programs(self.kernel, config, max(choice.padded), itemsize)
        work = plan.worklist(int(over_columns), tile, choice.tiling, resident=resident)
        key = choice.tiling, work.merged is not None
        unbound = self._launches.get(key)
        if unbound is None:
            unbound = self._launches[key] = self._unbound(choice, tile, split=work.merged is not None)
        launch = unbound.bind(
            len(work.work), work_ptr=work.work, index_ptr=work.index, tile_ptr=work.tile, words_ptr=work.words
        )
        return Bound(launch, work, choice, tile)

    def _unbound(self, choice: Choice, tile: int, *, split: bool) -> Launch:
        numbers, config, padded = self.numbers, choice.config, choice.padded
        over_columns = self.kernel == "dk_dv"
        held, streamed = choice.tiling.held, choice.tiling.streamed
        block_q, block_k = (streamed, held) if over_columns else (held, streamed)
        constants: dict[str, Any] = {
            "D": numbers.dims[0], "DV": numbers.dims[1], "PADDED_D": padded[0], "PADDED_DV": padded[1],
            "BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "GATHERED": choice.tiling.gathered, "HAS_LENGTHS": self.lengths, "DROPOUT": self.dropout,
            "KEEP": choice.arithmetic != "half", "TMA": choice.descriptors,
            "PRECISION": precision_of(
                choice.arithmetic, in_pieces=choice.pieces, corrected=self._architecture.corrects_sums
            ),
        }  # fmt: skip
        own_constants: dict[str, dict[str, Any]] = {
            "forward": {"Q_IN_REGISTERS": config.q_in_registers},
            "dk_dv": {"ROWS_TMA": choice.describes_rows}, "dq": {"DELTA": self._means},
        }  # fmt: skip
        shape = Shape(**constants, **own_constants[self.kernel])
        changes = None if self._changed is None else self._changed.constant(self._part)
        count = -(-(numbers.k_len if over_columns else numbers.q_len) // tile)
        numbers_by_name: dict[str, Any] = {
            "dropped": numbers.dropped, "one": 1.0,
            "scales": (numbers.scale, self.qk_scale, amplification(numbers.dropped)),
            "heads": numbers.heads, "kv_heads": numbers.kv_heads, "group": numbers.heads // numbers.kv_heads,
            "q_len": numbers.q_len, "k_len": numbers.k_len, "col_tiles": count, "row_tiles": count,
            "row_stride": self._row_stride, "lengths_stride": 0,
            "strides": tuple([self._strides[name].stride()[:3] for name in STRIDES[self.kernel]]),
        }  # fmt: skip
        examples: dict[str, Any] = {**self._tiles, **self._varying}
        if split:
            examples["parts_ptr"] = SOME_PARTS
        dropout = Dropout(SOME_SEED, numbers.dropped, **dict.fromkeys(self._coordinates, SOME_COORDINATES))
        examples |= of_call(SOME_LENGTHS if self.lengths else None, dropout if self.dropout else None)
        if self._changed is not None:
            numbers_by_name |= self._changed.numbers(self._part)
            examples |= self._changed.examples | self._changed.learned(self._part)
        examples |= self._sink
        return launch_of(
            FUNCTIONS[self.kernel], {"SHAPE": shape, "CHANGES": changes}, numbers_by_name,
            examples, self.device, self._descriptors(choice),
            bound=("work_ptr", "index_ptr", "tile_ptr", "words_ptr"), num_warps=config.num_warps,
            num_stages=config.num_stages, registers=config.registers,
        )  # fmt: skip

    def _descriptors(self, choice: Choice) -> dict[str, Describe]:
        config, padded, made = choice.config, choice.padded, {}
        if choice.descriptors:
            tokens = {"q": config.block_m, "k": config.block_n, "v": config.block_n, "dout": config.block_m}
            for name, x in self._tiles.items():
                # The pieces of a token lie side by side, as columns of one matrix.
                shape = [*x.shape[:3], x.stride(2)] if choice.pieces else list(x.shape)
                box = [1, 1, tokens[name], padded[name in ("v", "dout")]]
                made[name] = Describe(x, shape, self._described[name], box)
        if choice.describes_rows:
            for name in ("lse2", "delta"):
                batch, heads, stride = self._varying[name].shape
                shape = [batch * heads, self.numbers.q_len]
                made[name] = Describe(self._varying[name], shape, [stride, 1], [1, config.block_m])
        return made
