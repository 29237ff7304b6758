from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.cases import Case
from experiments.benchmarks.speed.patterns import KINDS, PLAIN_KINDS, pattern
from experiments.benchmarks.speed.peers import flashattention4
from experiments.benchmarks.speed.peers.runner import Inputs
from sparseflash.interop.fa4 import BlockSparseTensors, from_fa4

LENGTH = 1024
OWN = ("dense", "causal", "window64", "window256")
CASE = Case("case", "butterfly", 1, 2, LENGTH, 16)
PACKAGE = flashattention4.Package(
    attention=lambda *tensors, **options: (tensors[0], None),
    tensors=BlockSparseTensors,
    cute=SimpleNamespace(jit=lambda function: function),
)


def arguments(kind: str, **changes: Any) -> dict[str, Any]:
    case = replace(CASE, kind=kind, **changes)
    return flashattention4.arguments(case, pattern(case), PACKAGE)


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize(
    "kind", [kind for kind in PLAIN_KINDS if kind not in ("dense", "causal", "window64", "window256")]
)
def test_lists_and_rule_say_our_mask(kind: str, block: int) -> None:
    given = arguments(kind, block=block)
    rule = given.get("mask_mod")
    in_torch = None if rule is None else lambda b, h, q, k: rule(b, h, q, k, None, None)
    expected = pattern(replace(CASE, kind=kind, block=block)).mask.to_dense()
    back = from_fa4(given["block_sparse_tensors"], LENGTH, LENGTH, mask_mod=in_torch)
    assert torch.equal(back.to_dense(), expected)
    turned = from_fa4(given["block_sparse_tensors_bwd"], LENGTH, LENGTH, mask_mod=transposed(in_torch))
    assert torch.equal(turned.to_dense().mT, expected)
    if in_torch is not None:
        assert (create_mask(in_torch, 1, 1, LENGTH, LENGTH, device="cpu") | ~expected).all()


@pytest.mark.parametrize("kind", ["butterfly", "random12", "bigbird"])
def test_lists_of_small_blocks_are_those_of_the_converter(kind: str) -> None:
    forward, backward = flashattention4.small_blocks(pattern(replace(CASE, kind=kind)))
    given = arguments(kind)
    for mine, theirs in ((forward, given["block_sparse_tensors"]), (backward, given["block_sparse_tensors_bwd"])):
        assert mine.block_size == theirs.block_size
        for counts, indices in ((0, 1), (2, 3)):
            assert torch.equal(mine[counts], theirs[counts]) and mine[indices].dtype == theirs[indices].dtype
            for row, count in enumerate(mine[counts][0, 0].tolist()):
                assert torch.equal(mine[indices][0, 0, row, :count], theirs[indices][0, 0, row, :count])


def transposed(rule: Any) -> Any:
    return None if rule is None else lambda b, h, q, k: rule(b, h, k, q)


def test_dense_causal_and_windows_are_its_own() -> None:
    assert arguments("dense") == {} and arguments("causal") == {"causal": True}
    assert arguments("window64") == {"window_size": (64, 64)}
    assert arguments("window", sizes=(64,)) == {"window_size": (63, 0)}
    with pytest.raises(Unavailable, match="its rules read no memory"):
        arguments("padded")


@pytest.mark.parametrize(
    ("kind", "sizes"), [("prefix", (100,)), ("longformer", (64, 2)), ("image", (32, 5)), ("video", (4, 3))]
)
def test_rules_with_sizes_say_our_mask(kind: str, sizes: tuple[int, ...]) -> None:
    case = replace(CASE, kind=kind, sizes=sizes, length={"video": 64}.get(kind, LENGTH))
    found = pattern(case)
    given = flashattention4.arguments(case, found, PACKAGE)
    rule = given["mask_mod"]
    back = from_fa4(
        given["block_sparse_tensors"],
        case.length,
        case.length,
        mask_mod=lambda b, h, q, k: rule(b, h, q, k, None, None),
    )
    assert torch.equal(back.to_dense(), found.mask.to_dense()) and kind in KINDS


class OnGpu(NamedTuple):
    device: torch.device = torch.device("cuda")


class Moved(torch.Tensor):
    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp32_is_a_reason(dtype: torch.dtype) -> None:
    q: Any = OnGpu()
    with pytest.raises(Unavailable, match="fp16 and bf16 only"):
        flashattention4.fa4(replace(CASE, dtype=dtype), pattern(CASE), Inputs(q, q, q, q))


def test_its_deterministic_mode_is_asked_for_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    package = PACKAGE._replace(attention=lambda q, k, v, **given: (seen.append(given) or q, None))
    monkeypatch.setattr(flashattention4, "load", lambda: package)
    q = torch.randn(1, 2, 256, 16, dtype=torch.bfloat16).as_subclass(Moved)
    inputs, case = Inputs(q, q, q, q), replace(CASE, kind="causal", length=256)
    for peer in (flashattention4.fa4, flashattention4.fa4_deterministic):
        peer(case, pattern(case), inputs).forward()
    assert seen == [{"causal": True}, {"causal": True, "deterministic": True}]
    with pytest.raises(Unavailable, match="its deterministic backward has dense, causal and window masks only"):
        flashattention4.fa4_deterministic(replace(case, kind="butterfly"), pattern(case), inputs)


def test_inputs_are_in_its_order_and_results_in_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashattention4, "load", lambda: PACKAGE)
    q, k, v, dout = (torch.randn(1, heads, 256, 16, dtype=torch.bfloat16) for heads in (2, 1, 1, 2))
    seen: list[Tensor] = []
    inputs = Inputs(q.as_subclass(Moved), k, v, dout)
    monkeypatch.setattr(flashattention4, "arguments", lambda *a: {})
    runner = flashattention4.fa4(replace(CASE, kind="dense", length=256, kv_heads=1), pattern(CASE), inputs)
    seen += list(runner.inputs.tensors)
    assert [tuple(tensor.shape) for tensor in seen] == [
        (1, 256, 2, 16),
        (1, 256, 1, 16),
        (1, 256, 1, 16),
        (1, 256, 2, 16),
    ]
    assert all(tensor.is_contiguous() for tensor in seen) and all(tensor.requires_grad for tensor in seen[:3])
    assert torch.equal(runner.to_bhnd(runner.forward()), q)
