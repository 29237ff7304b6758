"""FlashInfer's calls by its documentation, on the CPU."""

from itertools import pairwise

import torch

from experiments.benchmarks.speed.peers import flashinfer


def attend(q, k, v, *, causal):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    live = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    live = live.tril(k.shape[1] - q.shape[1]) if causal else live
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~live, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


class Wrapper:
    def __init__(self, workspace, kv_layout="NHD", *, backend="auto", use_tensor_cores=False):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and backend in ("auto", "cake")


class BlockSparse(Wrapper):
    def plan(self, indptr, indices, M, N, R, C, heads, kv_heads, dim, *, causal, q_data_type, o_data_type):
        assert indptr.dtype == indices.dtype == torch.int32 and len(indptr) == M // R + 1
        assert q_data_type == o_data_type and int(indptr[-1]) == len(indices) and int(indices.max()) < N // C
        self.rows = [indices[begin:end].long() for begin, end in pairwise(indptr)]
        self.sizes, self.shapes, self.causal = (R, C), ((M, heads, dim), (N, kv_heads, dim)), causal

    def run(self, q, k, v):
        assert (q.shape, k.shape) == self.shapes and all(x.is_contiguous() and not x.requires_grad for x in (q, k, v))
        k, v = (x.unflatten(0, (-1, self.sizes[1])) for x in (k, v))
        rows = zip(q.split(self.sizes[0]), self.rows, strict=True)
        return torch.cat([attend(x, k[row].flatten(0, 1), v[row].flatten(0, 1), causal=self.causal) for x, row in rows])


class VariableBlockSparse(Wrapper):
    def plan(self, layout, row_sizes, col_sizes, heads, kv_heads, dim, *, causal, q_data_type):
        assert layout.dtype == torch.bool and len(layout) == kv_heads and row_sizes.shape == layout.shape[:2]
        self.layout, self.size, self.causal = layout, int(row_sizes[0, 0]), causal
        assert (row_sizes == self.size).all() and (col_sizes == self.size).all()

    def run(self, q, k, v):
        found = []
        for q_head, k_head, v_head, layout in zip(q.chunk(len(k)), k, v, self.layout, strict=True):
            keys = layout.repeat_interleave(self.size, 1)
            rows = zip(q_head.transpose(0, 1).split(self.size), keys, strict=True)
            out = [attend(x, k_head[live][:, None], v_head[live][:, None], causal=self.causal) for x, live in rows]
            found.append(torch.cat(out).transpose(0, 1))
        return torch.cat(found)


class PagedDecode(Wrapper):
    def plan(self, indptr, indices, last, heads, kv_heads, dim, page, *, q_data_type, q_len_per_req):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32 and len(last) == len(indptr) - 1
        self.rows = [indices[begin:end].long() for begin, end in pairwise(indptr)]
        self.lengths = [page * (len(row) - 1) + int(tokens) for row, tokens in zip(self.rows, last)]
        self.new, self.shape = q_len_per_req, (page, kv_heads, dim)

    def run(self, q, caches):
        assert all(cache.shape[1:] == self.shape for cache in caches)
        found = []
        for x, row, length in zip(q.split(self.new), self.rows, self.lengths, strict=True):
            k, v = (cache[row].flatten(0, 1)[:length] for cache in caches)
            found.append(attend(x, k, v, causal=self.new > 1))
        return torch.cat(found)


def single_decode(q, k, v, kv_layout, use_tensor_cores):
    assert kv_layout == "HND"
    return attend(q[None], k.transpose(0, 1), v.transpose(0, 1), causal=False)[0]


PACKAGE = flashinfer.Package(BlockSparse, VariableBlockSparse, PagedDecode, single_decode)
