"""The masks as a user makes them, with the rules of their partial tiles for peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.benchmarks.speed.cases import Case
from sparseflash import BlockMask, masks
from sparseflash.interop import mask_mods
from sparseflash.interop.mask_mods import Rule


class Pattern(NamedTuple):
    mask: BlockMask
    rule: Rule | None = None

    @property
    def kept(self) -> int:
        return round(self.mask.density * self.mask.q_len * self.mask.k_len)


def local(blocks: int, reach: int = 4) -> np.ndarray:
    """Layout [M, M]: |i - j| <= reach, in blocks."""
    places = np.arange(blocks, dtype=np.int32)
    layout: np.ndarray = np.abs(places[:, None] - places) <= reach
    return layout


def bigbird(blocks: int, *, globals_: int = 2, reach: int = 1, random: int = 3, seed: int = 0) -> np.ndarray:
    """Layout [M, M]: the first `globals_` rows and columns, |i - j| <= reach, `random` blocks drawn a row."""
    layout = local(blocks, reach)
    layout[:globals_] = True
    layout[:, :globals_] = True
    # NumPy has frozen RandomState's stream.
    generator = np.random.RandomState(seed)
    for row in range(blocks):
        layout[row, generator.permutation(blocks)[:random]] = True
    return layout


def random(blocks: int, density: float = 0.129, *, seed: int = 0) -> np.ndarray:
    """Layout [M, M]: the diagonal, and drawn blocks up to the share `density`."""
    layout = np.eye(blocks, dtype=bool)
    others = np.flatnonzero(~layout.reshape(-1))
    drawn = max(0, round(density * blocks**2) - blocks)
    layout.reshape(-1)[np.random.RandomState(seed).permutation(others)[:drawn]] = True
    return layout


LAYOUTS: dict[str, Callable[[int], np.ndarray]] = {"local": local, "bigbird": bigbird, "random12": random}


def _of_layout(case: Case, device: torch.device) -> Pattern:
    layout = torch.from_numpy(LAYOUTS[case.kind](case.length // case.block))
    return Pattern(BlockMask.from_layout(layout, block=case.block))


def window_of(case: Case) -> tuple[int, int] | None:
    if case.kind == "window":
        return case.sizes[0] - 1, 0
    both = {"window64": 64, "window256": 256}.get(case.kind)
    return None if both is None else (both, both)


def _window(case: Case, device: torch.device) -> Pattern:
    found = window_of(case)
    assert found is not None
    left, right = found
    mask = masks.local(case.length, left=left, right=right, block=case.block)
    return Pattern(mask, mask_mods.window(left, right))


def _prefix(case: Case, device: torch.device) -> Pattern:
    (prefix,) = case.sizes
    mask = masks.prefix_lm(case.length, prefix=prefix, block=case.block)
    return Pattern(mask, mask_mods.prefix(prefix))


def _longformer(case: Case, device: torch.device) -> Pattern:
    window, tokens = case.sizes
    side = window // 2
    mask = masks.longformer(case.length, window=window, global_tokens=tokens, block=case.block)
    return Pattern(mask, mask_mods.global_tokens(tokens, side, side))


def _near(q: Any, k: Any, side: int, window: int) -> Any:
    """s <= k < s + window with s = min(max(q - window // 2, 0), side - window), without minima."""
    first = q - window // 2
    return ((k >= first) | (k >= side - window)) & ((k < first + window) | (k < window))


def _image(case: Case, device: torch.device) -> Pattern:
    side, window = case.sizes
    axes = {"image": 2, "video": 3}[case.kind]

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        live = _near(q % side, k % side, side, window)
        for _ in range(axes - 1):
            q, k = q // side, k // side
            live = live & _near(q % side, k % side, side, window)
        return live

    return Pattern(masks.neighborhood((side,) * axes, window=window, block=case.block), rule)


def lengths_of(case: Case) -> list[int]:
    """Of documents, whose sum is `length`, or of padded sequences; very different, at least one token each."""
    is_packed = case.kind == "documents"
    shares = np.random.default_rng(0).lognormal(sigma=1.0, size=case.sizes[0] if is_packed else case.batch)
    whole = shares.sum() if is_packed else shares.max()
    found = np.maximum(1, (shares / whole * case.length).astype(int))
    if is_packed:
        found[found.argmax()] += case.length - found.sum()
    return [int(each) for each in found]


def _documents(case: Case, device: torch.device) -> Pattern:
    lengths = lengths_of(case)
    document = torch.repeat_interleave(torch.tensor(lengths)).to(device)
    mask = masks.documents(lengths, causal=True, block=case.block)
    return Pattern(mask, lambda b, h, q, k: (document[q] == document[k]) & (k <= q))


def _padded(case: Case, device: torch.device) -> Pattern:
    lengths = lengths_of(case)
    of_batch = torch.tensor(lengths, device=device)
    mask = BlockMask.dense(case.length, block=case.block).with_lengths(lengths)
    return Pattern(mask, lambda b, h, q, k: (q < of_batch[b]) & (k < of_batch[b]))


KINDS: dict[str, Callable[[Case, torch.device], Pattern]] = {  # comment: the sizes
    "dense": lambda case, device: Pattern(BlockMask.dense(case.length, case.k_len, block=case.block)),
    "causal": lambda case, device: Pattern(masks.causal(case.length, block=case.block), mask_mods.causal()),
    "butterfly": lambda case, device: Pattern(masks.butterfly(case.length, block=case.block)),
    **dict.fromkeys(LAYOUTS, _of_layout),
    "window64": _window,  # both ways
    "window256": _window,
    "window": _window,  # keys, causal
    "prefix": _prefix,
    "longformer": _longformer,
    "image": _image,  # side, window
    "video": _image,
    "documents": _documents,  # their number
    "padded": _padded,
}
READS_MEMORY = ("documents", "padded")  # no rules for FlashAttention-4's mask_mod
_SIZED = ("window", "prefix", "longformer", "image", "video", "documents", "padded")
PLAIN_KINDS = tuple(kind for kind in KINDS if kind not in _SIZED)


def pattern(case: Case, device: torch.device | str = "cpu") -> Pattern:
    if case.kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {case.kind!r}.")
    if case.kind in LAYOUTS and case.length % case.block:
        raise ValueError(f"length must be a multiple of the block; got {case.length} tokens in blocks of {case.block}.")
    found = KINDS[case.kind](case, torch.device(device))
    return found._replace(mask=found.mask.to(device))


def block_mask(kind: str, length: int, block: int) -> BlockMask:
    return pattern(Case(kind, kind, 1, 1, length, 64, block=block)).mask
