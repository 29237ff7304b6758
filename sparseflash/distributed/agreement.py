"""Checks that all ranks compute the same attention, by comparing digests before the first exchange of each kind."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist


def check_agreement(parts: dict[str, object], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ValueError on every rank unless the parts, by name, are the same on all ranks of the group.

    One gather of eight bytes a part.
    """
    digests = [hashlib.blake2b(repr(part).encode(), digest_size=8).digest() for part in parts.values()]
    mine = torch.tensor([int.from_bytes(each, "little", signed=True) for each in digests], device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    table = torch.stack(found).tolist()
    differing = [name for name, column in zip(parts, zip(*table, strict=True), strict=True) if len(set(column)) > 1]
    if differing:
        own = "; ".join(f"{name}: {parts[name]}" for name in differing)
        kinds: dict[tuple[int, ...], list[int]] = {}
        for rank, row in enumerate(table):
            kinds.setdefault(tuple(row), []).append(rank)
        sides = " and ".join(str(ranks) for ranks in kinds.values())
        raise ValueError(
            f"all ranks must call attention with the same mask, shapes and options; they differ in "
            f"{', '.join(differing)} between the ranks {sides}. Here: {own}."
        )
