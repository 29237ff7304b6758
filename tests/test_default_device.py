"""The meta device stands for a GPU: its tensors do not mix with the CPU's."""

import dataclasses

import numpy as np
import pytest
import torch

from experiments.benchmarks.patterns.catalogue import PATTERNS
from sparseflash import BlockMask, analysis, attention, clear_caches, interop, masks
from sparseflash.decode import attention_with_cache, choose_pages
from sparseflash.grouped import selected_attention
from sparseflash.masks.block_index import mask_of_queries
from sparseflash.varlen import attention_varlen, varlen_mask

ELSEWHERE = torch.device("meta")


# ---------------------------------------------------------------------- what makes masks


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_is_the_same_mask_on_the_cpu(pattern):
    want = pattern.build(1024, 32)
    clear_caches()
    with ELSEWHERE:
        got = pattern.build(1024, 32)
    assert got.device.type == "cpu" and got == want


def tiles_of_a_list():
    i = torch.tensor([0, 2, 1], device="cpu")
    live = torch.ones(1, 16, 16, dtype=torch.bool, device="cpu").tril()
    return BlockMask.from_tiles(i, i, 40, block=16, tile=(i == 2).int(), live=live)


CONSTRUCTORS = {
    "dense": lambda: BlockMask.dense(100, 40, block=16),
    "from_dense": lambda: BlockMask.from_dense(torch.eye(40, dtype=torch.bool, device="cpu"), block=16),
    "from_dense, array": lambda: BlockMask.from_dense(np.eye(40, dtype=bool), block=16),
    "from_dense, list": lambda: BlockMask.from_dense([[True, False], [True, True]], block=16),
    "from_layout": lambda: BlockMask.from_layout(np.eye(3, dtype=bool), block=16, q_len=40, k_len=40),
    "from_function": lambda: BlockMask.from_function(lambda q, k: k <= q, 100, block=32),
    "from_function, candidates": lambda: BlockMask.from_function(
        lambda q, k: k <= q, 100, block=32, candidates=lambda i, j: j <= i
    ),
    "from_tiles": tiles_of_a_list,
    "from_block_index": lambda: BlockMask.from_block_index(
        torch.tensor([[0, 1], [1, -1]], device="cpu"),
        torch.tensor([2, 1], device="cpu"),
        block=32,
        q_len=40,
        causal=True,
    ),
    "lists of queries": lambda: mask_of_queries(
        torch.zeros(1, 2, 9, 2, dtype=torch.int32, device="cpu"), 16, 16, 9, True
    ),
    "packed sequences": lambda: varlen_mask([0, 9, 60], [0, 20, 61], pattern=masks.causal),
    "with_lengths": lambda: BlockMask.dense(64, block=32).with_lengths([40, 64]),
    "per_head": lambda: masks.per_head([masks.causal(100, block=32), masks.local(100, window=9, block=32)]),
    "per_batch": lambda: masks.per_batch([masks.causal(100, block=32), masks.local(100, window=9, block=32)]),
    "text": lambda: masks.with_text(masks.local(100, window=9, block=32), text=20),
    "an order": lambda: masks.neighborhood((8, 8), window=3, order=masks.order.morton((8, 8)), block=16),
    "documents of other keys": lambda: masks.documents([3, 50, 20], [40, 5, 9], causal=True, block=16),
    "global tokens": lambda: masks.longformer(200, window=9, global_tokens=[3, 70], block=16),
    "lists of slashes": lambda: masks.vertical_slash(200, vertical=[3, 70], slash=[0, 20], block=16),
}


@pytest.mark.parametrize("build", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_a_constructor_makes_the_same_mask_on_the_cpu(build):
    want = build()
    clear_caches()
    with ELSEWHERE:
        got = build()
    assert got.device.type == "cpu" and got == want


def test_orders_lie_on_the_cpu():
    def orders():
        some = [masks.order.row_major((6, 8)), masks.order.morton((6, 8)), masks.order.hilbert((6, 8))]
        some += [masks.order.tiles((6, 8), (2, 4)), masks.order.residues((6, 8), 2)]
        return some + [masks.order.inverse(order) for order in some]

    with ELSEWHERE:
        got = orders()
    assert all(order.device.type == "cpu" for order in got)
    assert all(map(torch.equal, got, orders()))


# ---------------------------------------------------------------------- what is done with them


def many():
    rng = np.random.default_rng(0)
    dense = rng.random((2, 2, 100, 100)) < 0.5
    dense[:, 0, :32, :32], dense[:, :, 48:64], dense[1, 1] = True, False, np.tri(100, dtype=bool)
    return BlockMask.from_dense(dense, block=16).with_lengths([70, 100])


def chosen():
    scores = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 4, 4)))
    return masks.top_k_blocks(scores, k=2, q_len=128, block=32, causal=True)


