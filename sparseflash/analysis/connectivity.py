"""Whether information can flow from every token to every other one, given enough layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph

from sparseflash.analysis import bitrows
from sparseflash.analysis.bitrows import Index
from sparseflash.analysis.composition import compose, multiply
from sparseflash.analysis.layers import Element
from sparseflash.analysis.relation import Relation, tiles_of
from sparseflash.analysis.tokens import see_previous
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.walks import walk, words_of

_MOST_EDGES = 1 << 25


@dataclass(frozen=True)
class Gap:
    """Key `key` never influences query `query`; `groups` of tokens, if there are several, exchange nothing at all."""

    query: int
    key: int
    groups: int = 1


def gap(element: Element) -> Gap | None:
    """A pair of tokens that never connects, however often these layers are repeated, or None. If each block's tokens
    are connected by its diagonal tile, the tile graph decides, otherwise the token graph; if that has too many edges,
    relations are composed until nothing changes.
    """
    union = element.union()
    if union.count == 0:
        return None
    if _blocks_are_connected(union):
        return _gap_of_graph(*bitrows.pairs(union.live(), union.count), union.count, union.block)
    live = bitmask.live_scores(union.words).numpy()[union.kind - 1].sum()
    if bitrows.count(union.full, union.count) * union.block**2 + live <= _MOST_EDGES:
        return _gap_of_graph(*_token_edges(union, element.stop), element.stop, 1)
    closure = _closure(union)
    if closure.is_everything():
        return None
    part = tiles_of(closure, element.stop)
    reached = BlockMask._of(element.stop, element.stop, union.block, union.block, [part])
    return _first_gap(reached)


def causal_gap(element: Element) -> Gap | None:
    """The same for causal layers, where only the keys up to a query's own position count.

    No token lies between q - 1 and q. So everything connects iff each query sees the key just before it in some layer.
    """
    sees = torch.zeros(element.stop, dtype=torch.bool, device="cpu")
    sees[:1] = True
    for each in element.walks():
        sees |= see_previous(each)
    missing = (~sees).nonzero()
    return Gap(int(missing[0]), int(missing[0]) - 1) if len(missing) else None


def _gap_of_graph(rows: Index, cols: Index, count: int, unit: int) -> Gap | None:
    """A gap of the graph with an edge from each query node to each key node that it sees; a node is `unit` tokens."""
    graph = sparse.csr_array((np.ones(len(rows), np.int8), (rows, cols)), shape=(count, count))
    groups = csgraph.connected_components(graph, return_labels=False)
    for transposed in (False, True):
        found = csgraph.breadth_first_order(graph.T.tocsr() if transposed else graph, 0, return_predecessors=False)
        if len(found) < count:
            missing = int(np.setdiff1d(np.arange(count), found)[0]) * unit
            return Gap(missing, 0, groups) if transposed else Gap(0, missing, groups)
    return None


def _token_edges(union: Relation, stop: int) -> tuple[Index, Index]:
    i, j, kind, bits = tiles_of(union, stop)
    queries, keys = [], []
    for some in torch.arange(len(i), device="cpu").split(max(1, SCORES_AT_ONCE // union.block**2)):
        live = bitmask.unpack(words_of(kind[some], bits, union.block), union.block)
        tile, a, b = live.nonzero(as_tuple=True)
        queries.append(i[some][tile] * union.block + a)
        keys.append(j[some][tile] * union.block + b)
    return torch.cat(queries).numpy(), torch.cat(keys).numpy()


def _blocks_are_connected(union: Relation) -> bool:
    diagonal = np.unique(union.kind_at(np.arange(union.count) * (union.count + 1)))
    for kind in diagonal[diagonal > 0]:
        words, one = union.words[kind - 1 : kind], torch.zeros(1, dtype=torch.int64, device="cpu")
        for _ in range(union.block.bit_length()):
            words = multiply(words, words, one, one, union.block)
        if not (words == bitmask.full_word(union.block)).all():
            return False
    return True


def _closure(relation: Relation) -> Relation:
    while (squared := compose(relation, relation)) != relation:
        relation = squared
    return relation


def _first_gap(reached: BlockMask) -> Gap:
    tiles = walk(reached, 0)
    live = torch.zeros(reached.blocks[0], dtype=torch.int64, device="cpu").index_add_(0, tiles.rows, tiles.live())
    ends = torch.arange(reached.blocks[0] + 1, device="cpu").mul(reached.block_q).clamp(max=reached.q_len)
    row = int((live < ends.diff() * reached.k_len).nonzero()[0])
    first = int(ends[row])
    query, key = (~reached.crop(q=(first, int(ends[row + 1]))).to_dense()[0, 0]).nonzero()[0].tolist()
    return Gap(first + query, key)
