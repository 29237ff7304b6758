"""LogSparse: keys at exponentially growing distances."""

from __future__ import annotations

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import Block, token_counts
from sparseflash.masks.tiling.arguments import at_least
from sparseflash.masks.tiling.diagonals import diagonals
from sparseflash.masks.tiling.signatures import pattern


@pattern
def log_sparse(q_len: int, *, window: int = 1, restart: int | None = None, block: Block = 128) -> BlockMask:
    """The `window` latest keys, and the keys 1, 2, 4, 8, ... tokens before them: about log2(q_len) keys a query.

    >>> log_sparse(1_048_576)
    BlockMask(1048576 x 1048576, blocks of 128, 106497 tiles: 0 full + 106497 partial (3 distinct), density 0.00191 %)

    Score (q, k), with the distance `d = q - k`, or `d = (q - k) % restart` if there is a `restart`, is live iff

        k <= q  and  (d < window  or  d - window + 1 is a power of two)

    With the defaults `q - k` is zero or a power of two, and every query is influenced by every earlier key after
    `ceil(log2 q_len)` layers. `restart` is the paper's restart attention, which adds keys far away.

    Source: LogSparse Transformer (Li et al., 2019), section 4.2 and figure 3. Reimplementations let the first queries
    see all of their past, which is not part of the rule and is left out here.

    Args:
        q_len: tokens.
        window: the number of latest keys, the paper's local attention (about log2 of the length there).
        restart: tokens after which the pattern begins again.
        block: tokens per side of a tile.

    Each distance adds two tiles to a block row (the same two at any length), so if `restart` is far below the length
    most tiles are live. Raises ValueError if `window` is not positive or `restart` is below `window`.

        default              window 2             restart 4
        X . . . . . .        X . . . . . .        X . . . . . .
        X X . . . . .        X X . . . . .        X X . . . . .
        X X X . . . .        X X X . . . .        X X X . . . .
        . X X X . . .        X X X X . . .        . X X X . . .
        X . X X X . .        . X X X X . .        X . X X X . .
        . X . X X X .        X . X X X X .        X X . X X X .
        . . X . X X X        . X . X X X X        X X X . X X X
    """
    q_len, _ = token_counts(q_len, q_len)
    window = at_least(1, window, "window", "keys")
    distance = torch.arange(q_len, device="cpu")
    if restart is not None:
        distance = distance % at_least(window, restart, "restart", "tokens")
    beyond = distance - window + 1
    live = (beyond <= 0) | (beyond & (beyond - 1) == 0)
    return diagonals(live.nonzero()[:, 0], q_len, block=block)
