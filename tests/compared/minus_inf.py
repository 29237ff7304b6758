"""Scores of -inf by every kind of modification must equal a mask."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from sparseflash import BlockMask, attention, scores, testing
from sparseflash.backends.triton.alignment import with_aligned_rows
from sparseflash.scores.change import Sizes, scores_of
from sparseflash.testing.comparison import compare_with_draws
from tests.compared.exactness import plain

# The dead scores of each row; kernels take `tile` keys at a time.
PATTERNS = {
    "all": lambda k, tokens, tile: k < tokens,
    "first tile": lambda k, tokens, tile: k < tile,
    "last tile": lambda k, tokens, tile: k >= (tokens - 1) // tile * tile,
    "every second": lambda k, tokens, tile: k % 2 == 0,
    "none": lambda k, tokens, tile: k < 0,
}
# For each head: keys before the query, near and far, by turns of two kinds, and keys after it.
DEAD_BUCKETS = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
KINDS = ("bias", "shared bias", "key_bias", "tile bias", "relative", "where", "function")


def where_live(score, b, h, q, k, live):
    return torch.where(live[b, q, k], score, -torch.inf)


def with_pairs(score, b, h, q, k, pairs):
    return score + pairs[b, h, q, k]


@dataclass(frozen=True)
class Case:
    kind: str
    dtype: torch.dtype
    tokens: int = 40
    dim: int = 16
    tile: int = 16
    block: int = 16
    others: tuple[str, ...] = ()
    dropout: float = 0.0
    lengths: tuple[int, ...] | None = None
    whole: bool = False
    half: bool = False
    learned: bool = True
    seed: int = 0

    @property
    def heads(self):
        return len(DEAD_BUCKETS) if self.kind == "relative" else 2

    @property
    def kv_heads(self):
        return self.heads // 2

    @property
    def batch(self):
        return len(PATTERNS) if self.kind == "key_bias" else 2

    def bucket(self, offsets):
        near = torch.where(offsets // max(1, self.tile // 16) % 2 == 0, 2, 1)
        return torch.where(offsets > 0, 3, torch.where(offsets <= -self.tile - 3, 0, near))

    def alive(self):
        n, k = self.tokens, torch.arange(self.tokens)
        dead = torch.stack([rule(k, n, self.tile) for rule in PATTERNS.values()])  # [patterns, Nk]
        if self.kind == "key_bias":
            return ~dead[:, None, None].expand(-1, self.heads, n, -1)
        if self.kind == "relative":
            bucket = self.bucket(k - torch.arange(n).view(-1, 1))
            return ~DEAD_BUCKETS[:, bucket].expand(self.batch, -1, -1, -1)
        row = torch.arange(n)
        by_batch = [~dead[(row + b) % len(dead)] for b in range(self.batch)]
        if self.kind == "shared bias":
            by_batch = by_batch[:1] * self.batch
        return torch.stack(by_batch)[:, None].expand(-1, self.heads, -1, -1)

    def mask(self):
        if self.whole and self.kind != "tile bias":
            return None
        row, k = torch.arange(self.tokens).view(-1, 1), torch.arange(self.tokens)
        made = BlockMask.from_dense((k <= row) | (k < self.tile // 2), block=self.block)
        return made if self.lengths is None else made.with_lengths(list(self.lengths))

    def changes(self, dtype, device, live):
        """`(modifications, tensors that learn)`, with -inf where `live` is False."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        n, learned = self.tokens, []
        minus = torch.zeros(self.batch, self.heads, n, n)
        if live is not None:
            minus = minus.masked_fill(~live, -torch.inf)

        def drawn(*shape, plus=None, aligned=False, positive=False):
            x = torch.randn(shape, generator=generator)
            x = x.abs() if positive else x
            if self.half:
                x = x.to(self.dtype)
            x = (x if plus is None else x + plus.to(x.dtype)).to(device, dtype)
            x = with_aligned_rows(x).copy_(x) if aligned else x
            if self.learned:
                learned.append(x.requires_grad_())
            return x

        if self.kind == "bias":
            made = scores.bias(drawn(self.batch, self.heads, n, n, plus=minus, aligned=True))
        elif self.kind == "shared bias":
            made = scores.bias(drawn(1, 1, n, n, plus=minus[:1, :1]))
        elif self.kind == "key_bias":
            made = scores.key_bias(drawn(self.batch, 1, n, plus=minus[:, :1, 0]))
        elif self.kind == "tile bias":
            mask = self.mask()
            values = scores.tile_values(lambda q, k: minus[:, :, q, k], mask)
            made = scores.tile_bias(drawn(*values.shape, plus=values), mask.to(device))
        elif self.kind == "relative":
            entries = torch.zeros(DEAD_BUCKETS.shape)
            entries = entries if live is None else entries.masked_fill(DEAD_BUCKETS, -torch.inf)
            made = scores.relative(drawn(*entries.shape, plus=entries), self.bucket)
        elif self.kind == "where":
            given = torch.ones(self.batch, n, n, dtype=torch.bool) if live is None else live[:, 0]
            made = scores.function(where_live, given.to(device))
        else:
            made = scores.function(with_pairs, drawn(self.batch, self.heads, n, n, plus=minus))
        if "softcap" in self.others:
            made = scores.softcap(1.5) + made
        if "alibi" in self.others:
            made = scores.alibi(drawn(self.heads, positive=True)) + made
        if "sink" in self.others:
            made = made + scores.sink(drawn(self.heads))
        return made, learned

    def results(self, backend, device="cpu", dtype=None, *, by_mask=False):
        """out, lse and all gradients by name. by_mask: a mask replaces the scores of -inf."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype, n = self.dtype if dtype is None else dtype, self.tokens

        def drawn(heads, *shape):
            return torch.randn(self.batch, heads, n, *shape, generator=generator).to(self.dtype).to(device, dtype)

        q, k, v = (drawn(heads, self.dim).requires_grad_() for heads in (self.heads, self.kv_heads, self.kv_heads))
        dout, dlse = drawn(self.heads, self.dim), drawn(self.heads).to(torch.promote_types(dtype, torch.float32))
        live, mask = self.alive(), self.mask()
        other = dtype if dtype == torch.float64 else self.dtype if self.half else torch.float32
        made, learned = self.changes(other, device, None if by_mask else live)
        if by_mask:
            both = live if mask is None else live & mask.bake_lengths().to_dense()
            if self.kind != "tile bias":
                mask = BlockMask.from_dense(both, block=self.block)
            else:  # its mask must be the mask of the values
                pairs = scores.bias(torch.zeros(both.shape, dtype=other).masked_fill(~both, -torch.inf).to(device))
                made = pairs + made
        mask = None if mask is None else mask.to(device)
        names = ("out", "lse", "dq", "dk", "dv", *(f"d{number}" for number in range(len(learned))))
        if callable(backend):
            made = scores_of(made).prepared(Sizes(self.batch, self.heads, n, n, q.device, mask))
            given = (x.detach() for x in (q, k, v))
            found = backend(mask, *given, self.dim**-0.5, dout, dlse, changes=made)
            places = {id(x): f"d{number}" for number, x in enumerate(learned)}
            names = (*names[:5], *(places[id(x)] for x in made.tensors() if id(x) in places))
            return dict(zip(names, found, strict=True))
        out, lse = attention(
            q, k, v, mask, scores=made, return_lse=True, backend=backend, dropout_p=self.dropout, seed=5
        )  # fmt: skip
        found = torch.autograd.grad((out, lse), (q, k, v, *learned), (dout, dlse))
        return dict(zip(names, (out, lse, *found), strict=True))

    def check(self, backend="triton", device="cpu"):
        with np.errstate(over="ignore", invalid="ignore"):
            got = self.results(backend, device)
        truth = self.results("reference", device, torch.float64, by_mask=True)
        live, mask = self.alive(), self.mask()
        dead = ~(live if mask is None else live & mask.bake_lengths().to_dense()).any(-1).to(device)
        assert dead.any() and not dead.all(), "some rows must be dead for this test to mean anything"
        assert not got["out"][dead].any() and not got["dq"][dead].any()
        assert "sink" in self.others or got["lse"][dead].isneginf().all()
        assert torch.equal(got["lse"].isneginf(), truth["lse"].isneginf())
        dtype, factor = testing.plain_dtype(self.dtype)
        draws = [replace(self, seed=self.seed + number, dtype=dtype) for number in range(24)]

        def results_of(draw):
            exact = truth if draw == self else draw.results("reference", device, torch.float64, by_mask=True)
            with plain():
                return draw.results("reference", device, by_mask=True), exact

        magnitudes = {"lse": 4.0 + float(truth["lse"].detach()[~dead].abs().max())}
        found = compare_with_draws(
            got, truth, map(results_of, draws), factor, magnitudes=magnitudes, enough=1.0
        )  # fmt: skip
        assert found.exact, f"every error must be at most what is allowed; got\n{found}"