def window():
    return masks.local(300, window=40, causal=True, block=32)


def whole():
    return BlockMask.from_layout(np.tri(3, dtype=bool), block=128)


def saved(mask, folder):
    mask.save(folder / "mask")
    return BlockMask.load(folder / "mask")


def drawn(mask, folder):
    figure = mask.plot(elements=False), mask.plot(elements=True)
    return [[axes.get_title() for axes in each.axes] for each in figure if each.canvas.draw() is None]


def attended(mask, folder):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 2, 2, mask.q_len, 16)))
    return attention(*x, mask, backend="blockwise")


METHODS = {
    "T": lambda mask, folder: mask.T,
    "bake_lengths": lambda mask, folder: mask.bake_lengths(),
    "blocks": lambda mask, folder: mask.blocks,
    "canonical": lambda mask, folder: mask.canonical(),
    "columns": lambda mask, folder: mask.columns,
    "crop": lambda mask, folder: (mask.crop(q=(7, 60), k=(7, 80)), mask.crop(q=(32, None))),
    "density": lambda mask, folder: mask.density,
    "device": lambda mask, folder: mask.device,
    "digest": lambda mask, folder: mask.digest,
    "load": saved,
    "nbytes": lambda mask, folder: mask.nbytes,
    "permute": lambda mask, folder: mask.permute(list(reversed(range(mask.q_len)))),
    "plot": drawn,
    "reblock": lambda mask, folder: (mask.reblock(64), mask.reblock((16, 32))),
    "save": saved,
    "select": lambda mask, folder: (mask.select(heads=[1, 0]), mask.select(batch=slice(0, 1), heads=0)),
    "shape": lambda mask, folder: mask.shape,
    "to": lambda mask, folder: mask.to("cpu"),
    "to_dense": lambda mask, folder: mask.to_dense(),
    "to_layout": lambda mask, folder: mask.to_layout(),
    "to_string": lambda mask, folder: mask.to_string(40),
    "transpose": lambda mask, folder: mask.transpose(),
    "validate": lambda mask, folder: mask.validate(),
    "with_lengths": lambda mask, folder: mask.with_lengths([50]) if mask.shape[0] == 1 else mask,
    "operators": lambda mask, folder: (mask & mask.T, mask | mask.T, mask ^ mask.T, mask - mask.T, ~mask),
    "repr": lambda mask, folder: (repr(mask), mask._repr_html_(), hash(mask)),
    "attention": attended,
}
ANALYSES = {
    "balance": lambda mask, folder: analysis.balance(mask),
    "bytes_moved": lambda mask, folder: analysis.bytes_moved(mask, 64),
    "coarsening": lambda mask, folder: analysis.coarsening(mask),
    "density": lambda mask, folder: analysis.density(mask),
    "diameter": lambda mask, folder: analysis.diameter(mask.T | mask | masks.dense(mask.q_len, block=32)),
    "flops": lambda mask, folder: analysis.flops(mask, 64),
    "layers_to_full_reach": lambda mask, folder: analysis.layers_to_full_reach(mask, causal=True),
    "lint": lambda mask, folder: analysis.lint(
        mask, causal=True, layers=2, orders={"another": masks.order.residues((mask.q_len,), 2)}
    ),
    "reach": lambda mask, folder: (analysis.reach(mask, 2), analysis.reach(mask)),
}
HEAD = {"batch": 0, "head": 1}
NEIGHBOURS = {
    "deepspeed": (whole, lambda mask: interop.to_deepspeed(mask), lambda out, mask: interop.from_deepspeed(*out)),
    "fa4": (
        whole, lambda mask: interop.to_fa4(mask, partial=True),
        lambda out, mask: interop.from_fa4(out.forward, mask.q_len, mask.k_len),
    ),
    "flashinfer": (
        lambda: many().crop(q=(0, 96), k=(0, 96)), lambda mask: interop.to_flashinfer(mask, **HEAD),
        lambda out, mask: (interop.from_flashinfer(*out), interop.from_flashinfer(*out, block=32)),
    ),
    "flashmask": (
        window, lambda mask: interop.to_flashmask(mask), lambda out, mask: interop.from_flashmask(out[0], causal=True)
    ),
    "flex": (many, lambda mask: interop.to_flex(mask), lambda out, mask: interop.from_flex(out)),
    "scipy": (
        lambda: many().crop(q=(0, 96), k=(0, 96)),
        lambda mask: [interop.to_scipy(mask, format=form, **HEAD) for form in ("csr", "bsr")],
        lambda out, mask: interop.from_scipy(out),
    ),
    "sdpa": (many, lambda mask: interop.to_sdpa(mask), lambda out, mask: interop.from_sdpa(out)),
    "torch_sparse": (
        lambda: many().crop(q=(0, 96), k=(0, 96)),
        lambda mask: [interop.to_torch_sparse(mask, layout=x, **HEAD) for x in (torch.sparse_csr, torch.sparse_bsr)],
        lambda out, mask: interop.from_torch_sparse(out),
    ),
}  # fmt: skip


