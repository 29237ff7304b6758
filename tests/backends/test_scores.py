from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sparseflash import BlockMask, attention, masks, scores, testing
from sparseflash.backends import problem as backends_problem
from sparseflash.backends.triton import api
from sparseflash.backends.triton.changes.pair_bias import readable
from sparseflash.backends.triton.launch.gradient_sums import sums_of_groups
from sparseflash.backends.triton.overrides import override
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.scores.change import Scores, Sizes
from tests.backends.triton.plans import chunks_of
from tests.compared.exactness import HALF, loads, new_memory_is_nan, plain
from tests.compared.scored import FUNCTIONS, KINDS, Scored, check, results, scored
from tests.drawn.counts import examples_times
from tests.drawn.masks import Recipe
from tests.drawn.problems import Problem
from tests.watched.waiting import NoWaiting


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@given(data=st.data())
@settings(max_examples=settings().max_examples)
def test_the_kernels_are_exact_in_the_interpreter(dtype, data):
    case = data.draw(scored(most_tokens=40, head_dims=(16, 24), value_dims=(16, 24), blocks=(16, 32), dtypes=(dtype,),
                            dropouts=(0.0, 0.0, 0.3)))  # fmt: skip
    way, chunks = data.draw(st.sampled_from(["pointers", "descriptors"])), data.draw(st.sampled_from([None, None, 16]))
    with loads(way), chunks_of(chunks):
        check(case, "triton")


