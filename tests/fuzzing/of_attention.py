from __future__ import annotations

import inspect
import math

import numpy as np
import torch
from hypothesis import strategies as st

import sparseflash
from sparseflash import attention, decode, masks, nn, scores
from tests.compared.minus_inf import KINDS as MINUS_INF
from tests.compared.minus_inf import Case
from tests.fuzzing.values import (
    ANYTHING,
    DTYPES,
    FILLS,
    FLOATS,
    LAYOUTS,
    NUMBERS,
    ODD,
    SMALL,
    TENSORS,
    device,
    draws,
    mostly,
    outcome,
    pattern,
    tensor,
)

# The last size of each does not fit.
SIZES = {"batch": [1, 2, 3, 0], "heads": [1, 2, 4, 3, 0], "tokens": [17, 1, 40, 16, 64, 0], "dim": [16, 8, 1, 24, 0]}


@st.composite
def attention_inputs(draw):
    fits = draw(st.booleans())
    pick = lambda name: draw(st.sampled_from(SIZES[name][: -1 if fits else None]))  # noqa: E731
    batch, kv_heads, q_len, k_len, dim = pick("batch"), pick("heads"), pick("tokens"), pick("tokens"), pick("dim")
    heads = kv_heads * draw(st.sampled_from([1, 1, 2, 3]))
    dtype = draw(st.sampled_from(FLOATS))
    specs = [
        {"shape": [batch, heads, q_len, dim]},
        {"shape": [batch, kv_heads, k_len, dim]},
        {"shape": [batch, kv_heads, k_len, draw(st.sampled_from([dim, 5]))]},
    ]
    for spec in specs:
        spec |= {"dtype": dtype, "grad": draw(st.booleans()), "seed": draw(st.integers(0, 9))}
        spec["layout"] = draw(st.sampled_from(["plain", "plain", *LAYOUTS[:7]]))
        spec["fill"] = draw(st.sampled_from(["normal", "normal", "normal", *FILLS]))
    wrong = "nothing" if fits else draw(st.sampled_from(["nothing", "nothing", "rank", "size", "dtype", "layout"]))
    spec = draw(st.sampled_from(specs))
    if wrong == "rank":
        spec["shape"] = draw(st.lists(st.integers(0, 3), max_size=6))
    elif wrong == "size":
        spec["shape"][draw(st.integers(0, 3))] = draw(st.integers(0, 5))
    elif wrong == "dtype":
        spec["dtype"] = draw(st.sampled_from(DTYPES))
    elif wrong == "layout":
        spec["layout"] = draw(st.sampled_from(LAYOUTS))
    if not fits and draw(st.integers(0, 9)) == 0:
        for each in specs:
            each["layout"] = "meta"
    return specs, 99 if fits else draw(st.integers(0, 15)), draw(ODD)


def built(specs, odd_place, odd):
    made = [tensor(**spec) for spec in specs]
    if 0 <= odd_place < 3:
        made[odd_place] = odd
    return made


# Beyond it `attention` promises no finite gradients: roundings of exp(score - lse), 2^-20 of lse, may be a factor of e.
LARGEST_IN_HALF = 2.0**20


def are_plain(inputs, specs, scale=None):
    return (
        all(isinstance(x, torch.Tensor) and x.device.type == device().type for x in inputs)
        and all(spec["fill"] in ("normal", "zero") for spec in specs)
        and (inputs[0].dtype.itemsize > 2 or largest_score(*inputs[:2], scale) < LARGEST_IN_HALF)
    )


def factor_of(q, scale):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def largest_score(q, k, scale):
    lengths = (x.detach().as_subclass(torch.Tensor).double().norm(dim=-1).flatten().tolist() for x in (q, k))
    return abs(factor_of(q, scale)) * math.prod(max([1.0, *each]) for each in lengths)


def truth(q, k, v, live, scale=None):
    q, k, v = (x.detach().as_subclass(torch.Tensor).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) if k.shape[1] else x for x in (k, v))
    products = (q @ k.mT * factor_of(q, scale)).masked_fill(~live, -math.inf)
    return products.softmax(-1).nan_to_num(0.0) @ v


def check_attention(inputs, specs, result, live, scale=None, dropped=False):
    q, k, v = inputs
    assert result.shape == (*q.shape[:-1], v.shape[-1]) and result.dtype == q.dtype
    known = are_plain(inputs, specs, scale)
    if known and not dropped:
        expected = truth(q, k, v, live, scale)
        allowed = {torch.float64: 1e-9, torch.float32: 1e-4}.get(q.dtype, 0.06) * max(1.0, abs(scale or 1.0))
        assert torch.allclose(result.detach().as_subclass(torch.Tensor).double(), expected, atol=allowed, rtol=allowed)
    leaves = [x for x in inputs if x.requires_grad]
    assert result.requires_grad == bool(leaves)
    if leaves and all(not x.is_inference() for x in inputs):
        with np.errstate(over="ignore", invalid="ignore"):
            gradients = torch.autograd.grad(result.sum(), leaves)
        for x, gradient in zip(leaves, gradients):
            assert gradient.shape == x.shape
            if known:
                assert bool(gradient.isfinite().all())


