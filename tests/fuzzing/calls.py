"""Random calls of the public API: each must give a right result, or one clear error raised by the library itself.

    python -m tests.fuzzing --calls 20000 --seconds 540 --record calls.json [--device cuda]

runs more calls than the tests do, by families in turn, and counts how they ended. With `--record`, a later run
continues with other seeds. An error counts as the library's own if a `raise` of the library raised it, as ValueError,
TypeError, NotImplementedError or RuntimeError, with a text; an error that PyTorch, NumPy or Python raises from inside
is a bug, as is any other kind.
"""

from __future__ import annotations

import argparse
import inspect
import json
import linecache
import math
import os
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import sparseflash
from sparseflash import BlockMask, attention, decode, interop, masks, nn, scores
from tests.compared.minus_inf import KINDS as MINUS_INF
from tests.compared.minus_inf import Case
from tests.drawn.rule_spellings import BATCH, HEADS, by_numbers, spelled

ROOT = Path(sparseflash.__file__).resolve().parents[1]
OWN = (str(ROOT / "sparseflash"), str(ROOT / "masks"))
DEVICE = torch.device("cpu")  # of tensors and masks; --device
KINDS = (ValueError, TypeError, NotImplementedError, RuntimeError)


def draws(**strategies):

    def mark(family):
        family.strategies = strategies
        return family

    return mark


class Subclass(torch.Tensor):
    """A tensor of a user's own class."""


def outcome(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "result", call()
        except KINDS as error:
            if str(error).startswith("Inference tensors cannot be saved for backward"):
                return "refused", error  # PyTorch's own rule, with a remedy
            trace = error.__traceback__
            while trace.tb_next is not None:
                trace = trace.tb_next
            file = str(Path(trace.tb_frame.f_code.co_filename).resolve())
            line = linecache.getline(file, trace.tb_lineno).strip()
            assert file.startswith(OWN) and line.startswith("raise "), f"{file}:{trace.tb_lineno}: {line}: {error!r}"
            assert len(str(error)) > 20, f"no text: {error!r}"
            return "refused", error


# Values


NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 16, 17, 40, -1, -7, 2**31, -(2**31), 2**63, -(2**63), 2**70])
SMALL = st.sampled_from([1, 2, 3, 4, 8, 16, 32, 40])
ODD = st.sampled_from([None, True, False, 0.5, -1.5, math.nan, math.inf, "16", b"x", (), (16,), [1, 2], {}, object])
ANYTHING = NUMBERS | ODD | st.just(np.int64(5)) | st.just(torch.tensor(5)) | st.just(torch.ones(3))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.bool, torch.complex64)
LAYOUTS = ("plain", "transposed", "sliced", "expanded", "parameter", "subclass", "inference", "sparse", "meta")
FILLS = ("normal", "large", "nan", "inf", "zero")


