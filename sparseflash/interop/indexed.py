"""Score modifications with tensors that a `score_mod` indexes by batch element and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparseflash.scores.change import Change, Sizes


@dataclass(frozen=True, eq=False)
class Indexed(Change, prepared=False):
    """A change whose tensor is `derived` anew at each call from the tensor that a `score_mod` captures, so that values
    and gradients follow the captured tensor.

    In a `score_mod`, `tensor[h]` may have more than Hq entries. The change needs exactly Hq, so the tensor is narrowed
    when the attention is called and its sizes are known.
    """

    captured: Tensor
    derived: Callable[[Tensor], Tensor]
    change: Change  # with a derived tensor that each call replaces
    places: str  # the index of each of the derived tensor's first dimensions: "b", "h", or another letter

    @classmethod
    def of_captured(
        cls, captured: Tensor, derived: Callable[[Tensor], Tensor], make: Callable[[Tensor], Change], places: str
    ) -> Indexed:
        """make: returns the change for a derived tensor."""
        return cls(captured, derived, make(derived(captured.detach())), places)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.change.kind

    @property
    def order(self) -> int:  # type: ignore[override]
        return self.change.order

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.captured,)

    def numbers(self) -> tuple[float, ...]:
        return self.change.numbers()

    def with_tensors(self, tensors: Sequence[Tensor]) -> Change:
        return replace(self, captured=tensors[0])

    def prepared(self, sizes: Sizes) -> Change:
        x = self.derived(self.captured)
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
