import numpy as np
import torch

from experiments.pathx.data.packing import LEVELS

SIDE = 16


def image(seed, *, lit=0.4, side=SIDE):
    rng = np.random.default_rng(seed)
    return (rng.integers(1, 256, (side, side)) * (rng.random((side, side)) < lit)).astype(np.uint8)


def knights(y, x, other_y, other_x):
    dy, dx = (y - other_y).abs(), (x - other_x).abs()
    return (dy * dx == 2) | (dy + dx == 0)


def pairs_live(relation, y, x, other_y, other_x):
    dy, dx, numbers = abs(y - other_y), abs(x - other_x), relation.numbers
    if relation.kind == "dense":
        return True
    if relation.kind == "own":
        return (dy, dx) in ((0, 0), (1, 2), (2, 1))
    if relation.kind == "near":
        return max(dy, dx) <= numbers[0]
    if relation.kind == "rows":
        return dy <= numbers[0]
    if relation.kind == "columns":
        return dx <= numbers[0]
    if relation.kind == "axial":
        return min(dy, dx) <= numbers[0]
    cell = numbers[0]
    differ = [a // cell ^ b // cell for a, b in ((y, other_y), (x, other_x))]
    if relation.kind == "butterfly":
        return all(bin(each).count("1") <= 1 for each in differ)
    assert relation.kind == "factor"
    return all(each in (0, numbers[1]) for each in differ)


def expected(packed, relation, row=0):
    """The dense mask of a row of a batch, `[N, N]` in stored order, pair by pair."""
    ids, y, x = packed.ids[row].tolist(), packed.y[0].tolist(), packed.x[0].tolist()
    rows_blocks = packed.ids.shape[1] // packed.block
    owner = {}
    for number, blocks in enumerate(packed.blocks.tolist()):
        owner |= {block: number for block in blocks if block < packed.ids.size // packed.block}
    of_token = [owner.get(row * rows_blocks + token // packed.block) for token in range(len(ids))]

    def is_live(q, k):
        if ids[q] < 0 or ids[k] < 0 or of_token[q] != of_token[k]:
            return False
        return ids[q] >= LEVELS or ids[k] >= LEVELS or pairs_live(relation, y[q], x[q], y[k], x[k])

    return torch.tensor([[is_live(q, k) for k in range(len(ids))] for q in range(len(ids))])


def in_stored_order(batch, layer):
    mask, name = batch.masks[layer], batch.layer_orders[layer]
    dense = mask.to_dense()[0, 0]
    if name == "hilbert":
        return dense
    inverse = batch.orders[name].inverse
    return dense[inverse][:, inverse]