def tensor(shape, dtype=torch.float32, layout="plain", fill="normal", grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(shape, generator=generator).to(dtype)
    else:
        made = torch.randint(0, 2, shape, generator=generator).to(dtype)
    if dtype.is_floating_point and made.numel():
        if fill == "large":
            made = made * torch.finfo(dtype).max / 8
        if fill in ("nan", "inf"):
            made.view(-1)[made.numel() // 2] = math.nan if fill == "nan" else -math.inf
        if fill == "zero":
            made.zero_()
    if layout == "transposed" and made.ndim >= 2:
        made = made.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced" and made.ndim:
        made = torch.cat([made, made], dim=-1)[..., : made.shape[-1]]
    if layout == "expanded" and made.ndim and made.shape[0]:
        made = made[:1].expand(made.shape)
    if layout == "sparse" and made.ndim:
        made = made.to_sparse()
    made = made.to("meta" if layout == "meta" else DEVICE)
    if layout == "inference":
        with torch.inference_mode():
            made = made.clone()
    if layout == "subclass":
        made = made.as_subclass(Subclass)
    if layout == "parameter":
        made = torch.nn.Parameter(made, requires_grad=grad and dtype.is_floating_point)
    elif grad and dtype.is_floating_point and layout not in ("inference", "sparse"):
        made = made.detach().requires_grad_()
    return made


# The last size of each is for calls that do not fit.
SIZES = {"batch": [1, 2, 3, 0], "heads": [1, 2, 4, 3, 0], "tokens": [17, 1, 40, 16, 64, 0], "dim": [16, 8, 1, 24, 0]}


@st.composite
def attention_inputs(draw):
    """Shapes, dtypes and layouts of q, k and v. Every other time all fit together; otherwise mostly one does not."""
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


# Of scores in half precision. Beyond it `attention` promises no finite gradients: the weights are recomputed as
# exp(score - lse), and a few roundings at the magnitude of lse, 2^-20 of it, may then be a factor of e or more.
LARGEST_IN_HALF = 2.0**20


def are_plain(inputs, specs, scale=None):
    """Whether the result can be predicted: finite numbers on a device that holds them, and scores that are not too
    large."""
    return (
        all(isinstance(x, torch.Tensor) and x.device.type == DEVICE.type for x in inputs)
        and all(spec["fill"] in ("normal", "zero") for spec in specs)
        and (inputs[0].dtype.itemsize > 2 or largest_score(*inputs[:2], scale) < LARGEST_IN_HALF)
    )


def factor_of(q, scale):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def largest_score(q, k, scale):
    """A bound of |scale * q.k|, and of |scale|, which is a factor of the gradients of q and k even if one is 0."""
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
        with np.errstate(over="ignore", invalid="ignore"):  # of the interpreter's NumPy, where numbers are not known
            gradients = torch.autograd.grad(result.sum(), leaves)
        for x, gradient in zip(leaves, gradients):
            assert gradient.shape == x.shape
            if known:
                assert bool(gradient.isfinite().all())


def pattern(name, q_len, k_len):
    q_len, k_len = max(q_len, 1), max(k_len, 1)
    made = {
        "none": lambda: None,
        "causal": lambda: masks.causal(q_len, k_len, block=16),
        "local": lambda: masks.local(q_len, k_len, window=9, block=(16, 32)),
        "random": lambda: BlockMask.from_dense(
            torch.rand(q_len, k_len, generator=torch.Generator().manual_seed(0)) < 0.4, block=16
        ),
        "nothing": lambda: BlockMask.from_dense(torch.zeros(q_len, k_len, dtype=torch.bool), block=16),
        "short": lambda: masks.causal(q_len, k_len, block=16).with_lengths([min(3, q_len)]),
        "heads": lambda: masks.per_head(
            [masks.causal(q_len, k_len, block=16), BlockMask.dense(q_len, k_len, block=16)]
        ),
        "longer": lambda: masks.causal(q_len + 1, k_len, block=16),
        "meta": lambda: masks.causal(q_len, k_len, block=16).to("meta"),
        "tensor": lambda: torch.ones(q_len, k_len, dtype=torch.bool),
        "text": lambda: "causal",
    }[name]()
    return made if made is None or name in ("meta", "text") else made.to(DEVICE)


def mostly(usual, wild):
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(wild) if n == 5 else st.sampled_from(usual))


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
    live = torch.ones((), dtype=torch.bool, device=DEVICE)
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
        live = torch.ones(q_len, k_len, dtype=torch.bool, device=DEVICE)
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
    numbers = torch.tensor([min(max(n, -(2**62)), 2**62) for n in lengths]).to(DEVICE, torch.int64 if fits else dtype)
    ones = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    options = {"window": window, "sinks": sinks, "mask": pattern(mask, 64, 64), "starts": numbers, "block_table": ones,
               "pages": torch.zeros(2, 2, 1, dtype=torch.int64, device=DEVICE)}  # fmt: skip
    if fits:
        use = use & {"window", "sinks", "mask", "starts"} | ({"window"} if "sinks" in use else set())
        options |= {
            "window": near,
            "sinks": near,
            "starts": numbers - 4,
            "mask": masks.causal(64, block=64).to(DEVICE),
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


BUILDERS = {name: getattr(masks, name) for name in masks.__all__ if inspect.isfunction(getattr(masks, name, None))}
TYPICAL = {
    "block": 16, "heads": 2, "k_len": 40, "q_len": 40, "causal": True, "device": "cpu", "shape": (5, 8), "scale": 0.5,
    "lengths": [3, 37], "k_lengths": [3, 37], "mass": 0.5, "scores": torch.ones(3, 3), "attend": "both",
    "masks": [masks.causal(40, block=16)], "indices": torch.zeros(40, 2, dtype=torch.int64), "span": 16, "order": None,
    "q": torch.ones(1, 2, 40, 8), "k": torch.ones(1, 2, 40, 8), "strides": [1, 2], "factors": (2, 2), "offset": 0,
}  # fmt: skip
TENSORS = st.builds(
    tensor,
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("plain", "transposed", "meta", "inference", "sparse")),
    fill=st.sampled_from(FILLS),
)


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
            "index": torch.tensor(index),
            "block": 16,
            "q_len": 40,
            "k_len": 45,
            "causal": draw(st.booleans()),
        }, None
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
        return {"device": DEVICE}, dense
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
    found = found.to(DEVICE)
    q = torch.randn(found.shape[0], found.shape[1], found.q_len, 16, device=DEVICE)
    k = torch.randn(found.shape[0], found.shape[1], found.k_len, 16, device=DEVICE)
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
# The block sizes that a library takes, and which of them take whole blocks only.
BLOCKS = {"fa4": (128,), "flex": (128, 16), "deepspeed": (16, 32)}
WHOLE = ("deepspeed", "flashinfer")


