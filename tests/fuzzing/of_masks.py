from __future__ import annotations

import inspect
import math

import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from sparseflash import BlockMask, attention, interop, masks, scores
from tests.drawn.rule_spellings import BATCH, HEADS, by_numbers, spelled
from tests.fuzzing.of_attention import truth
from tests.fuzzing.values import ANYTHING, NUMBERS, SMALL, TENSORS, device, draws, mostly, outcome, pattern

BUILDERS = {name: getattr(masks, name) for name in masks.__all__ if inspect.isfunction(getattr(masks, name, None))}
TYPICAL = {
    "block": 16, "heads": 2, "k_len": 40, "q_len": 40, "causal": True, "device": "cpu", "shape": (5, 8), "scale": 0.5,
    "lengths": [3, 37], "k_lengths": [3, 37], "mass": 0.5, "scores": torch.ones(3, 3), "attend": "both",
    "masks": [masks.causal(40, block=16)], "indices": torch.zeros(40, 2, dtype=torch.int64), "span": 16, "order": None,
    "q": torch.ones(1, 2, 40, 8), "k": torch.ones(1, 2, 40, 8), "strides": [1, 2], "factors": (2, 2), "offset": 0,
}  # fmt: skip


@st.composite
def builder_calls(draw):
    name = draw(st.sampled_from(sorted(BUILDERS)))
    chosen, fits = {}, draw(st.sampled_from([True, True, False]))
    for parameter in inspect.signature(BUILDERS[name]).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty or draw(st.integers(0, 3 if fits else 1)) == 1:
            typical = st.just(TYPICAL[parameter.name]) if parameter.name in TYPICAL else SMALL
            if name == "top_k_keys" and parameter.name == "scores":
                typical = st.just(torch.ones(40, 40))
            if name.startswith("top_k") and parameter.name == "k":
                typical = SMALL
            mask = st.just(masks.causal(40, block=16))
            wild = st.one_of(typical, typical, SMALL, ANYTHING, TENSORS, mask)
            chosen[parameter.name] = draw(typical if fits else wild)
    return name, chosen


@draws(drawn=builder_calls())
def fuzz_builders(drawn):
    name, chosen = drawn
    kind, found = outcome(lambda: BUILDERS[name](**chosen))
    if kind == "result" and isinstance(found, BlockMask) and found.device.type != "meta":
        found.canonical().validate()
    return kind


METHODS = {
    "from_dense": ("dense", "block"), "from_layout": ("layout", "block", "q_len", "k_len"),
    "from_tiles": ("rows", "cols", "q_len", "k_len", "block", "tile", "live"),
    "from_block_index": ("index", "counts", "block", "q_len", "k_len", "causal", "group"),
    "dense": ("q_len", "k_len", "block"), "with_lengths": ("lengths", "q_lengths", "k_lengths"), "crop": ("q", "k"),
    "select": ("batch", "heads"), "reblock": ("block",), "to": ("device",), "to_string": ("width", "heads", "batch"),
    "transpose": (), "bake_lengths": (), "canonical": (), "validate": (), "to_dense": (), "to_layout": (),
    "__and__": ("other",), "__or__": ("other",), "__eq__": ("other",), "_repr_html_": (), "__repr__": (),
}  # fmt: skip
OWN_MASKS = st.sampled_from(["causal", "local", "random", "nothing", "short", "heads", "meta"])