PATTERNS = mostly(
    ["none", "causal", "local", "random", "nothing", "short"], ["heads", "longer", "meta", "tensor", "text"]
)
SCALES = mostly([None, 0.3, 0.0, -0.5, 1], [math.nan, math.inf, 1e30, "16", 2**70, (), object, torch.tensor(0.5), True])
DROPOUTS = mostly([0.0, 0.0, 0.5, 0], [0.999, 1.0, -0.1, math.nan, 1, "0.5", None])
BACKENDS = mostly([None, "blockwise", "reference"], ["nonsense", "hopper", "triton", 3])
SEEDS = mostly([None, 3, -1, 2**63 - 1], [2**63, -(2**63), "1", 0.5, True, torch.tensor(3), torch.tensor([1, 2])])


def sizes_of(inputs):
    return [x.shape[2] if isinstance(x, torch.Tensor) and x.ndim == 4 else 5 for x in inputs[:2]]


@draws(drawn=attention_inputs(), mask=PATTERNS, scale=SCALES, dropout=DROPOUTS, backend=BACKENDS, seed=SEEDS,
       lse=st.booleans())  # fmt: skip
def fuzz_attention(drawn, mask, scale, dropout, backend, seed, lse):
    specs, *odd = drawn
    inputs = built(specs, *odd)
    mask = pattern(mask, *sizes_of(inputs))
    named = {"scale": scale, "dropout_p": dropout, "backend": backend, "seed": seed, "return_lse": lse}
    kind, found = outcome(lambda: attention(*inputs, mask, **named))
    if kind == "refused":
        return kind
    out = found[0] if lse else found
    live = torch.ones((), dtype=torch.bool, device=device())
    if mask is not None and mask.device.type != "meta":
        live = mask.to_dense()
    check_attention(inputs, specs, out, live, scale, dropped=dropout != 0)
    return kind


MASK_SHAPES = mostly(["empty", "empty", "empty", "square", "keys", "each"], ["wrong", "scalar"])


@draws(drawn=attention_inputs(), shape=MASK_SHAPES, dtype=mostly([torch.bool, torch.float32], DTYPES),
       fill=mostly(["normal", "zero"], FILLS), layout=mostly(["plain", "transposed"], LAYOUTS),
       causal=mostly([False, True], [1, None, "yes"]), gqa=mostly([True], [False]))  # fmt: skip
def fuzz_sdpa(drawn, shape, dtype, fill, layout, causal, gqa):
    specs, *odd = drawn
    inputs = built(specs, *odd)
    q_len, k_len = sizes_of(inputs)
    sizes = {"square": (q_len, k_len), "keys": (1, 1, 1, k_len), "each": (1, 1, q_len, k_len), "wrong": (q_len + 1, 2),
             "scalar": (), "empty": None}[shape]  # fmt: skip
    mask = None if sizes is None else tensor(sizes, dtype, layout, fill)
    kind, found = outcome(lambda: sparseflash.sdpa(*inputs, attn_mask=mask, is_causal=causal, enable_gqa=gqa))
    if kind == "refused":
        return kind
    if inputs[0].ndim == 4 and mask is None:
        live = torch.ones(q_len, k_len, dtype=torch.bool, device=device())
        check_attention(inputs, specs, found, live.tril() if causal else live)
    return kind


@draws(drawn=attention_inputs(), lengths=st.lists(NUMBERS, max_size=3), window=ANYTHING, sinks=ANYTHING,
       use=st.sets(st.sampled_from(["window", "sinks", "mask", "starts", "block_table", "pages"])), mask=PATTERNS,
       dtype=st.sampled_from(DTYPES), backend=mostly([None, "reference"], ["blockwise", "triton", 3]),
       near=SMALL)  # fmt: skip