def plain(value):
    if isinstance(value, BlockMask):
        return value.device, value.dynamic, plain(value._arrays())
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, value.shape, value.to_dense().tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return vars(value) if dataclasses.is_dataclass(value) else value


@pytest.mark.parametrize("make", [many, chosen, window])
@pytest.mark.parametrize("use", [*METHODS.values(), *ANALYSES.values()], ids=[*METHODS, *(f"of {a}" for a in ANALYSES)])
def test_what_is_done_with_a_mask_is_the_same(make, use, tmp_path):
    want, mask = use(make(), tmp_path), make()
    with ELSEWHERE:
        got = use(mask, tmp_path)
    assert plain(got) == plain(want)


@pytest.mark.parametrize(("make", "out", "back"), NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_masks_go_to_other_libraries_and_come_back(make, out, back):
    mask = make()
    want = back(out(make()), mask)
    with ELSEWHERE:
        got = back(out(mask), mask)
    assert plain(got) == plain(want)


def test_a_score_mod_is_recognised_or_recorded_on_its_own_device():
    slopes = torch.tensor([0.5, 0.25])
    with ELSEWHERE:
        alibi = interop.from_score_mod(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), 64)
        other = interop.from_score_mod(lambda s, b, h, q, k: torch.where(q % 2 == 0, s, slopes[h] * s), 64)
    assert alibi.kinds == ("distance",) and other.kinds == ("function",)


def decoded(q, k, v):
    lengths, pages = torch.tensor([40, 7], device="cpu"), torch.tensor([[[1, 0]]], device="cpu").expand(2, 2, 2)
    low, high = (x.unflatten(2, (4, 16)).amax(3) for x in (-k, k))
    chosen = choose_pages(q, -low, high, lengths, k=2, page=16)
    return [
        attention_with_cache(q[:, :, :2], k, v, lengths, mask=masks.causal(64, block=16), window=9, sinks=2),
        attention_with_cache(q[:, :, :1], k, v, lengths, starts=lengths // 2, pages=pages, page=16),
        attention_with_cache(q[:, :, :1], k, v, lengths, pages=chosen, page=16),
    ]


OTHER_CALLS = {
    "decoding": decoded,
    "packed sequences": lambda q, k, v: attention_varlen(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), [0, 50, 128], pattern=masks.causal
    ),
    "lists of groups": lambda q, k, v: selected_attention(
        q, k, v, torch.zeros(2, 64, 1, dtype=torch.int32, device="cpu"), span=16, backend="blockwise"
    ),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_other_attentions_are_the_same(call):
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, heads, 64, 16))) for heads in (4, 2, 2))
    want = call(q, k, v)
    clear_caches()
    with ELSEWHERE:
        got = call(q, k, v)
    assert plain(got) == plain(want)


def public(names, of):
    return {name for name in names if callable(getattr(of, name)) and not isinstance(getattr(of, name), type)}


def test_every_public_function_is_tried_here():
    constructors = {name.split(",")[0] for name in CONSTRUCTORS}
    mine = {name for name in vars(BlockMask) if not name.startswith("_")}
    defaults = {"dynamic", "lengths", "q_lengths", "k_lengths", "words"}
    assert mine - METHODS.keys() - constructors - defaults == set()
    assert public(analysis.__all__, analysis) == ANALYSES.keys()
    ways = {f"{way}_{name}" for way in ("to", "from") for name in NEIGHBOURS}
    assert public(interop.__all__, interop) == ways | {"from_score_mod"}
