"""How changes of scores reach the kernels: the arguments with which these take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.availability import INTERPRETED
from sparseflash.backends.triton.portable.change_flags import CAPPED, CHANGED, COMPILED, HARDWARE_TANH, LOGARITHMIC
from sparseflash.backends.triton.portable.launches import Numbers
from sparseflash.backends.triton.portable.own import Own
from sparseflash.backends.triton.portable.passes import like
from sparseflash.limits import FAR
from sparseflash.scores.change import Scores
from sparseflash.scores.relative import Codes
from sparseflash.scores.tile_bias import StoredTiles

_CPU = torch.device("cpu")


class Changed:
    """The arguments with which kernels take the changes of scores of one kind."""

    def __init__(self, changes: Scores, numbers: Numbers, q: Tensor, wanted: Sequence[bool] = ()) -> None:
        """wanted: which tensors get a gradient."""
        dtype = q.dtype
        keep = dtype == torch.float32  # the maximum that a sink is compared with must be in its units
        cap, decay = changes.find("softcap"), changes.find("distance")
        table = changes.find("relative")
        key_bias, bias = changes.find("key_bias"), changes.find("bias")
        self.flags = 0
        if keep or changes.without("sink").changes:
            self.flags = CHANGED.value
            self.flags |= CAPPED.value if cap is not None else 0
            self.flags |= LOGARITHMIC.value if decay is not None and decay.is_log else 0
            self.flags |= 0 if keep or INTERPRETED else HARDWARE_TANH.value
            self.flags |= 0 if table is None or INTERPRETED else COMPILED.value
        self.kinds = changes.kinds if self.flags else ()  # of what is done to every score
        self.numbers: dict[str, Any] = {}
        self.own, self.function = None, None
        device = q.device
        if cap is not None:
            self.numbers |= {"cap": cap.cap, "inverse_cap": 1.0 / cap.cap}
        if table is not None:
            self.numbers["values_stride"] = len(table.buckets)
        for name, found in (("key_bias", key_bias), ("bias", bias)):
            if found is not None:
                values = _readable(found.values)
                strides = tuple(0 if n == 1 else stride for n, stride in zip(values.shape, values.stride()))
                self.numbers[f"{name}_strides"] = strides if name == "key_bias" else strides_of_pairs(strides)
        if (tiles := changes.find("tile_bias")) is not None:
            self.numbers |= numbers_of_tiles(tiles)
        if (function := changes.find("function")) is not None:
            sizes = dict(zip("bhqk", (q.shape[0], numbers.heads, numbers.q_len, numbers.k_len)))
            # Where its tensors are; of q alone something may be asked on the meta device, where nothing is recorded.
            device = next((x.device for x in function.given), q.device if q.device.type != "meta" else _CPU)
            self.own = Own(function, sizes, device, changes.by_kind(wanted)["function"])
            self.function = self.own.changed
        self.examples = {name: _like(x) for name, x in self.tensors(changes, dtype, device).items()}
        if self.own is not None and "own_ptrs" in self.examples:
            self.numbers["own_numbers"] = self.own.numbers
        self.sink = {name: like(x) for name, x in self.sink_of(changes).items()}

    @staticmethod
    def tensors(changes: Scores, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """The tensors that the kernels take, by their names."""
        found: dict[str, Any] = {}
        if (decay := changes.find("distance")) is not None:
            found["slopes_ptr"] = aligned_start(decay.slopes.contiguous())
        if (table := changes.find("relative")) is not None:
            # In half precision two bytes each: the compiler would pass four through shared memory, one by one.
            found["values_ptr"] = _in_dtype(table.table, dtype).index_select(1, table.buckets)
            found |= {name: aligned_start(x.contiguous()) for name, x in _codes(table).items()}
        for kind in ("key_bias", "bias"):
            if (bias := changes.find(kind)) is not None:
                found[f"{kind}_ptr"] = _readable(bias.values)
        if (tiles := changes.find("tile_bias")) is not None:
            found["tile_bias_ptrs"] = tuple(aligned_start(x.contiguous()) for x in tiles.tensors())
        if (function := changes.find("function")) is not None:
            if own := Own.tensors(function, device):
                found["own_ptrs"] = tuple(map(aligned_start, own))
        return found

    @staticmethod
    def sink_of(changes: Scores) -> dict[str, Tensor]:
        """The sink, if there is one, by the kernels' name."""
        found = changes.find("sink")
        return {} if found is None else {"sink_ptr": aligned_start(found.logits.contiguous())}

    @staticmethod
    def table_of(changes: Scores, dtype: torch.dtype) -> dict[str, Tensor]:
        """The table of relative positions, if there is one, in a dtype, its buckets and their runs."""
        found = changes.find("relative")
        if found is None:
            return {}
        given = {"table_ptr": _in_dtype(found.table, dtype), "buckets_ptr": found.buckets, "until_ptr": found.until}
        return {name: aligned_start(x.contiguous()) for name, x in given.items()}

    @staticmethod
    def key_bias_of(changes: Scores) -> Tensor:
        """The bias of keys, which there is, contiguous."""
        return aligned_start(changes.find("key_bias").values.contiguous())


def _like(x: Any) -> Any:
    """A tensor of the same layout on the meta device, or one for each of several."""
    return tuple(map(like, x)) if isinstance(x, tuple) else like(x)


def numbers_of_tiles(tiles: StoredTiles) -> dict[str, int]:
    """The numbers of `load_tile_bias`, for contiguous tensors. Each is an argument, as Triton would specialise on those
    of a tuple, and so compile for other masks.
    """
    (batch, heads, count), (pattern_batch, pattern_heads) = tiles.values.shape[:3], tiles.pattern.shape
    rows, words = tiles.tile_numbers.shape[1:3]
    return {
        "tiles_of_batch": heads * count if batch > 1 else 0, "tiles_of_head": count if heads > 1 else 0,
        "patterns_of_batch": pattern_heads if pattern_batch > 1 else 0, "patterns_of_head": int(pattern_heads > 1),
        "tile_rows": rows, "tile_words": words,
    }  # fmt: skip


def _codes(table: Codes) -> dict[str, Tensor]:
    """What the kernels read to find the entries of scores."""
    if table.until.numel():
        return {"until_ptr": table.until}
    return {"q_codes_ptr": table.q_codes, "k_codes_ptr": table.k_codes}


def strides_of_pairs(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of batch, head, query and key as the kernels take them. The key stride is 1 or 0.

    A fifth number is added if the query stride is so large that offsets in a tile overflow 32 bits.
    """
    return strides if strides[2] < FAR else (*strides, 1)


def _in_dtype(table: Tensor, dtype: torch.dtype) -> Tensor:
    """A table in another dtype. Finite entries are clamped, because -inf would make their scores dead."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(table.dtype).min < lowest:
        table = table.clamp(min=lowest).masked_fill_(table == -torch.inf, -torch.inf)
    return table.to(dtype)


def _readable(values: Tensor) -> Tensor:
    """The same values with a key stride of 1, and a query stride below `FAR` unless there are that many keys."""
    if (values.stride(-1) != 1 and values.shape[-1] != 1) or values.shape[-1] < FAR <= values.stride(-2):
        values = values.contiguous()
    return aligned_start(values)
