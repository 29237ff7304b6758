"""`NativeSparseAttention` (NSA): compressed keys of the whole past, chosen blocks and near keys, joined by gates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseflash.attention import Backend
from sparseflash.blockmask.arguments import check_at_least_one, integer
from sparseflash.masks.tiling.columns import Pool
from sparseflash.nn.rotary import Rotary, rotate
from sparseflash.selection.attending import over_chosen, over_near, over_past
from sparseflash.selection.cache import SelectionCache, ended, of_blocks
from sparseflash.selection.choice import best_blocks, candidates_of, held, summed
from sparseflash.selection.frame import Frame
from sparseflash.selection.gates import gated_sum
from sparseflash.selection.layer import SelectionLayer, checked_power


class NativeSparseAttention(SelectionLayer):
    """Native sparse attention: `[B, N, embed_dim] -> [B, N, embed_dim]`, causal.

    >>> layer = NativeSparseAttention(64, 4, 2, block=32, chosen=4, compression=16, stride=8, window=64)
    >>> layer(torch.randn(2, 300, 64)).shape
    torch.Size([2, 300, 64])
    >>> layer(torch.randn(1, 300, 64), cu_seqlens=[0, 120, 300]).shape  # two sequences, packed
    torch.Size([1, 300, 64])

    For a query at position t, with keys and values of its own in each branch c:

        out_t     = sum over c of g_t^c * attention(q_t, K^c, V^c)       c: compressed, chosen, near      (paper: eq. 5)
        g_t       = sigmoid(W_g x_t),  3 numbers for each head
        K^cmp_j   = phi(k_{jd}, ..., k_{jd + l - 1})     for all blocks j that have ended, jd + l - 1 <= t       (eq. 7)
        p^cmp_t   = softmax(q_t K^cmp)                                                                           (eq. 8)
        p^slc_t,i = sum over the l'/d * l/d pieces of p^cmp_t that lie in block i of l' keys                     (eq. 9)
        K^slc     = keys of the blocks among the n with the highest sum of p^slc over the heads of a group (eq. 10, 11)
        K^win     = the last w keys

    The chosen blocks include the first and the last two of the sequence. phi is the mean of the block, plus an MLP of
    its keys with an embedding of their places. The MLP begins at zero and is shared by key heads. Keys are compressed
    before they are rotated, and have the position of their first token.

    Args:
        embed_dim, num_heads, kv_heads: features of a token, query heads, and key heads; the query heads of a key head
            share a choice. By default as many key heads as query heads.
        block, chosen: l' and n, a power of two from 16 to 256, and the blocks of a query, forced ones included.
        compression, stride: l and d. The stride divides both kinds of blocks.
        window: w.
        first, last: blocks that are always chosen, of the beginning and up to the query's own.
        value_dim: features of a value; by default as of a key. The paper has 128 and 192.
        qk_norm: normalise the features of queries and keys, with learned weights, before they are rotated.
        head_dim, bias, rotary, scale, backend: as for `nn.SparseSelfAttention`.

    The choice has no gradient; the compression learns from the compressed branch, without an auxiliary loss.

    Source: Yuan et al., 2025, arXiv 2502.11089, section 3; its own sizes are the defaults.
    """

    pairs = 3

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, *, block: int = 64, chosen: int = 16,
        compression: int = 32, stride: int = 16, window: int = 512, first: int = 1, last: int = 2,
        head_dim: int | None = None, value_dim: int | None = None, bias: bool = False, qk_norm: bool = False,
        rotary: Rotary | None = None, scale: float | None = None, backend: Backend | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, num_heads, kv_heads, head_dim=head_dim, bias=bias, qk_norm=qk_norm, rotary=rotary, scale=scale,
            backend=backend, device=device, dtype=dtype, value_dim=value_dim,
        )  # fmt: skip
        self.block = self.aligned = checked_power(block, "block")
        check_at_least_one(chosen=chosen, compression=compression, stride=stride, window=window, last=last)
        if block % stride or compression % stride:
            raise ValueError(
                f"stride must divide block and compression, {block} and {compression} tokens; got {stride}."
            )
        if integer(first, "first", "blocks") < 0 or first + last > chosen:
            raise ValueError(f"chosen must be at least first + last, {first} and {last} blocks; got {chosen}.")
        self.chosen, self.compression, self.stride, self.window = chosen, compression, stride, window
        self.first, self.last, self.unrotated = first, last, self.kv_heads
        self.places, self.compress = nn.ParameterList(), nn.ModuleList()
        for dim in (self.head_dim, self.value_dim):
            self.places.append(nn.Parameter(torch.zeros(compression, dim, device=device, dtype=dtype)))
            mlp = nn.Sequential(
                nn.Linear(compression * dim, dim, device=device, dtype=dtype), nn.GELU(),
                nn.Linear(dim, dim, device=device, dtype=dtype),
            )  # fmt: skip
            for parameter in mlp[2].parameters():
                nn.init.zeros_(parameter)
            self.compress.append(mlp)
        self.gate = nn.Linear(embed_dim, 3 * num_heads, device=device, dtype=dtype)

    def kept(self, capacity: int) -> dict[str, tuple[int, int, int]]:
        shape = self.kv_heads, ended(capacity, self.compression, self.stride)
        return {"k_blocks": (*shape, self.head_dim), "v_blocks": (*shape, self.value_dim)}

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: SelectionCache | None
    ) -> Tensor:  # fmt: skip
        k_cmp, k_slc, k_win = k.split(self.kv_heads, 1)
        v_cmp, v_slc, v_win = v.split(self.kv_heads, 1)
        k_blocks, v_blocks = of_blocks(
            lambda k, v, places: (self._compressed_keys(k, places, frame), self._compressed(v, 1)),
            {"k_blocks": k_cmp, "v_blocks": v_cmp}, frame, cache, span=self.compression, step=self.stride,
        )  # fmt: skip
        blocks = ended(frame.k_len, self.compression, self.stride)
        compressed, lse = over_past(
            q, k_blocks, v_blocks, frame, self.how, blocks=blocks, span=self.compression, step=self.stride
        )
        index = self.choice(q, k_blocks[:, :, :blocks], lse, frame)
        selected = over_chosen(q, k_slc, v_slc, index, frame, self.how, span=self.block)
        near = over_near(q, k_win, v_win, frame, self.how, window=self.window)
        return gated_sum(self.gate(x), compressed, selected, near)

    def choice(self, q: Tensor, k_blocks: Tensor, lse: Tensor, frame: Frame) -> Tensor:
        """The chosen blocks of each query, `[B, Hkv, N, n]`, from the weights of the compressed branch."""
        blocks = -(-frame.k_len // self.block)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        pool = Pool(blocks, self.block // self.stride, self.compression // self.stride)
        compressed = candidates_of(frame, self.compression, step=self.stride, whole=True)
        return best_blocks(
            lambda rows: summed(q, k_blocks, lse, compressed, rows, scale=scale, pool=pool),
            candidates_of(frame, self.block), blocks=blocks, k=self.chosen, first=self.first, last=self.last,
            per_row=held(q, k_blocks, pool),
        )  # fmt: skip

    def _compressed(self, x: Tensor, which: int) -> Tensor:
        """One row for each block of `x [B, Hkv, n, l, D]`."""
        mlp: Tensor = self.compress[which]((x + self.places[which].to(x.dtype)).flatten(3))
        return x.mean(3) + mlp

    def _compressed_keys(self, x: Tensor, places: Tensor, frame: Frame) -> Tensor:
        rows, rotation = self._compressed(x, 0), self.rotation(frame, places)
        return rows if rotation is None else rotate(rows, rotation)