def local(dtype, tokens, **others):
    arguments = {"q_len": tokens, "window": tokens // 2, "causal": True, "block": (16, 16)}
    sizes = {"q_len": tokens, "k_len": tokens, "dim": 16, "v_dim": 16, "heads": 4, "kv_heads": 2, "batch": 2}
    common = {"scale": None, "layout": "contiguous", "seed": 3, "dtype": dtype}
    return Problem(Recipe("local", arguments, (tokens, tokens - 7)), **common | sizes | others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_everything_at_once_in_chunks_and_gathered_tiles(dtype):
    case = Scored(local(dtype, 40), ("softcap", "alibi", "t5", "key_bias", "pair bias", "sink", "temperature"))
    with chunks_of(16):
        check(case, "triton")
    with override(tiling=widest_gathered):
        check(case, "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_functions_in_chunks_and_gathered_tiles(dtype):
    small = local(dtype, 20, heads=2, kv_heads=1)
    with chunks_of(16):
        check(Scored(small, ("softcap", "alibi", "function of tables", "sink")), "triton")
    with override(tiling=widest_gathered):
        check(Scored(small, ("t5", "function of places")), "triton")


def widest_gathered(tilings: list[Tiling]) -> Tiling:
    found = [tiling for tiling in tilings if tiling.gathered]
    assert found  # otherwise nothing here would be gathered
    return max(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_tiles_whose_distances_share_a_bucket_are_exact(dtype):
    def bucket(offsets):
        return offsets // 48 % 3

    def results_in(backend, dtype):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 2, 160, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3))
        table = torch.randn(2, 3, generator=generator).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        mask = masks.causal(160, block=16).with_lengths([150])
        out = attention(q, k, v, mask, scores=scores.relative(table, bucket), backend=backend)
        found = torch.autograd.grad(out.square().sum(), (q, k, v, table))
        return dict(zip(("out", "dq", "dk", "dv", "dtable"), (out, *found)))

    codes = scores.relative(torch.zeros(2, 3), bucket).prepared(Sizes(1, 2, 160, 160, torch.device("cpu")))
    smallest = torch.arange(160, 300, 16)
    shared = codes.until[smallest] >= smallest + 30
    assert shared.any() and not shared.all()
    with plain():
        of_plain = results_in("reference", dtype)
    found = testing.compare_results(results_in("triton", dtype), results_in("reference", torch.float64), of_plain)
    assert found.exact, str(found)


def test_tables_whose_buckets_change_with_every_key():
    changes = scores.relative(torch.randn(2, 3, dtype=torch.float64), lambda offsets: offsets % 3)
    codes = changes.prepared(Sizes(1, 2, 100, 120, torch.device("cpu")))
    assert not codes.until.numel() and codes.q_codes.numel() == 100
    q, k, v = (torch.randn(1, 2, n, 16) for n in (100, 120, 120))

    def results_in(backend, dtype):
        table = changes.table.to(dtype).requires_grad_()
        given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*given, scores=scores.relative(table, changes.bucket), backend=backend)
        found = torch.autograd.grad(out.square().sum(), (*given, table))
        return dict(zip(("out", "dq", "dk", "dv", "dtable"), (out, *found)))

    truth, plain = results_in("reference", torch.float64), results_in("reference", torch.float32)
    assert testing.compare_results(results_in("triton", torch.float32), truth, plain).exact


def test_tables_made_under_fake_tensors_are_not_kept():
    changes = scores.relative(torch.randn(2, 3), scores.clipped(1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 20, 16)
        assert attention(q, q, q, scores=changes).shape == q.shape
    q = torch.randn(1, 2, 20, 16)
    assert attention(q, q, q, scores=changes).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_give_the_same_bits_every_time(kind):
    case = Scored(local(torch.float16, 20, heads=2, kv_heads=1), (kind,))
    first, second = results(case, "triton"), results(case, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_bias_of_keys_past_the_length_gets_no_gradient():
    sizes = {"q_len": 15, "k_len": 15, "dim": 16, "v_dim": 16, "heads": 1, "kv_heads": 1, "batch": 2}
    recipe = Recipe("butterfly", {"q_len": 15, "block": 16, "factors": None, "causal": False}, (15, 1))
    problem = Problem(recipe, dtype=torch.float16, scale=None, layout="contiguous", seed=0, **sizes)
    check(Scored(problem, ("alibi", "key_bias")), "triton")


def test_the_lse_of_a_query_without_keys_is_its_sink():
    mask = BlockMask.from_function(lambda q, k: q % 2 == 0, 20, block=16)
    for dtype in (torch.float16, torch.float32):
        q, k, v = (torch.randn(1, 2, 20, 16, dtype=dtype, requires_grad=True) for _ in range(3))
        logits = torch.randn(2, requires_grad=True)
        for _ in range(2):
            out, lse = attention(q, k, v, mask, scores=scores.sink(logits), return_lse=True, backend="triton")
            assert (out[:, :, 1::2] == 0).all() and (lse[:, :, 1::2] == logits.view(1, 2, 1)).all()
            assert (torch.autograd.grad(out[:, :, 1::2].sum(), logits, retain_graph=True)[0] == 0).all()
            assert (torch.autograd.grad(lse[:, :, 1::2].sum(), logits)[0] == 10).all()


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sink_of_minus_infinity_is_none(dtype, backend):
    mask = BlockMask.from_function(lambda q, k: q % 2 == 0, 20, block=16)
    q, k, v = (torch.randn(1, 2, 20, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    logits = torch.full((2,), -torch.inf, requires_grad=True)
    out, lse = attention(q, k, v, mask, scores=scores.sink(logits), return_lse=True, backend=backend)
    without = attention(q, k, v, mask, return_lse=True, backend=backend)
    assert torch.equal(out, without[0]) and torch.equal(lse, without[1])
    *gradients, of_sink = torch.autograd.grad(out.square().sum(), [q, k, v, logits])
    assert all(x.isfinite().all() for x in gradients) and (of_sink == 0).all()


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sink_far_above_all_scores_has_all_the_weight(dtype, backend):
    mask = BlockMask.from_function(lambda q, k: q % 2 == 0, 20, block=16)
    q, k, v = (torch.randn(1, 2, 20, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    logits = torch.full((2,), 3e4, requires_grad=True)
    out, lse = attention(q, k, v, mask, scores=scores.sink(logits), return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == 3e4).all()
    *gradients, of_sink = torch.autograd.grad((out.sum(), lse.sum()), [q, k, v, logits])
    assert all((x == 0).all() for x in gradients) and (of_sink == 20).all()


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_query_without_keys_may_have_an_lse_whose_gradient_is_not_a_number(dtype, backend):
    mask = BlockMask.from_function(lambda q, k: q % 2 == 0, 20, block=16)
    q, k, v = (torch.randn(1, 2, 20, 16, dtype=dtype) for _ in range(3))
    learned = {
        "alibi": torch.rand(2), "relative": torch.randn(2, 9), "bias": torch.randn(1, 2, 20, 20)
    }  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, v, *learned.values())]
    changes = scores.alibi(learned["alibi"]) + scores.bias(learned["bias"])
    changes = changes + scores.relative(learned["relative"], scores.clipped(4))
    out, lse = attention(q, k, v, mask, scores=changes, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad([out, lse], leaves, [dout, dlse], retain_graph=True)
    dlse[:, :, 1::2] = torch.nan
    for found, other in zip(torch.autograd.grad([out, lse], leaves, [dout, dlse]), want):
        assert torch.equal(found, other)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_stored", [False, True], ids=["bias", "tile bias"])
def test_a_bias_of_tokens_past_the_lengths_need_not_be_finite(is_stored, dtype, backend):
    mask = masks.causal(80, block=16).with_lengths([50])
    q, k, v = (torch.randn(1, 2, 80, 16, dtype=dtype).requires_grad_() for _ in range(3))
    row, column = torch.arange(80).view(-1, 1), torch.arange(80)
    is_live = (row < 50) & (column < 50)
    if is_stored:
        is_live = scores.tile_values(lambda q, k: is_live[q, k], mask)
    values = torch.randn(1, 2, *is_live.shape[-3 if is_stored else -2 :], dtype=dtype)

    def results_with(past):
        some = values.masked_fill(~is_live, past).requires_grad_()
        changes = scores.tile_bias(some, mask) if is_stored else scores.bias(some)
        out, lse = attention(q, k, v, mask, scores=changes, return_lse=True, backend=backend)
        loss = out.square().sum() + lse[:, :, :50].sin().sum()
        return out, lse, *torch.autograd.grad(loss, (q, k, v, some))

    assert all(map(torch.equal, results_with(torch.nan), results_with(0.0)))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("dead", [slice(0, 40), slice(40, 80)], ids=["first keys", "last keys"])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # in the interpreter; also past the ends
def test_the_lowest_bias_of_fp32_leaves_no_weight_unless_it_is_that_of_all_keys(dead, backend):
    """Times log2(e) it is -inf."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 80, 16, generator=generator, requires_grad=True) for _ in range(3)]
    values = torch.zeros(1, 1, 80, 80)
    values[..., dead], values[:, :, 7] = (torch.finfo(torch.float32).min,) * 2
    out, lse = attention(*inputs, scores=scores.bias(values), return_lse=True, backend=backend)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want, want_lse = attention(*exact, scores=scores.bias(values.double()), return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), (want.float(), want_lse.float()))
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    for found, wanted in zip(gradients, torch.autograd.grad(want.square().sum(), exact)):
        torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e30])
@pytest.mark.parametrize("dead", [slice(0, 40), slice(40, 80)], ids=["first keys", "last keys"])
@pytest.mark.parametrize(("device", "dtype"), [
    ("cpu", torch.float16), *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in HALF),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # in the interpreter; also past the ends
def test_nor_does_so_low_a_bias_in_half_precision(device, dtype, dead, lowest):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 80, 16, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    dout = torch.randn(1, 2, 80, 16, generator=generator).to(device, dtype)
    values = torch.zeros(1, 1, 80, 80, device=device)
    values[..., dead], values[:, :, 7], dout[:, :, 7] = lowest, lowest, 0.0
    out = attention(*inputs, scores=scores.bias(values), backend="triton")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = attention(*exact, scores=scores.bias(values.double()), backend="reference")
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, want.to(dtype), rtol=eps, atol=eps)
    gradients = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(want, exact, dout.double())
    for found, wanted in zip(*gradients):
        torch.testing.assert_close(found, wanted.to(dtype), rtol=eps, atol=eps)


@pytest.mark.parametrize(("device", "dtype"), [
    ("cpu", torch.float16), ("cpu", torch.float32),
    *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in (*HALF, torch.float32)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # in the interpreter; also past the ends
def test_weights_of_rows_with_only_very_low_biases_are_finite_and_the_least_low_wins(device, dtype):
    """lse is rounded at the magnitude of the bias, so the exponent of a recomputed weight may be any number."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 80, 16, generator=generator).to(device, dtype).requires_grad_() for _ in range(3))
    low = -(10.0 ** (28 + 10 * torch.rand(80, generator=generator)))  # of each query
    values = (low[:, None].expand(80, 80) * 2).clone().to(device)
    chosen = torch.arange(80, device=device) * 7 % 80
    values[torch.arange(80), chosen] /= 2
    out, lse = attention(q, k, v, scores=scores.bias(values[None, None]), backend="triton", return_lse=True)
    torch.testing.assert_close(out, v[:, :, chosen], rtol=0, atol=0)
    torch.testing.assert_close(lse, low.to(device).expand(1, 2, 80), rtol=1e-6, atol=0)
    for gradient in torch.autograd.grad(out, (q, k, v), torch.zeros_like(out)):
        assert (gradient == 0).all()


def test_the_rows_of_a_bias_lie_near_enough_for_offsets_of_32_bits():
    values = torch.empty_strided((1, 1, 2, 16), (2**24, 2**24, 2**23, 1), dtype=torch.float16).zero_()
    found = readable(values)
    assert found.stride(2) == 16 and torch.equal(found, values)


def test_gradients_of_a_capped_score_near_the_cap_keep_their_digits():
    """The derivative 1 - tanh^2 is nearly 0 there."""
    near = Recipe(
        "from_function", {"q_len": 33, "k_len": 33, "block": (16, 16), "rule_name": "near", "number": 1}, None
    )
    problem = Problem(near, 1, 2, 2, 33, 33, 16, 16, torch.float32, 1.0, "contiguous", 1048577, 0.0)
    check(Scored(problem, ("softcap", "alibi", "query temperature")), "triton")


def test_a_sink_far_above_or_below_all_scores_is_harmless():
    q, k, v = (torch.randn(1, 2, 20, 16, dtype=torch.float16) for _ in range(3))
    logits = torch.tensor([1e4, -1e4])
    out, lse = attention(q, k, v, scores=scores.sink(logits), return_lse=True, backend="triton")
    plain, plain_lse = attention(q, k, v, return_lse=True, backend="triton")
    assert (out[:, 0] == 0).all() and (lse[:, 0] == 1e4).all()
    assert torch.equal(out[:, 1], plain[:, 1]) and torch.equal(lse[:, 1], plain_lse[:, 1])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["empty", "zeros"])
def test_the_gradient_of_a_bias_takes_no_more_memory_than_the_bias_unless_it_is_shared(name, batch):
    mask = masks.causal(40, block=16) if name == "zeros" else None
    q = torch.randn(batch, 2, 40, 16, dtype=torch.float16, requires_grad=True)
    bias = torch.randn(1, 2, 40, 40, dtype=torch.float16, requires_grad=True)
    out = attention(q, q, q, mask, scores=scores.bias(bias), backend="triton")
    make = {each: mock.Mock(wraps=getattr(torch, each)) for each in ("empty", "zeros")}
    with mock.patch.multiple(torch, **make):
        out.sum().backward()
    shape = ((batch, 2, 40, 40),)
    made = {
        each: [call.kwargs["dtype"] for call in make[each].call_args_list if call.args[:1] == shape] for each in make
    }
    assert made == {"empty": [], "zeros": [], name: [torch.float16 if batch == 1 else torch.float32]}
    assert bias.grad.dtype == torch.float16


@pytest.mark.parametrize(
    "mask", [None, masks.causal(40, block=16), BlockMask.dense(40, block=16).with_lengths([40, 17])]
)
def test_the_gradients_of_all_pairs_are_written(mask):
    """PyTorch fills new memory with NaN here."""
    q, k, v = (torch.randn(2, 2, 40, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 2, 40, 40, requires_grad=True)
    gains = torch.randn(2, 2, 40, 40, requires_grad=True)
    change = scores.bias(bias) + scores.function(lambda s, b, h, i, j, gain: s * gain[b, h, i, j], gains)
    out = attention(q, k, v, mask, scores=change, backend="triton")
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (bias, gains), dout, retain_graph=True)
    with new_memory_is_nan():
        got = torch.autograd.grad(out, (bias, gains), dout)
    assert all(map(torch.equal, got, wanted))  # NaN would equal nothing


@pytest.mark.parametrize("each", [None, 2])
def test_sums_of_groups_are_those_of_their_rows(each):
    group = torch.tensor([2, 0, 1, 1, 0, 2]) if each else torch.tensor([2, 0, 2, 2, 0, 2])
    values = torch.randn(6, 3, dtype=torch.float64)
    expected = torch.zeros(3, 3, dtype=torch.float64).index_add_(0, group, values)
    torch.testing.assert_close(sums_of_groups(values, group, 3, each), expected)


def test_sums_of_groups_of_known_sizes_ask_the_device_for_nothing():
    values, group = torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)
    with NoWaiting():
        found = sums_of_groups(values, group, 3, None, most=8)
    assert found.tolist() == [[8.0, 8.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_operator_passes_pytorchs_own_checks():
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    changes = scores.alibi(torch.rand(2, requires_grad=True)) + scores.sink(torch.randn(2, requires_grad=True))
    problem = backends_problem.Problem(None, None, None, None, None, None, 16, 16, 0.25)
    arguments = (q, k, v, changes.tensors(), changes.described(), *problem)
    assert api.attention.name == "triton"
    torch.library.opcheck(torch.ops.sparseflash.triton_scored.default, arguments)


def test_gradients_have_the_strides_that_compiled_code_expects():
    """Kernels leave room after the 20 numbers of a head."""
    q, k, v, dout = (torch.randn(1, 2, 20, 16) for _ in range(4))
    changes = Scores((scores.key_bias(torch.randn(1, 2, 20, requires_grad=True)),))
    problem = backends_problem.Problem(None, None, None, None, None, None, 16, 16, 0.25)
    out, lse, kept = api.attention.forward(q, k, v, problem, changes)
    saved = q, k, v, out, lse, kept
    arguments = dout, None, *saved, [x.detach() for x in changes.tensors()], changes.described(), [True], *problem
    operator = torch.ops.sparseflash.triton_scored_backward.default
    assert not operator(*arguments)[3][0].isnan().any()
    torch.library.opcheck(operator, arguments, test_utils="test_faketensor")


# ---------------------------------------------------------------------- on a GPU


# Each pair of head dims, block and combination of changes compiles its own kernels: all cases together have all.
_DIMS = [(16, 16), (64, 64), (128, 64), (16, 64), (64, 16), (128, 16)]
_BLOCKS = [(64,), (16,), (128,), (16, 128)]
_GPU_CASES = [
    pytest.param(kind, dtype, _DIMS[(at + 2 * of) % 6], _BLOCKS[(at + of) % 4], id=f"{kind}-{str(dtype)[6:]}")
    for at, kind in enumerate((*KINDS, *FUNCTIONS))
    for of, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype", "dims", "blocks"), _GPU_CASES)
@given(data=st.data())
@examples_times(1 / 8)
def test_the_kernels_are_exact_on_the_gpu(kind, dtype, dims, blocks, data):
    case = data.draw(scored(always=kind, most_tokens=300, head_dims=dims[:1], value_dims=dims[1:], blocks=blocks,
                            dtypes=(dtype,), dropouts=(0.0, 0.0, 0.3)))  # fmt: skip
    with chunks_of(data.draw(st.sampled_from([None, None, 64]))):
        check(case, "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["alibi", "log_decay"])
@pytest.mark.parametrize("seed", [32119184, 0, 1])
def test_steep_decays_are_rounded_alike_in_both_passes_on_the_gpu(kind, seed):
    problem = Problem(recipe=None, batch=2, heads=2, kv_heads=1, q_len=132, k_len=255, dim=16, v_dim=16,
                      dtype=torch.float32, scale=1.0, layout="contiguous", seed=seed, dropout_p=0.0)  # fmt: skip
    check(Scored(problem, (kind,), shared=True, half=True), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_stages_that_do_not_fit_are_left_out_and_the_rest_is_exact_on_the_gpu(dtype, function):
    """The stages of dq at D=128 need more shared memory than a program has on Hopper."""
    recipe = Recipe("dense", {"q_len": 128, "k_len": 128, "block": (128, 128)}, (100,))
    problem = Problem(recipe, batch=1, heads=2, kv_heads=2, q_len=128, k_len=128, dim=128, v_dim=128, dtype=dtype,
                      scale=None, layout="contiguous", seed=0)  # fmt: skip
    check(Scored(problem, ("pair bias", function, "sink")), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, *FUNCTIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_all_gradients_have_the_same_bits_every_time_on_the_gpu(dtype, kind):
    case = Scored(local(dtype, 1000, dim=64, v_dim=64), (kind,))
    first = results(case, "triton", "cuda")
    for _ in range(5):
        again = results(case, "triton", "cuda")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_changed_scores_are_recorded_in_a_graph():
    q, k, v = (torch.randn(1, 4, 512, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    changes = scores.alibi(torch.rand(4, device="cuda")) + scores.softcap(30.0)
    mask = masks.causal(512).to("cuda")
    expected = attention(q, k, v, mask, scores=changes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mask, scores=changes)
    graph.replay()
    assert torch.equal(out, expected)