@st.composite
def convertible(draw, library):
    block = draw(st.sampled_from(BLOCKS.get(library, (16, 32, 64))))
    rows = draw(st.integers(1, 4))
    cols = rows if library == "deepspeed" else draw(st.integers(1, 4))
    q_len, k_len = (
        size * block - (0 if library in WHOLE else draw(st.integers(0, block - 1))) for size in (rows, cols)
    )
    if library == "flashmask":
        length = draw(st.integers(1, 99))
        kind = draw(st.sampled_from([masks.local, masks.local, masks.causal, BlockMask.dense]))
        named = {"window": draw(st.integers(1, 40)), "causal": draw(st.booleans())} if kind is masks.local else {}
        return kind(length, block=block, **named)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    if library in ("deepspeed", "fa4") or draw(st.booleans()):
        layout = torch.rand(-(-q_len // block), -(-k_len // block), generator=generator) < share
        return BlockMask.from_layout(layout, block=block, q_len=q_len, k_len=k_len)
    return BlockMask.from_dense(torch.rand(q_len, k_len, generator=generator) < share, block=block)


def returned(library, mask):
    made = getattr(interop, f"to_{library}")(mask)
    take = getattr(interop, f"from_{library}")
    if library == "fa4":
        return take(made.forward, mask.q_len, mask.k_len)
    if library == "flashinfer":
        return take(*made)
    if library == "flashmask":
        return take(made.startend_row_indices, causal=made.causal, q_len=mask.q_len, block=mask.block_q)
    if library == "deepspeed":
        return take(made.layout, block=made.block)
    return take(made) if library == "flex" else take(made, block=mask.block_q)


NEEDED = {"causal", "M", "N", "R", "C", "indices"}


@st.composite
def conversions(draw):
    if draw(st.integers(0, 3)) == 0:  # the others are too much alike to be drawn again
        name = draw(st.sampled_from(sorted(FROM))).removeprefix("from_")
        return name, [draw(convertible(name))], {}
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
    if not name.startswith(("to_", "from_")):
        kind, found = outcome(lambda: returned(name, positional[0].to(DEVICE)))
        assert kind == "result" and torch.equal(found.to_dense().cpu(), positional[0].to_dense()), found
        return kind
    kind, found = outcome(lambda: getattr(interop, name)(*positional, **named))
    if kind == "result" and isinstance(found, BlockMask) and found.device.type != "meta":
        found.validate()
    return kind


@draws(of=st.sampled_from(["self", "cross", "multihead"]), sizes=st.tuples(*[SMALL | ODD | st.just(0)] * 2),
       usual=st.booleans(), mask=PATTERNS, x=TENSORS, lengths=TENSORS | ANYTHING | st.lists(NUMBERS, max_size=3),
       options=st.dictionaries(st.sampled_from(["kv_heads", "head_dim", "dropout", "scale"]), SMALL | ODD))  # fmt: skip
def fuzz_modules(of, sizes, usual, mask, x, lengths, options):
    sizes = (16, 2) if usual else sizes
    x = torch.randn(2, 40, 16, device=DEVICE) if usual else x
    options = {} if usual or of == "multihead" else options
    lengths = (
        (torch.zeros(2, 40, dtype=torch.bool, device=DEVICE) if of == "multihead" else [3, 40]) if usual else lengths
    )

    def call():
        made = pattern(mask, 40, 40)
        if of == "self":
            return nn.SparseSelfAttention(*sizes, made, **options).to(DEVICE)(x, lengths=lengths)
        if of == "cross":
            return nn.SparseCrossAttention(*sizes, made, **options).to(DEVICE)(x, x, context_lengths=lengths)
        layer = nn.MultiheadAttention(*sizes, batch_first=True, mask=made).to(DEVICE)
        return layer(x, x, x, key_padding_mask=lengths)[0]

    kind, found = outcome(call)
    if kind == "result":
        assert found.shape == x.shape
    return kind


def sometimes(other):
    return mostly([Case.__dataclass_fields__[other].default], EDGES[other])


EDGES = {
    "tokens": [1, 2, 17, 40], "dim": [8, 24], "tile": [8, 32], "block": [32, 64], "whole": [True], "half": [True],
    "others": [("sink",), ("softcap",), ("alibi", "sink")], "dropout": [0.3, 0.9], "learned": [False],
}  # fmt: skip


@draws(case=st.builds(Case, st.sampled_from(MINUS_INF), st.sampled_from(FLOATS), seed=st.integers(0, 99),
                      **{name: sometimes(name) for name in EDGES}),
       backend=mostly([None, "blockwise", "reference"], ["triton"]))  # fmt: skip
def fuzz_minus_inf(case, backend):
    """-inf in every kind of scores equals a mask."""
    if DEVICE.type == "cpu" and backend == "triton" and case.dtype == torch.bfloat16:
        return "refused"  # by the interpreter
    kind, found = outcome(lambda: case.results(backend, DEVICE))
    if kind == "result":
        wanted = case.results("reference", DEVICE, torch.float64, by_mask=True)
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
    given_ = [torch.randn(2, device=DEVICE) if usual else first, *values, *([3] * 9)][: len(needed)]
    positional = [x for p, x in zip(needed, given_) if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: x for p, x in zip(needed, given_) if p.kind is p.KEYWORD_ONLY}
    q = torch.randn(1, 2, 40, 16, device=DEVICE)
    kind, change = outcome(lambda: build(*positional, **named))
    if kind == "result" and isinstance(change, (scores.Scores, scores.bias(torch.ones(1, 1, 1, 1)).__class__.__base__)):
        kind, found = outcome(lambda: attention(q, q, q, scores=change))
        assert kind == "refused" or found.shape == q.shape
    return kind


HUGE = st.sampled_from([0, 1, 7, 2**23 - 8, 2**23, 2**31 // 127 + 1, 2**31 - 1, 2**31, 2**40, 2**62])


@st.composite
def strided(draw, *shape, last=1):
    """A tensor with expanded dimensions and arbitrary strides in dimensions of size 1; the last stride is `last`. An
    expanded number of tokens costs no memory."""
    kept = [size if draw(st.integers(0, 2)) and size < 10**4 else 1 for size in shape[:-1]]
    x = torch.randn(*kept, shape[-1], generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    strides = [0 if k == 1 and n > 1 else s for k, n, s in zip(kept, shape, x.stride())]
    strides = [draw(HUGE) if n == 1 else s for n, s in zip(shape, strides)]
    return x.to(torch.float16).to(DEVICE).as_strided(shape, (*strides, last))


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
    if k_len > 2**20:  # only where a window leaves few tiles, and no array has a number for each key
        window, grad, backend = window or 30, False, "triton"
        if name == "relative":
            return "refused"
    build = {"relative": lambda x: scores.relative(x, scores.clipped(4))}.get(name, getattr(scores, name, None))
    change = None if values is None else build(values)
    inputs = [x.detach().requires_grad_(grad) for x in (q, k, v)]

    def call():
        mask = None if window is None else masks.local(q_len, k_len, window=window, causal=True, block=16).to(DEVICE)
        return attention(*inputs, mask, scores=change, backend=backend, return_lse=True)

    kind, found = outcome(call)
    if kind == "refused":
        assert k_len > 2**30, found
        return kind
    seen = k_len if k_len < 100 else q_len + window  # the last keys, at the same distances
    small = [x.detach().double().contiguous().requires_grad_(grad) for x in (q, k[:, :, -seen:], v[:, :, -seen:])]
    mask = None if window is None else masks.local(q_len, seen, window=window, causal=True, block=16).to(DEVICE)
    change = None if values is None else build(values.double())
    want = attention(*small, mask, scores=change, backend="reference", return_lse=True)
    for got, wanted in zip(found, want):  # lse shows the scores of keys that are all alike
        torch.testing.assert_close(got.double(), wanted, atol=4e-3, rtol=4e-3)
    if grad:
        gradients = (torch.autograd.grad(out[0].sum(), leaves) for out, leaves in ((found, inputs), (want, small)))
        for got, wanted in zip(*gradients):
            torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)
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
            return "refused"  # by FlexAttention
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


FAMILIES = {name.removeprefix("fuzz_"): each for name, each in sorted(globals().items()) if hasattr(each, "strategies")}


def stop_if_device_failed(family, number, drawn):
    """Ends the process at the call that made a GPU fail, because every later call on it fails, too."""
    if DEVICE.type == "cuda":
        try:
            torch.cuda.synchronize(DEVICE)
        except RuntimeError as error:
            print(f"{family}, seed {number}: {error}\nin or after the call of {drawn}", flush=True)
            os._exit(2)  # leaving in order would free the memory of a GPU that is lost


def run(family, examples, number=None, ends=None, **options):
    """Draws calls of a family and counts how they ended, in `ends` too; raises what went wrong.

    The same number draws the same calls.
    """
    ends = Counter() if ends is None else ends
    wild = FAMILIES[family]

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), **options)
    @given(**wild.strategies)
    def counted(**drawn):
        try:
            end = wild(**drawn)
        except Exception:
            ends["failure"] += 1  # Hypothesis's calls for simplifying a failure are counted, too
            stop_if_device_failed(family, number, drawn)
            raise
        stop_if_device_failed(family, number, drawn)
        ends[end] += 1

    (counted if number is None else seed(number)(counted))()
    return ends


CALLS = 100  # of a family before the next has its turn


def one_turn(family, number):
    ends = Counter()
    try:
        return run(family, CALLS, number, ends, deadline=None, database=None), []
    except Exception as failure:  # a group for several failures
        failures = getattr(failure, "exceptions", [failure])
        notes = ["".join(getattr(each, "__notes__", [])[:1]) for each in failures]
        what = [f"{type(each).__name__}: {each} {note}" for each, note in zip(failures, notes)]
        return ends, [f"{family}, seed {number}: {text}" for text in what]


def table(ends):
    total = Counter()
    for family, counts in sorted(ends.items()):
        total.update(counts)
        yield f"{family:>20}: {sum(counts.values()):6} calls, {counts.get('result', 0):6} results"
    yield f"{'all':>20}: {total.total():6} calls, {total['result']:6} results"


def main():
    global DEVICE
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzzing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000, help="of all families together, those recorded included")
    parser.add_argument("--seconds", type=float, default=math.inf, help="the last turn is begun before")
    parser.add_argument("--record", type=Path, help="a JSON file of what was done, also by earlier runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first turn, without a record")
    parser.add_argument("--device", type=torch.device, default=DEVICE, help="of tensors and masks")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="by default all")
    chosen = parser.parse_args()
    DEVICE = chosen.device
    families = chosen.family or list(FAMILIES)
    done = {"seed": chosen.seed, "ends": {}, "failures": []}
    if chosen.record and chosen.record.exists():
        done = json.loads(chosen.record.read_text())
    start = time.perf_counter()
    while sum(sum(counts.values()) for counts in done["ends"].values()) < chosen.calls:
        if time.perf_counter() - start > chosen.seconds:
            break
        # Seeds count turns, so the seed also determines the family.
        family = families[done["seed"] % len(families)]
        ends, failures = one_turn(family, done["seed"])
        print(*failures, sep="\n", end="\n" if failures else "", flush=True)
        done["seed"] += 1
        done["ends"][family] = Counter(done["ends"].get(family, {})) + ends
        done["failures"] += failures
        if chosen.record:
            chosen.record.write_text(json.dumps(done, indent=1))
    print(*table(done["ends"]), f"{len(done['failures'])} failures", sep="\n")
    return 1 if done["failures"] else 0
