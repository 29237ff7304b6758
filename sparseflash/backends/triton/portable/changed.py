"""What the Hopper kernels take of changes of scores, by the names of their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes import tile_bias
from sparseflash.backends.triton.changes.table import in_dtype
from sparseflash.scores.change import Scores
from sparseflash.scores.tile_bias import StoredTiles


class Changed:
    """The tensors of changes, as the Hopper kernels take them."""

    @staticmethod
    def tensors(changes: Scores, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """The slopes of a decay, if there is one."""
        found = changes.find("distance")
        return {} if found is None else {"slopes_ptr": aligned_start(found.slopes.contiguous())}

    @staticmethod
    def sink_of(changes: Scores) -> dict[str, Tensor]:
        """The sink, if there is one."""
        found = changes.find("sink")
        return {} if found is None else {"sink_ptr": aligned_start(found.logits.contiguous())}

    @staticmethod
    def table_of(changes: Scores, dtype: torch.dtype) -> dict[str, Tensor]:
        """The table of relative positions, if there is one, in a dtype, its buckets and their runs."""
        found = changes.find("relative")
        if found is None:
            return {}
        given = {"table_ptr": in_dtype(found.table, dtype), "buckets_ptr": found.buckets, "until_ptr": found.until}
        return {name: aligned_start(x.contiguous()) for name, x in given.items()}

    @staticmethod
    def key_bias_of(changes: Scores) -> Tensor:
        """The bias of keys, which there is, contiguous."""
        return aligned_start(changes.find("key_bias").values.contiguous())


def numbers_of_tiles(tiles: StoredTiles) -> dict[str, int]:
    """The numbers of a bias of live tiles, by name; see `tile_bias.numbers_of_tiles`."""
    names = (
        "tiles_of_batch", "tiles_of_head", "patterns_of_batch", "patterns_of_head", "tile_rows", "tile_words",
    )  # fmt: skip
    return dict(zip(names, tile_bias.numbers_of_tiles(tiles), strict=True))