def fuzz_attention_with_cache(drawn, lengths, window, sinks, use, mask, dtype, backend, near):
    specs, *odd = drawn
    fits = odd[0] == 99
    for spec in specs if fits else ():
        spec |= {"grad": False, "layout": "plain" if spec["layout"] == "transposed" else spec["layout"]}
    q, k, v = built(specs, *odd)
    if fits:
        lengths = [5] * q.shape[0]
    numbers = torch.tensor([min(max(n, -(2**62)), 2**62) for n in lengths]).to(device(), torch.int64 if fits else dtype)
    ones = torch.zeros(2, 2, dtype=torch.int32, device=device())
    options = {"window": window, "sinks": sinks, "mask": pattern(mask, 64, 64), "starts": numbers, "block_table": ones,
               "pages": torch.zeros(2, 2, 1, dtype=torch.int64, device=device())}  # fmt: skip
    if fits:
        use = use & {"window", "sinks", "mask", "starts"} | ({"window"} if "sinks" in use else set())
        options |= {
            "window": near,
            "sinks": near,
            "starts": numbers - 4,
            "mask": masks.causal(64, block=64).to(device()),
        }
    named = {name: options[name] for name in use}
    kind, found = outcome(lambda: decode.attention_with_cache(q, k, v, numbers, backend=backend, **named))
    if kind == "result":
        assert found.shape == (*q.shape[:-1], v.shape[-1])
    return kind


@draws(tokens=st.sampled_from([30, 1, 2, 0]), dims=st.sampled_from([2, 3, 4]), sums=st.lists(NUMBERS, max_size=4),
       as_tensor=st.booleans(), fits=mostly([True], [False]), pattern=mostly(["causal", "rule", "none"], ["wrong", 3]),
       dtype=mostly(FLOATS, DTYPES), layout=mostly(["plain", "transposed", "parameter"], LAYOUTS))  # fmt: skip
