"""`gain * tanh(score / gain)`, with a learned gain for each head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseflash.scores.change import Change, add_at


@dataclass(frozen=True, eq=False)
class LearnedCap(Change):
    kind = "learned_cap"
    order = 1
    gain: Tensor  # [Hq]

    def tensors(self):
        return (self.gain,)

    def changed(self, scores, at):
        gain = self.gain[at.head].to(scores.dtype)
        return gain * (scores / gain).tanh()

    def gradient(self, gradient, scores, changed, at, learned):
        gain = self.gain[at.head].to(scores.dtype)
        ratio = changed / gain
        slope = 1.0 - ratio**2
        add_at(learned[0], [at.head], gradient * (ratio - scores / gain * slope))
        return gradient * slope
