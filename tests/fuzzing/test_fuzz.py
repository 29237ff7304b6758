"""For each class of bug that users of similar libraries have reported, a test:
| class of bug | held by |
|---|---|
| wrong gradients of sparse masks at one head dim | backends/test_exactness.py, every backend, D and Dv drawn |
| mask dropped in the backward | `test_the_backward_uses_the_mask` here |
| block list ignored, dense result | `test_a_block_list_is_not_ignored` here |
| race, NaN in some launches | backends/triton/test_batch_invariance.py and test_gpu.py: the same bits every time |
| wrong kernel or plan from a cache | triton/test_call_cache.py; `test_masks_made_one_after_another_are_not_mixed_up` |
| mask that broadcasts reads out of bounds | bounds.py watches every address in every interpreted launch |
| mask cost grows with N x N | masks/ (time and memory at 1,048,576 tokens), blockmask/test_rules.py |
| small or ragged blocks refused | backends/test_exactness.py, blocks of 16 to 256, every length |
| another length needs another compile | backends/test_compile.py; `nn/test_nn_layers.py` |
| dense or layout tensors cannot be given | test_scaled_dot_product.py, interop/ |
| dropout, fp32, determinism missing | backends/test_dropout.py, test_exactness.py, triton/test_batch_invariance.py |
| slicing for decoding | blockmask/test_ops.py (crop), test_decode.py |
| saving, loading, pickling | blockmask/test_serialization.py; `test_masks_pass_through_workers_and_forks` here |
| CPU training refused | `test_the_backward_uses_the_mask` here, on the CPU |
| captured tensors lose their gradients | backends/test_scores.py |
"""

import copy
import dataclasses
import multiprocessing
import pickle
import sys
import threading

import pytest
import torch
from hypothesis import settings

from sparseflash import BlockMask, attention, clear_caches, decode, interop, masks, nn, scores, sdpa
from tests.fuzzing import calls as fuzz
from tests.fuzzing import of_attention, values


@pytest.mark.parametrize("family", sorted(fuzz.FAMILIES))
def test_wild_calls_end_in_a_result_or_a_clear_error(family):
    fuzz.run(family, 2 * settings().max_examples)()


def test_errors_of_others_are_not_taken_for_ours():
    for wrong in (lambda: torch.ones(2) @ torch.ones(3), lambda: [].pop(), lambda: int("x"), lambda: None.device):
        with pytest.raises((AssertionError, IndexError, AttributeError)):
            values.outcome(wrong)
    assert values.outcome(lambda: masks.causal(-1))[0] == "refused" and values.outcome(lambda: 3) == ("result", 3)


@pytest.mark.parametrize("backend", ["triton", "blockwise"])
def test_scores_beyond_the_limit_of_half_precision_are_no_failures(backend):
    specs = [{"shape": [1, 2, 40, 16], "dtype": torch.float16, "grad": True, "seed": seed} for seed in range(3)]
    specs = [{**spec, "layout": "plain", "fill": "normal"} for spec in specs]
    named = {"mask": "none", "dropout": 0.0, "backend": backend, "seed": None, "lse": False}
    for fill in ("normal", "zero"):  # zeros give scores, not gradients, of 0
        specs[1]["fill"] = fill
        assert of_attention.fuzz_attention(drawn=(specs, 99, None), scale=1e30, **named) == "result"


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, None), (torch.float16, 2.0**12), (torch.float32, 1e30)])
def test_gradients_that_are_not_finite_are_failures(dtype, scale):
    specs = [{"shape": [1, 2, 40, 16], "dtype": dtype, "fill": "normal", "grad": True} for _ in range(3)]
    inputs = [values.tensor(**spec) for spec in specs]
    out = attention(*inputs, scale=scale)
    of_attention.check_attention(inputs, specs, out, torch.ones((), dtype=torch.bool), scale)
    out = attention(*inputs, scale=scale)
    out.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(AssertionError):
        of_attention.check_attention(inputs, specs, out, torch.ones((), dtype=torch.bool), scale)


