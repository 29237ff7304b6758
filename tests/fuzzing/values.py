from __future__ import annotations

import linecache
import math
import warnings
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

import sparseflash
from sparseflash import BlockMask, masks

ROOT = Path(sparseflash.__file__).resolve().parents[1]
OWN = (str(ROOT / "sparseflash"), str(ROOT / "masks"))
DEVICE = torch.device("cpu")
KINDS = (ValueError, TypeError, NotImplementedError, RuntimeError)


def device():
    return DEVICE


def draws(**strategies):

    def mark(family):
        family.strategies = strategies
        return family

    return mark


class Subclass(torch.Tensor):
    pass


def outcome(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "result", call()
        except KINDS as error:
            if str(error).startswith("Inference tensors cannot be saved for backward"):
                return "refused", error
            trace = error.__traceback__
            while trace.tb_next is not None:
                trace = trace.tb_next
            file = str(Path(trace.tb_frame.f_code.co_filename).resolve())
            line = linecache.getline(file, trace.tb_lineno).strip()
            assert file.startswith(OWN) and line.startswith("raise "), f"{file}:{trace.tb_lineno}: {line}: {error!r}"
            assert len(str(error)) > 20, f"no text: {error!r}"
            return "refused", error


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


TENSORS = st.builds(
    tensor,
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("plain", "transposed", "meta", "inference", "sparse")),
    fill=st.sampled_from(FILLS),
)
