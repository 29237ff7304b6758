"""Changes of scores whose tensors a `score_mod` indexes by batch element and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparseflash.scores.change import Change, Sizes


@dataclass(frozen=True, eq=False)
class Indexed(Change):
    """A change of one tensor, of which it reads the entries of the attention's batch elements and heads.

    `tensor[h]` reads the first Hq entries, however many there are; the change alone would have to have Hq of them. The
    attention's sizes are known when it is called.
    """

    change: Change
    places: str  # what indexes the tensor's first dimensions: "b", "h", or another letter for anything else

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.change.kind

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
