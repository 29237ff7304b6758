"""The calls of functions that make masks: lengths by position, everything else by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_FLEX = (
    " create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) of FlexAttention is from_function(mask_mod, Q_LEN, KV_LEN, "
    "batch=B, heads=H), with 1 in place of None; interop.flex_attention.create_block_mask takes FlexAttention's "
    "arguments."
)
_ONE_LIST = " Pass one list of them."
# What callers who pass too many arguments by position often mean, by the first parameter of the function.
_BY_POSITION = {"live": _FLEX, "masks": _ONE_LIST, "lengths": _ONE_LIST}
# What keywords of other libraries are called here, by the parameter that takes their place.
_BY_NAME = {
    "block": dict.fromkeys(("block_size", "BLOCK_SIZE"), " The size of a tile is called block."),
    "live": dict.fromkeys(("B", "H", "Q_LEN", "KV_LEN", "mask_mod"), _FLEX),
    "lengths": dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"),
        " From running sums take the differences, cu_seqlens.diff(); attention_varlen and varlen_mask take the sums.",
    ),
}


def by_name(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function with keyword-only parameters: the errors for too many positional arguments, and for names
    that it does not have, list those parameters.

    >>> @by_name
    ... def window_of(q_len, k_len=None, *, window): ...
    >>> window_of(1, 4096, 256)
    Traceback (most recent call last):
        ...
    TypeError: window_of must be given q_len and k_len by position and the rest by name (window=); got 3 by position.
    >>> window_of(4096, window_size=256)
    Traceback (most recent call last):
        ...
    TypeError: window_of must be given q_len and k_len by position and the rest by name (window=); got window_size=.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    most, known = len(positional), frozenset(p.name for p in parameters)
    of_class = int(positional[:1] == ["cls"])
    positional = positional[of_class:]
    expected = " and ".join(filter(None, (", ".join(positional[:-1]), positional[-1]))) + " by position"
    if named := ", ".join(f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY):
        expected += f" and the rest by name ({named})"

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > most:
            meant = _BY_POSITION.get(positional[0], "")
            raise TypeError(
                f"{called.__name__} must be given {expected}; got {len(args) - of_class} by position.{meant}"
            )
        if not known >= kwargs.keys():
            unknown = next(name for name in kwargs if name not in known)
            meant = next((of[unknown] for name, of in _BY_NAME.items() if name in known and unknown in of), "")
            raise TypeError(f"{called.__name__} must be given {expected}; got {unknown}=.{meant}")
        return function(*args, **kwargs)

    called.__signature__ = signature  # type: ignore[attr-defined]  # or `is_rule` would look for it at every call
    return called