@st.composite
def fitting_arguments(draw, name, dense):
    block = draw(st.sampled_from([16, 32, (16, 64), (64, 32)]))
    if name in ("from_dense", "dense", "from_layout"):
        q_len, k_len = draw(st.integers(1, 70)), draw(st.integers(1, 70))
        block_q, block_k = block if isinstance(block, tuple) else (block, block)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        live = torch.rand(q_len, k_len, generator=generator) < 0.5
        if name == "from_dense":
            return {"dense": live, "block": block}, live
        if name == "dense":
            return {"q_len": q_len, "k_len": k_len, "block": block}, torch.ones(q_len, k_len, dtype=torch.bool)
        layout = live[: -(-q_len // block_q), : -(-k_len // block_k)]
        scores_ = layout.repeat_interleave(block_q, 0).repeat_interleave(block_k, 1)[:q_len, :k_len]
        return {"layout": layout, "block": block, "q_len": q_len, "k_len": k_len}, scores_
    if name == "from_tiles":
        cells = sorted(draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)))))
        rows, cols = [row for row, _ in cells], [col for _, col in cells]
        expected = torch.zeros(48, 48, dtype=torch.bool)
        for row, col in cells:
            expected[16 * row : 16 * row + 16, 16 * col : 16 * col + 16] = True
        named = {"rows": rows, "cols": cols, "q_len": 40, "k_len": 45, "block": 16, "tile": None, "live": None}
        return named, expected[:40, :45]
    if name == "from_block_index":
        index = draw(st.lists(st.lists(st.integers(-1, 2), min_size=2, max_size=2), min_size=3, max_size=3))
        return {
            "index": torch.tensor(index), "block": 16, "q_len": 40, "k_len": 45, "causal": draw(st.booleans()),
        }, None  # fmt: skip
    if name in ("__and__", "__or__", "__eq__"):
        other = pattern(draw(st.sampled_from(["causal", "local", "random", "nothing", "short", "heads"])), 40, 40)
        live = {"__and__": torch.logical_and, "__or__": torch.logical_or}.get(name)
        return {"other": other}, None if live is None else live(dense, other.to_dense())
    if name == "crop":
        q, k = (draw(st.tuples(st.integers(0, 19), st.integers(20, 40))) for _ in range(2))
        return {"q": q, "k": k}, dense[..., slice(*q), slice(*k)]
    if name == "select":
        heads = draw(st.lists(st.integers(0, dense.shape[1] - 1), min_size=1, max_size=3))
        return {"heads": heads}, dense[:, heads] if dense.shape[1] > 1 else dense
    if name == "with_lengths":
        lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
        inside = torch.arange(40, device=dense.device) < torch.tensor(lengths, device=dense.device)[:, None]
        inside = (inside[:, :, None] & inside[:, None, :])[:, None]
        return {"lengths": lengths}, dense[:, :1] & inside if dense.shape[1] == 1 else dense & inside
    if name == "reblock":
        return {"block": block}, dense
    if name == "to":
        return {"device": device()}, dense
    if name == "to_string":
        return {"width": draw(st.integers(1, 90))}, None
    return {}, {"transpose": dense.mT, "bake_lengths": dense, "canonical": dense}.get(name)


@st.composite
def method_calls(draw):
    name, own = draw(st.sampled_from(sorted(METHODS))), draw(OWN_MASKS)
    if own not in ("meta", "short") and draw(st.booleans()):
        return name, own, *draw(fitting_arguments(name, pattern(own, 40, 40).to_dense()))
    chosen = {}
    for parameter in METHODS[name]:
        if parameter == "other":
            chosen[parameter] = draw(st.builds(pattern, OWN_MASKS, st.just(40), st.sampled_from([40, 41])) | ANYTHING)
        elif draw(st.integers(0, 2)):
            typical = st.just(TYPICAL[parameter]) if parameter in TYPICAL else TENSORS
            pairs = st.tuples(NUMBERS | st.none(), NUMBERS | st.none())
            chosen[parameter] = draw(st.one_of(typical, SMALL, ANYTHING, TENSORS, pairs, st.lists(SMALL, max_size=3)))
    for parameter in inspect.signature(getattr(BlockMask, name)).parameters.values():
        if parameter.default is parameter.empty and parameter.name in METHODS[name]:
            chosen.setdefault(parameter.name, TYPICAL.get(parameter.name, torch.ones(3, 3, dtype=torch.bool)))
    return name, own, chosen, None


@draws(drawn=method_calls())
def fuzz_methods(drawn):
    name, own, chosen, expected = drawn
    others = [chosen[parameter] for parameter in METHODS[name] if parameter == "other"]
    subject = pattern(own, 40, 40)
    kind, found = outcome(lambda: getattr(subject, name)(*others, **({} if others else chosen)))
    assert kind == "result" or expected is None, found
    if kind == "result" and isinstance(found, BlockMask) and found.device.type != "meta":
        found.canonical().validate()
        if expected is not None:
            assert found.to_dense().cpu().equal(expected.expand(found.to_dense().shape).cpu())
    return kind


@st.composite
def raw_arrays(draw):
    mask = pattern(draw(OWN_MASKS.filter(lambda name: name != "meta")), 40, 40)
    names = ["q_len", "k_len", "block_q", "block_k", "indptr", "indices", "tile", "bits", "pattern", "lengths"]
    fields = {name: getattr(mask, name) for name in names}
    if draw(st.integers(0, 2)):
        live = torch.rand(40, 40, generator=torch.Generator().manual_seed(draw(st.integers(0, 10**6)))) < 0.3
        mask = BlockMask.from_dense(live, block=draw(st.sampled_from([16, (16, 32), 64])))
        return {name: getattr(mask, name) for name in fields}
    for name in draw(st.sets(st.sampled_from(sorted(fields)), min_size=1, max_size=2)):
        old = fields[name]
        changes = [
            ANYTHING,
            TENSORS,
            TENSORS.map(lambda x: x.to(torch.int32) if x.layout == torch.strided and not x.is_complex() else x),
        ]
        if isinstance(old, torch.Tensor) and old.numel():
            changes.append(
                st.sampled_from([-(2**31), -1, 0, 1, 2, 99, 2**31 - 1]).map(lambda n, old=old: written(old, n))
            )
        fields[name] = draw(st.one_of(changes))
    return fields