def fuzz_attention_varlen(tokens, dims, sums, as_tensor, fits, pattern, dtype, layout):
    x = tensor((tokens, 2, 16, 2)[:dims] if not fits else (tokens, 2, 16), dtype, layout)
    sums = [0, tokens // 3, tokens] if fits else sums
    if as_tensor:
        sums = torch.tensor([min(max(n, -(2**62)), 2**62) for n in sums])
    pattern = {"causal": masks.causal, "rule": lambda q, k: k <= q, "wrong": lambda n: 5, "none": None}.get(pattern, 3)
    kind, found = outcome(lambda: sparseflash.attention_varlen(x, x, x, sums, pattern=pattern))
    if kind == "result":
        assert found.shape == x.shape and found.dtype == x.dtype
    return kind


@draws(of=st.sampled_from(["self", "cross", "multihead"]), sizes=st.tuples(*[SMALL | ODD | st.just(0)] * 2),
       usual=st.booleans(), mask=PATTERNS, x=TENSORS, lengths=TENSORS | ANYTHING | st.lists(NUMBERS, max_size=3),
       options=st.dictionaries(st.sampled_from(["kv_heads", "head_dim", "dropout", "scale"]), SMALL | ODD))  # fmt: skip
def fuzz_modules(of, sizes, usual, mask, x, lengths, options):
    sizes = (16, 2) if usual else sizes
    x = torch.randn(2, 40, 16, device=device()) if usual else x
    options = {} if usual or of == "multihead" else options
    lengths = (
        (torch.zeros(2, 40, dtype=torch.bool, device=device()) if of == "multihead" else [3, 40]) if usual else lengths
    )

    def call():
        made = pattern(mask, 40, 40)
        if of == "self":
            return nn.SparseSelfAttention(*sizes, made, **options).to(device())(x, lengths=lengths)
        if of == "cross":
            return nn.SparseCrossAttention(*sizes, made, **options).to(device())(x, x, context_lengths=lengths)
        layer = nn.MultiheadAttention(*sizes, batch_first=True, mask=made).to(device())
        return layer(x, x, x, key_padding_mask=lengths)[0]

    kind, found = outcome(call)
    if kind == "result":
        assert found.shape == x.shape
    return kind


def sometimes(other):
    return mostly([Case.__dataclass_fields__[other].default], EDGES[other])


EDGES = {
    "tokens": [1, 2, 17, 56], "dim": [8, 24], "tile": [8, 32], "block": [32, 64], "whole": [True], "half": [True],
    "others": [("sink",), ("softcap",), ("alibi", "sink")], "dropout": [0.3, 0.9], "learned": [False],
}  # fmt: skip


@draws(case=st.builds(Case, st.sampled_from(MINUS_INF), st.sampled_from(FLOATS), seed=st.integers(0, 99),
                      **{name: sometimes(name) for name in EDGES}),
       backend=mostly([None, "blockwise", "reference"], ["triton"]))  # fmt: skip
def fuzz_minus_inf(case, backend):
    if device().type == "cpu" and backend == "triton" and case.dtype == torch.bfloat16:
        return "refused"
    kind, found = outcome(lambda: case.results(backend, device()))
    if kind == "result":
        wanted = case.results("reference", device(), torch.float64, by_mask=True)
        allowed = {torch.float64: 1e-9, torch.float32: 1e-4}.get(case.dtype, 0.06)
        for name, x in found.items():
            largest = float(wanted[name].detach().nan_to_num(neginf=0.0).abs().max())
            around = {"rtol": allowed, "atol": allowed * max(1.0, largest)}
            assert torch.allclose(x.double(), wanted[name].double(), **around), name
    return kind


@draws(name=st.sampled_from(sorted(set(scores.__all__) - {"Scores", "function"})), first=TENSORS | ANYTHING,
       values=st.lists(SMALL | ANYTHING | TENSORS, max_size=3), usual=mostly([True], [False]))  # fmt: skip
def fuzz_scores(name, first, values, usual):
    build = getattr(scores, name)
    parameters = [p for p in inspect.signature(build).parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p for p in parameters if p.default is p.empty]
    given_ = [torch.randn(2, device=device()) if usual else first, *values, *([3] * 9)][: len(needed)]
    positional = [x for p, x in zip(needed, given_) if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: x for p, x in zip(needed, given_) if p.kind is p.KEYWORD_ONLY}
    q = torch.randn(1, 2, 40, 16, device=device())
    kind, change = outcome(lambda: build(*positional, **named))
    if kind == "result" and isinstance(change, (scores.Scores, scores.bias(torch.ones(1, 1, 1, 1)).__class__.__base__)):
        kind, found = outcome(lambda: attention(q, q, q, scores=change))
        assert kind == "refused" or found.shape == q.shape
    return kind


HUGE = st.sampled_from([0, 1, 7, 2**23 - 8, 2**23, 2**31 // 127 + 1, 2**31 - 1, 2**31, 2**40, 2**62])


@st.composite
def strided(draw, *shape, last=1):
    """A tensor with expanded dimensions and arbitrary strides in dimensions of size 1; the last stride is `last`."""
    kept = [size if draw(st.integers(0, 2)) and size < 10**4 else 1 for size in shape[:-1]]
    x = torch.randn(*kept, shape[-1], generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    strides = [0 if k == 1 and n > 1 else s for k, n, s in zip(kept, shape, x.stride())]
    strides = [draw(HUGE) if n == 1 else s for n, s in zip(shape, strides)]
    return x.to(torch.float16).to(device()).as_strided(shape, (*strides, last))


@st.composite
def expanded_inputs(draw):
    batch, kv_heads, group, dim = (draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 2], [1, 3], [16, 24]))
    q_len = draw(st.sampled_from([1, 17, 40]))
    k_len = draw(st.sampled_from([1, 40, 70, 2**24 + 70, 2**31 - 256, 2**33]))
    q = draw(strided(batch, kv_heads * group, q_len, dim))
    k, v = draw(strided(batch, kv_heads, k_len, dim)), draw(strided(batch, kv_heads, k_len, 16))
    name = draw(st.sampled_from(["none", "alibi", "log_decay", "key_bias", "bias", "relative"]))
    shapes = {"alibi": [q.shape[1]], "log_decay": [q.shape[1]], "key_bias": [1, 1, k_len], "bias": [1, 1, q_len, k_len],
              "relative": [q.shape[1], 9]}  # fmt: skip
    values = None
    if name in shapes and (k_len < 100 or "bias" not in name):
        values = draw(strided(*shapes[name])).float()
    return q, k, v, name, values, draw(st.sampled_from([None, 5, 30]))


@draws(drawn=expanded_inputs(), backend=mostly([None, "triton", "blockwise"], ["reference"]), grad=st.booleans())
def fuzz_strides(drawn, backend, grad):
    q, k, v, name, values, window = drawn
    q_len, k_len = q.shape[2], k.shape[2]
    if k_len > 2**20:
        window, grad, backend = window or 30, False, "triton"
        if name == "relative":
            return "refused"
    build = {"relative": lambda x: scores.relative(x, scores.clipped(4))}.get(name, getattr(scores, name, None))
    change = None if values is None else build(values)
    inputs = [x.detach().requires_grad_(grad) for x in (q, k, v)]

    def call():
        mask = None if window is None else masks.local(q_len, k_len, window=window, causal=True, block=16).to(device())
        return attention(*inputs, mask, scores=change, backend=backend, return_lse=True)

    kind, found = outcome(call)
    if kind == "refused":
        assert k_len > 2**30, found
        return kind
    seen = k_len if k_len < 100 else q_len + window
    small = [x.detach().double().contiguous().requires_grad_(grad) for x in (q, k[:, :, -seen:], v[:, :, -seen:])]
    mask = None if window is None else masks.local(q_len, seen, window=window, causal=True, block=16).to(device())
    change = None if values is None else build(values.double())
    want = attention(*small, mask, scores=change, backend="reference", return_lse=True)
    for got, wanted in zip(found, want):
        torch.testing.assert_close(got.double(), wanted, atol=4e-3, rtol=4e-3)
    if grad:
        gradients = (torch.autograd.grad(out[0].sum(), leaves) for out, leaves in ((found, inputs), (want, small)))
        for got, wanted in zip(*gradients):
            torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)
    return kind
