"""Score modifications with tensors that a `score_mod` indexes by batch element and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparseflash.scores.change import Change, Sizes


@dataclass(frozen=True, eq=False)
class Indexed(Change, prepared=False):
    """In a `score_mod`, `tensor[h]` reads the first Hq entries of a tensor with Hq or more. The change itself needs
    exactly Hq entries, so the tensor is narrowed when the attention is called and its sizes are known.
    """

    change: Change
    places: str  # the index of each of the tensor's first dimensions: "b", "h", or another letter

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.change.kind

    @property
    def order(self) -> int:  # type: ignore[override]
        return self.change.order

    def tensors(self) -> tuple[Tensor, ...]:
        return self.change.tensors()

    def numbers(self) -> tuple[float, ...]:
        return self.change.numbers()

    def with_tensors(self, tensors: Sequence[Tensor]) -> Change:
        return replace(self, change=self.change.with_tensors(tensors))

    def prepared(self, sizes: Sizes) -> Change:
        (x,) = self.change.tensors()
        wanted = {"b": (sizes.batch, "batch element"), "h": (sizes.heads, "query head")}
        for dim, place in enumerate(self.places):
            count, what = wanted.get(place, (x.shape[dim], ""))
            if x.shape[dim] < count:
                raise ValueError(
                    f"a tensor that score_mod reads at {place} must have an entry for each {what}, {count}; got "
                    f"{x.shape[dim]}."
                )
            x = x.narrow(dim, 0, count)
        return self.change.with_tensors([x]).prepared(sizes)