def test_a_run_on_the_command_line_shows_the_call_that_failed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", "--family", "attention", "--calls=30", "--seed=5"])
    fuzz.main()
    assert capsys.readouterr().out == "attention: 30 calls\n"
    monkeypatch.setattr(masks, "causal", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable") as failure:
        fuzz.main()
    assert "mask='causal'" in "".join(failure.value.__notes__)


def test_a_run_stops_at_the_call_by_which_a_gpu_failed(monkeypatch, capsys):
    def fail(device):
        raise RuntimeError("illegal memory access")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(values, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(fuzz.os, "_exit", leave)
    with pytest.raises(SystemExit):
        fuzz.stop_if_device_failed("scores", {"name": "sink"})
    assert capsys.readouterr().out == "scores: illegal memory access\nin or after the call of {'name': 'sink'}\n"


def problem(length=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 16, generator=generator, requires_grad=True) for _ in range(3)]


def test_the_backward_uses_the_mask():
    q, k, v = problem()
    mask = masks.local(50, window=4, causal=True, block=16)
    out = attention(q, k, v, mask)
    dk, dv = torch.autograd.grad(out[:, :, 40].sum(), [k, v])
    unseen = ~mask.to_dense()[0, 0, 40]
    assert dk[:, :, unseen].eq(0).all() and dv[:, :, unseen].eq(0).all() and dv[:, :, 40].ne(0).all()


def test_a_block_list_is_not_ignored():
    q, k, v = problem(64)
    mask = BlockMask.from_block_index(torch.tensor([[0], [0], [2], [-1]]), block=16, q_len=64)
    out = attention(q, k, v, mask)
    assert not torch.allclose(out, attention(q, k, v)) and out[:, :, 48:].eq(0).all()
    torch.testing.assert_close(out[:, :, :32], attention(q[:, :, :32], k[:, :, :16], v[:, :, :16]))


def test_masks_made_one_after_another_are_not_mixed_up():
    q, k, v = problem()
    for turn in range(60):
        mask = masks.local(50, window=turn % 7 + 1, causal=True, block=16)
        expected = attention(q, k, v, mask, backend="reference")
        torch.testing.assert_close(attention(q, k, v, mask), expected)
        del mask


@pytest.mark.parametrize("clearing", [False, True])
def test_threads_share_masks_and_caches(clearing):
    q, k, v = (x.detach() for x in problem())
    mask = masks.butterfly(50, block=16)
    expected, found = attention(q, k, v, mask), []

    def work():
        for _ in range(20):
            found.append(attention(q, k, v, mask).equal(expected) and masks.butterfly(50, block=16) == mask)
            if clearing:
                clear_caches()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


class Masks(torch.utils.data.Dataset):
    def __init__(self, mask):
        self.mask = mask

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return masks.local(40 + index, window=8, block=16), self.mask & masks.causal(40, block=16), self.mask.digest


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_masks_pass_through_workers_and_forks(start):
    workers = 2 if start == "fork" else 1  # each spawned worker imports PyTorch anew
    here = Masks(masks.local(40, window=8, block=16))
    loader = torch.utils.data.DataLoader(
        here, batch_size=None, num_workers=workers, multiprocessing_context=multiprocessing.get_context(start)
    )
    assert [tuple(each) for each in loader] == [here[index] for index in range(6)]


def test_copies_and_masks_of_inference_mode_train():
    q, k, v = problem()
    with torch.inference_mode():
        made = masks.local(50, window=8, block=16)
        inferred = attention(q, k, v, made)
    for mask in (made, copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        out = attention(q, k, v, mask)
        torch.testing.assert_close(out, inferred.clone())
        out.sum().backward()


Q = torch.zeros(1, 2, 40, 16)
SPARSE = torch.ones(3, 3).to_sparse()
META = torch.ones(3, 3, device="meta")
MASK = masks.causal(40, block=16)
ONE = torch.tensor(5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention(Q, Q, Q, scale="16"), TypeError, r"scale must be a number; got '16'"),
        (lambda: attention(Q, Q, Q, dropout_p="0.5"), TypeError, r"dropout_p must be a number; got '0\.5'"),
        (lambda: sdpa(SPARSE, SPARSE, SPARSE), TypeError, r"query must be a dense tensor; got .*torch\.sparse_coo"),
        (lambda: sdpa(Q, Q, Q, attn_mask=SPARSE), TypeError, r"attn_mask must be a dense tensor.*\.to_dense\(\)"),
        (
            lambda: masks.top_k_keys(SPARSE, k=1, k_len=40),
            TypeError,
            r"scores must be a dense tensor.*torch\.sparse_coo",
        ),
        (lambda: dataclasses.replace(MASK, block_k=ONE), TypeError, r"block_k must be an int, not in .*tensor\(5\)"),
        (
            lambda: decode.attention_with_cache(None, Q, Q, ONE, block_table=ONE),
            TypeError,
            r"q must be a tensor; got NoneType",
        ),
        (lambda: masks.causal(40, block=torch.tensor(0, dtype=torch.int8)), ValueError, r"block must be one of 16, 32"),
        (lambda: MASK.to(3), TypeError, r"device must be a torch\.device or its name, such as 'cuda'; got 3"),
        (lambda: MASK.to("no"), ValueError, r"device must be a torch\.device or its name, such as 'cuda'; got 'no'"),
        (lambda: MASK.to("meta").to("cpu"), ValueError, r"mask must have contents to be moved to cpu; it is on the me"),
        (lambda: MASK.to("meta").validate(), ValueError, r"mask must lie on a device that holds its contents; got the"),
        (lambda: BlockMask.from_dense(SPARSE.bool(), block=16), TypeError, r"dense must be a dense tensor; got one wi"),
        (lambda: BlockMask.from_dense(object, block=16), TypeError, r"dense must be boolean \(True: live\); got type"),
        (lambda: MASK.with_lengths(META[0].int()), ValueError, r"lengths must be on the mask's device cpu; got meta"),
        (lambda: MASK.select(batch=META[0].int()), ValueError, r"batch must lie on a device that holds its contents"),
        (lambda: MASK.to_string(heads="x"), TypeError, r"heads must be an integer, several, or None; got 'x'"),
        (lambda: masks.random_blocks(40, count=1, causal=1), TypeError, r"causal must be True or False; got 1"),
        (lambda: interop.from_deepspeed(3, block=16), TypeError, r"layout must be a tensor; got int"),
        (lambda: interop.from_flashmask([[40]], causal=True), TypeError, r"startend_row_indices must be a tensor; got"),
        (
            lambda: interop.from_flashmask(META.int()[None, None], causal=True),
            ValueError,
            r"startend_row_indices must lie on a device that holds its contents; got the meta device",
        ),
        (lambda: interop.from_sdpa(META.bool()), ValueError, r"attn_mask must lie on a device that holds its contents"),
        (lambda: interop.from_sdpa(SPARSE.bool()), TypeError, r"attn_mask must be a dense tensor; got one with"),
        (lambda: masks.documents(META[0].int()), ValueError, r"lengths must lie on a device that holds its contents"),
        (lambda: masks.documents([3, "x"]), TypeError, r"lengths must be a list of integers; got \[3, 'x'\]"),
        (
            lambda: scores.relative_2d(torch.ones(2, 3, 3), 2, 2, cells=[0, 1]),
            TypeError,
            r"cells must be a tensor; got list",
        ),
        (lambda: interop.from_fa4(3, q_len=40, k_len=40), TypeError, r"tensors must be BlockSparseTensors, ours or FA"),
        (
            lambda: interop.from_flashinfer(torch.ones(2), indices=ONE, M=16, N=16, R=16, C=16),
            TypeError,
            r"indptr must be an integer tensor; got torch\.float32",
        ),
        (lambda: interop.from_torch_sparse(3), TypeError, r"matrix must be a sparse tensor; got int"),
        (lambda: nn.SparseSelfAttention(16, 2, dropout="x"), ValueError, r"dropout must be .*; got x"),
        (lambda: nn.MultiheadAttention("16", 2), TypeError, r"embed_dim must be an integer; got '16'"),
        (lambda: scores.softcap("x"), TypeError, r"cap must be a number; got 'x'"),
        (lambda: scores.relative_2d(torch.ones(2, 9), 0, 2), ValueError, r"the grid must have positive integers as"),
    ],
)
def test_what_the_fuzz_found_is_refused_with_a_reason(call, error, message):
    with pytest.raises(error, match=message):
        call()
