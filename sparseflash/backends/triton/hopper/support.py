"""Which calls the Hopper kernels serve, and the reasons given to callers where they do not."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from sparseflash.backends.triton.changes.kinds import HOPPER_KINDS
from sparseflash.backends.triton.family import Request
from sparseflash.backends.triton.hopper.choices import most_filled
from sparseflash.backends.triton.hopper.configs import (
    BLOCK,
    SMALL,
    WIDEST,
    WIDEST_BACKWARD,
    is_common,
    may_be_small,
    tile_for,
)
from sparseflash.backends.triton.hopper.limits import LIMITS
from sparseflash.backends.triton.persistent.backward_plan import ENTRY, MOST_ENTRIES_LISTED
from sparseflash.backends.triton.schedule.splits import SPLITS
from sparseflash.backends.triton.versions import triton_version
from sparseflash.scores.change import PAIRS

_DTYPES = (torch.float16, torch.bfloat16)
# Entries of a table with gradients, over all query heads that share keys. Each takes 256 bytes for a tile of keys, or
# for each part of a cut one: together at most 64 KB, as the fp32 dq of a tile and head at D = 128.
MOST_ENTRIES = 256
_NOT_WITH_A_TABLE = ("softcap", "distance", "key_bias")
_LEARNED = tuple(kind for kind, each in HOPPER_KINDS.items() if each.learns)
_AT_ALL_DIMS = tuple(kind for kind, each in HOPPER_KINDS.items() if each.at_all_dims)


def refuses(request: Request) -> str | None:
    """Why the kernels for Hopper cannot serve a request; None if they can.

    >>> refuses(Request((9, 0), torch.bfloat16, (20, 64), (128, 128), False, False, False, (4096, 4096), 4096.0, False))
    'they take head dims that are multiples of 8 up to 256; got D = 20 and Dv = 64'
    """
    if not request.architecture.has_wgmma:
        return f"they run on compute capability 9.0; got {request.capability[0]}.{request.capability[1]}"
    if request.dtype not in _DTYPES:
        return f"they take fp16 and bf16; got {request.dtype}"
    dim, v_dim = request.dims
    if not _takes(request.dims):
        return f"they take head dims that are multiples of 8 up to {WIDEST}; got D = {dim} and Dv = {v_dim}"
    if request.dropout:
        return "they have no dropout"
    if unknown := [kind for kind in request.changes if kind not in HOPPER_KINDS]:
        return f"they support the score modifications {_named(HOPPER_KINDS)}; got {_named(unknown)}"
    if not is_common(request.dims) and (others := [kind for kind in request.changes if kind not in _AT_ALL_DIMS]):
        return (
            f"they support only {_named(_AT_ALL_DIMS)} at head dims other than 64, 96 and 128, and where D and Dv "
            f"differ; got {_named(others)} at D = {dim} and Dv = {v_dim}"
        )
    is_wide = request.backward and max(request.dims) > WIDEST_BACKWARD
    if is_wide and (others := [kind for kind in request.changes if kind != "sink"]):
        found = _named(others, logarithmic=request.logarithmic)
        return (
            f"their backward supports only a sink above head dim {WIDEST_BACKWARD}; got {found} at D = {dim} and "
            f"Dv = {v_dim}"
        )
    if unknown := [kind for kind in request.learned if kind not in _LEARNED]:
        return f"they compute gradients for the tensors of {_named(_LEARNED)}; got {_named(unknown)}"
    if "distance" in request.learned and ("softcap" in request.changes or request.logarithmic):
        return "they compute no gradient for the slopes of log_decay, nor for those of alibi beside softcap"
    if "relative" in request.changes and (others := [each for each in request.changes if each in _NOT_WITH_A_TABLE]):
        found = _named(others, logarithmic=request.logarithmic)
        return f"they support a relative-position table only alone or beside a sink; got one beside {found}"
    if "relative" in request.learned and request.entries > MOST_ENTRIES:
        return (
            f"they compute gradients for at most {MOST_ENTRIES} table entries, counted over the query heads that share "
            f"keys; got {request.entries}"
        )
    if "key_bias" in request.changes and ("softcap" in request.changes or request.logarithmic):
        other = "softcap" if "softcap" in request.changes else "log_decay"
        return f"they support key_bias only alone or beside alibi and a sink; got it beside {other}"
    if why := _refuses_pairs(request):
        return why
    for kind in request.changes:
        others = [other for other in request.changes if other not in (kind, "sink")]
        if others and not HOPPER_KINDS[kind].goes_beside:
            found = _named(others, logarithmic=request.logarithmic)
            return f"they support {kind} only alone or beside a sink; got it beside {found}"
    if not request.in_runs:
        return (
            "they support relative-position tables indexed by distance, where neighbouring distances mostly share an "
            "entry"
        )
    if request.backward:
        tile = _backward_tile(request)
    else:
        tile = tile_for(request.block, request.dims)
    if request.dynamic and request.block != tile:
        return "they need blocks of {} x {} for a mask that is made at every step; got {} x {}".format(
            *tile, *request.block
        )
    if is_interpreted():
        return "they are written in Gluon, which Triton's interpreter cannot run"
    return None


def _takes(dims: tuple[int, int]) -> bool:
    return all(dim % 8 == 0 and dim <= WIDEST for dim in dims)


def _named(kinds: Iterable[str], *, logarithmic: bool | None = None) -> str:
    decay = {None: "alibi, log_decay", False: "alibi", True: "log_decay"}[logarithmic]
    return ", ".join(decay if kind == "distance" else kind for kind in kinds)


def _refuses_pairs(request: Request) -> str | None:
    """Why the kernels cannot serve the bias of pairs of a request; None if they can."""
    pairs = request.pairs
    if pairs is None:
        return None
    own, *others = sorted(request.changes, key=lambda kind: kind not in PAIRS)
    if others := [kind for kind in others if kind != "sink"]:
        found = _named(others, logarithmic=request.logarithmic)
        return f"they support {own} only alone or beside a sink; got it beside {found}"
    if own == "tile_bias" and request.block != BLOCK:
        return "they support tile_bias only in blocks of {} x {}; got {} x {}".format(*BLOCK, *request.block)
    if pairs.dtype != request.dtype:
        return f"they need {own} in q's dtype; got {pairs.dtype}"
    if not pairs.has_rows:
        return f"they need {own} with a number for every query and key, in rows aligned to 16 bytes"
    if own in request.learned and pairs.is_shared:
        return f"they compute no gradient for a {own} that batch elements or heads share"
    return None


def yields(request: Request) -> str | None:
    """Why the portable kernels are as fast or faster, or need far less memory; None if these are to run. See `LIMITS`
    for the measurement.
    """
    (q_len, k_len), backward, (dim, v_dim) = request.tokens, request.backward, request.dims
    direction = "backward" if backward else "forward"
    is_64 = request.dims == (64, 64)
    least_dim = LIMITS.backward_dim if backward else LIMITS.forward_dim
    if min(request.dims) < least_dim:
        return (
            f"the portable {direction} is about as fast or faster below D = {least_dim}; got D = {dim} and Dv = {v_dim}"
        )
    if not is_common(request.dims) and (what := _not_measured(request)):
        return f"they have not been measured {what} at D = {dim} and Dv = {v_dim}; backend='hopper' asks for them"
    if backward:
        is_small = _backward_tile(request) == SMALL and min(dim, v_dim) >= LIMITS.backward_dim_small
        is_small = (is_small and not request.dynamic) or _fills_tiles(request)
    else:
        is_small = request.block == SMALL and not is_64
    if min(request.block) < min(BLOCK) and not is_small:
        return "the portable kernels read less memory in blocks of {} x {}".format(*request.block)
    if request.lengths and backward and (request.dynamic or not _is_one_kernel(request)):
        return "the portable backward skips what lies past the lengths"
    least: float = LIMITS.least_queries(
        request.dims, request.block, backward=backward, dynamic=request.dynamic, filled=_fills_tiles(request)
    )
    if has_few_queries(request.tokens, request.keys):
        least_few = _least_few_queries(request)
        if request.dynamic or q_len < least_few:
            return (
                f"the portable kernels split the keys of few queries over more programs; got {q_len:,} queries and "
                f"{k_len:,} keys"
            )
        if backward:  # their tiles of keys are many
            least = least_few
    if request.lengths and backward:
        least = max(least, LIMITS.backward_queries_padded)
    if q_len < least:
        return (
            f"the portable {direction} is about as fast or faster, its launch included, below {least:,} queries at D = "
            f"{dim}; got {q_len:,}"
        )
    tile = _backward_tile(request)
    if backward and (entries := request.keys / tile[1] * -(-q_len // tile[0]) * request.heads) >= MOST_ENTRIES_LISTED:
        return f"they list at most {MOST_ENTRIES_LISTED:,} tiles of all heads for a backward; got about {entries:,.0f}"
    if request.dynamic and is_64:
        return "the portable kernels are about as fast or faster at D = 64 with a mask that is made at every step"
    if request.dynamic and backward and (room := _room(request)) > LIMITS.most_room:
        return f"the work lists of a backward for a mask that is made at every step take {room:.2f} of q's memory"
    is_capped = "softcap" in request.changes and not {"softcap", "sink"}.issuperset(request.changes)
    if is_64 and backward and is_capped and triton_version() < (3, 8):
        return (
            "the portable backward is faster at D = 64 with softcap beside another score modification before Triton "
            "3.8, which spills fewer registers"
        )
    if request.logarithmic and not backward:
        return "the portable forward is faster with log_decay"
    return None


def _not_measured(request: Request) -> str | None:
    is_wide = max(request.dims) > WIDEST_BACKWARD
    if request.dynamic and not is_wide:
        return "with a mask that is made at every step"
    if min(request.block) < min(BLOCK):
        return "in blocks of {} x {}".format(*request.block)
    if is_wide and (others := [kind for kind in request.changes if kind != "sink"]):
        return f"with {_named(others, logarithmic=request.logarithmic)}"
    return None


def has_few_queries(tokens: tuple[int, int], keys: float) -> bool:
    """Whether queries are few beside their keys. keys: the mean number of keys of a query.

    >>> has_few_queries((1024, 65_536), 65_536), has_few_queries((1024, 4096), 4096), has_few_queries((512, 4096), 4096)
    (True, False, False)
    """
    q_len, k_len = tokens
    # A mask makes rows differ in length.
    many_keys = k_len > SPLITS.longest_whole(BLOCK[0]) or keys < k_len
    return many_keys and k_len > q_len * LIMITS.most_keys_a_query


def _least_few_queries(request: Request) -> float:
    """From this number of queries on, these kernels are chosen for few queries of many keys."""
    if request.backward:  # wide heads and tiles of 64 have a kernel for dq that does not cut rows
        return LIMITS.few_queries_backward if _is_one_kernel(request) else math.inf
    return LIMITS.few_queries if is_common(request.dims) else LIMITS.few_queries_other


def _is_one_kernel(request: Request) -> bool:
    """Whether one kernel computes dk, dv and dq."""
    return max(request.dims) <= WIDEST_BACKWARD and _backward_tile(request) == BLOCK


def _fills_tiles(request: Request) -> bool:
    """Whether the backward takes a mask in small blocks as one in blocks of 128: their live blocks fill its tiles."""
    is_plain = {"sink"}.issuperset(request.changes) and max(request.dims) <= WIDEST_BACKWARD
    return request.backward and is_plain and request.filled > most_filled(request.dims)


def _backward_tile(request: Request) -> tuple[int, int]:
    """The smallest tiles of the backward for a request."""
    is_small = may_be_small(request.block, request.dims, request.changes) and not _fills_tiles(request)
    return SMALL if is_small else BLOCK


def _room(request: Request) -> float:
    """Memory of the backward's entries for a dynamic mask, over the memory of q: a head may have all tiles of all
    patterns.
    """
    q_len, k_len = request.tokens
    tile = _backward_tile(request)
    rows, columns = -(-q_len // tile[0]), -(-k_len // tile[1])
    room = min(request.keys / tile[1] * rows * request.patterns, rows * columns)
    return float(room * 4 * ENTRY.value / (q_len * request.dims[0] * 2))


def is_interpreted() -> bool:
    """Whether Triton interprets kernels instead of compiling them."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
