"""What kernels are told of changes of scores: the flags CHANGES, with which they are compiled, and the arguments.

CHANGES is 0 if scores are only scaled and masked, and then nothing of them is compiled. Otherwise it is the sum of
CHANGED and of the bits below; further changes are those whose pointers are not None.
"""

from typing import Any, NamedTuple

import triton.language as tl

CHANGED = tl.constexpr(1)
CAPPED = tl.constexpr(2)
LOGARITHMIC = tl.constexpr(4)  # the decay with distance
HARDWARE_TANH = tl.constexpr(8)  # with a relative error of 2^-11, no more than rounding to half precision makes
COMPILED = tl.constexpr(16)  # not interpreted, so instructions may be written


class TileNumbers(NamedTuple):
    """Where the tiles of a bias of live tiles and of its mask are stored; see `biases.load_tile_bias`."""

    tiles_of_batch: Any  # the strides of batch and head of the values, in tiles, 0 where shared
    tiles_of_head: Any
    patterns_of_batch: Any  # and those of the patterns
    patterns_of_head: Any
    tile_rows: Any  # block rows of the mask
    tile_words: Any  # words that number the tiles of one of them


class ChangeArguments(NamedTuple):
    """The arguments of a kernel for changes of scores, by the kernel's names; `forward_kernel` says what they are."""

    cap: Any
    inverse_cap: Any
    slopes_ptr: Any
    values_ptr: Any
    until_ptr: Any
    q_codes_ptr: Any
    k_codes_ptr: Any
    values_stride: Any
    key_bias_ptr: Any
    key_bias_strides: Any
    bias_ptr: Any
    bias_strides: Any
    tile_bias_ptrs: Any
    tile_numbers: Any  # TileNumbers
    own_ptrs: Any
    own_numbers: Any
    q_length: Any  # live queries, if there are lengths; or None
    outer_runs: Any  # of a table, if `until_ptr`: see `position_tables.outer_runs`


# Those on whose values Triton must not specialise: another mask or cap would compile the kernels again.
CHANGE_NUMBERS = ("cap", "inverse_cap", "values_stride", *TileNumbers._fields)