def written(old, number):
    changed = old.clone()
    changed.view(-1)[changed.numel() // 2] = number
    return changed


@draws(fields=raw_arrays())
def fuzz_arrays(fields):
    kind, found = outcome(lambda: BlockMask(**fields))
    if kind == "refused" or found.device.type == "meta":
        return kind
    kind, found = outcome(found.validate)
    if kind == "refused":
        return kind
    found = found.to(device())
    q = torch.randn(found.shape[0], found.shape[1], found.q_len, 16, device=device())
    k = torch.randn(found.shape[0], found.shape[1], found.k_len, 16, device=device())
    torch.testing.assert_close(
        attention(q, k, k, found), truth(q, k, k, found.to_dense()).float(), atol=1e-4, rtol=1e-4
    )
    return kind


FROM = {
    "from_sdpa": ("attn_mask", "q_len", "k_len", "block"), "from_torch_sparse": ("matrix", "block"),
    "from_scipy": ("matrix", "block"), "from_deepspeed": ("layout", "block"),
    "from_flashmask": ("startend_row_indices", "causal", "q_len", "heads", "block"),
    "from_flashinfer": ("indptr", "indices", "M", "N", "R", "C", "mask", "block"),
    "from_fa4": ("tensors", "q_len", "k_len"), "from_flex": ("block_mask", "batch", "heads"),
}  # fmt: skip
NEEDED = {"causal", "M", "N", "R", "C", "indices"}


@st.composite
def conversions(draw):
    if draw(st.booleans()):
        name = draw(st.sampled_from([n for n in interop.__all__ if n.startswith("to_")]))
        mask = st.builds(pattern, OWN_MASKS, st.just(40), st.sampled_from([40, 64]))
        return name, [draw(mask if draw(st.integers(0, 3)) else ANYTHING)], {}
    name = draw(st.sampled_from(sorted(FROM)))
    _, *rest = FROM[name]
    value = draw(TENSORS | ANYTHING)
    named = {r: draw(st.one_of(SMALL, ANYTHING, TENSORS)) for r in rest if r in NEEDED or draw(st.booleans())}
    if name in ("from_fa4",):
        named = {"q_len": 40, "k_len": 40} | named
    if name == "from_deepspeed":
        named.setdefault("block", 16)
    return name, [value], named


@draws(drawn=conversions())
def fuzz_interop(drawn):
    name, positional, named = drawn
    kind, found = outcome(lambda: getattr(interop, name)(*positional, **named))
    if kind == "result" and isinstance(found, BlockMask) and found.device.type != "meta":
        found.validate()
    return kind


@draws(rule=spelled(20), sizes=st.tuples(*[st.integers(1, n) for n in (BATCH, HEADS, 20, 20)]),
       block=mostly([16, (16, 32)], [3]),
       use=st.sampled_from(["from_function", "from_flex", "to_flashmask", "function", "from_score_mod"]))  # fmt: skip
def fuzz_rules(rule, sizes, block, use):
    batch, heads, *lengths = sizes
    if use in ("function", "from_score_mod"):
        return fuzz_conditions(rule, sizes, use)

    def call():
        if use == "from_flex":
            made = create_block_mask(rule, batch, heads, *lengths, device="cpu", BLOCK_SIZE=block)
            return interop.from_flex(made)
        mask = BlockMask.from_function(rule, *lengths, batch=batch, heads=heads, block=block)
        if use == "to_flashmask":
            found = interop.to_flashmask(mask)
            return interop.from_flashmask(*found[:1], causal=found.causal, q_len=lengths[0], block=block)
        return mask

    try:
        kind, mask = outcome(call)
    except AssertionError:
        if use == "from_flex" and not rule.is_mapped:
            return "refused"
        raise
    if kind == "result":
        assert torch.equal(mask.to_dense().expand(*sizes), by_numbers(rule, *sizes))
    else:
        assert block == 3 or use in ("to_flashmask", "from_flex"), mask
    return kind


def fuzz_conditions(rule, sizes, use):
    batch, heads, q_len, k_len = sizes
    q, k, v = (torch.randn(batch, heads, n, 8, dtype=torch.float64) for n in (q_len, k_len, k_len))
    change = lambda s, b, h, q, k: torch.where(torch.as_tensor(rule(b, h, q, k)), s, 0.5 - s)  # noqa: E731

    def call():
        made = scores.function(change) if use == "function" else interop.from_score_mod(change, q_len, k_len)
        return attention(q, k, v, scores=made, backend="blockwise")

    kind, found = outcome(call)
    if kind == "result":
        products = q @ k.mT / math.sqrt(8)
        changed = torch.where(by_numbers(rule, *sizes), products, 0.5 - products)
        torch.testing.assert_close(found, changed.softmax(-1) @ v)
    else:
        assert use == "from_score_mod" or not rule.is_mapped, found
    return kind
