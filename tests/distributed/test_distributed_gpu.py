import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparseflash import attention, distributed, dropout, masks, testing
from sparseflash.backends.triton.changes.own_source import MOST_ENTRIES
from tests.compared.scored import FUNCTIONS, SHARDED, scored
from tests.distributed import sharded_attention
from tests.distributed.sharded_attention import check_dropping, check_scored, check_transports, sharded
from tests.drawn.counts import examples_times
from tests.drawn.problems import problems
from tests.processes.pool import Processes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pool():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs; there is {count}")
    with Processes(min(count, 4), timeout=300, backend="nccl") as processes:
        yield processes


def tensors(mask, heads, kv_heads, dim=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, mask.q_len), (kv_heads, mask.k_len), (kv_heads, mask.k_len)
    return [torch.randn(1, *size, dim, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@given(data=st.data())
@examples_times(1 / 4)
def test_it_is_as_exact_as_attention_on_one_gpu(pool, dtype, stages, data):
    problem = data.draw(
        problems(most_tokens=600, head_dims=(64,), value_dims=(64,), blocks=(32, 64), dtypes=(dtype,))
    )  # fmt: skip
    mask, ranks = problem.mask, len(pool.pipes)
    assume(mask is not None)
    block = max(mask.block_q, mask.block_k)
    assume(min(mask.q_len, mask.k_len) > (ranks - 1) * block)
    q, k, v, dout, dlse = problem.tensors()
    function = sharded(pool, ranks, mask, {"strategy": "keys", "stages": stages}, scale=problem.scale)
    testing.assert_exact(function, q, k, v, mask, scale=problem.scale, dout=dout, dlse=dlse)


@given(
    case=scored(
        kinds=(*SHARDED, *FUNCTIONS),
        most_tokens=300,
        head_dims=(64,),
        value_dims=(64,),
        blocks=(32, 64),
        dtypes=(torch.bfloat16, torch.float32),
        dropouts=(0.0, 0.0, 0.3),
    ),
    strategy=st.sampled_from(["keys", "queries"]),
)
@examples_times(1 / 6)
def test_changed_scores_are_as_exact(pool, case, strategy):
    mask, ranks = case.problem.mask, len(pool.pipes)
    assume(mask is not None and min(mask.q_len, mask.k_len) > (ranks - 1) * max(mask.block_q, mask.block_k))
    assume("function of tables" not in case.kinds or mask.q_len * mask.k_len <= MOST_ENTRIES)
    check_scored(pool, ranks, case, {"strategy": strategy})


@pytest.mark.parametrize("strategy", ["keys", "queries"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@given(data=st.data())
@examples_times(1 / 4)
def test_dropout_is_that_of_one_gpu(pool, dtype, strategy, data):
    problem = data.draw(
        problems(
            most_tokens=600, head_dims=(64,), value_dims=(64,), blocks=(16, 64), dtypes=(dtype,), dropouts=(0.1, 0.5)
        )
    )  # fmt: skip
    mask, ranks = problem.mask, len(pool.pipes)
    assume(mask is not None and min(mask.q_len, mask.k_len) > (ranks - 1) * max(mask.block_q, mask.block_k))
    check_dropping(pool, ranks, problem, {"strategy": strategy})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", ["keys", "queries", "heads"])
def test_the_weights_that_one_gpu_keeps_are_kept(pool, strategy, dtype):
    mask = masks.per_head([masks.local(248, window=99, block=16), masks.butterfly(248, block=16)] * 2)
    q, k, _ = tensors(mask, heads=4, kv_heads=2, dtype=dtype)
    v = torch.eye(248, dtype=dtype).expand(1, 2, 248, 248)
    first, second = (
        sharded(pool, 2, mask, {"strategy": strategy}, dropout_p=0.5, seed=11)(q, k, v)[0] for _ in range(2)
    )
    assert torch.equal(first, second)
    plain = attention(*(x.double() for x in (q, k, v)), mask, backend="reference")
    kept = dropout.keep_mask(11, 0.5, 1, 4, 248, 248) & (plain != 0)
    assert torch.equal(first != 0, kept)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "keys", "stages": 0, "transport": "collective"},
        {"strategy": "keys", "stages": 2, "transport": "collective"},
        {"strategy": "keys", "stages": 0, "transport": "peer"},
        {"strategy": "keys", "stages": 2, "transport": "peer"},
        {"strategy": "heads"},
    ],
    ids=str,
)
@pytest.mark.parametrize("pattern", [masks.causal, masks.butterfly])
def test_long_sequences_are_exact_and_the_same_every_time(pool, options, pattern):
    mask = pattern(8192)
    q, k, v = tensors(mask, heads=8, kv_heads=4)
    function = sharded(pool, 2, mask, options)
    testing.assert_exact(function, q, k, v, mask, heads=2, blocks=8)
    results = []
    for _ in range(3):
        out, lse = function(q, k, v)
        results.append([out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


@pytest.mark.parametrize("strategy", ["keys", "queries"])
def test_both_transports_give_the_same_bits(pool, strategy):
    check_transports(pool, 2, strategy)


def test_live_remote_keys_travel_and_nothing_else(pool):
    mask = masks.butterfly(8192)
    q, k, v = tensors(mask, heads=8, kv_heads=4)
    sharded(pool, 2, mask, {"strategy": "keys"})(q, k, v)
    needed = int(distributed.shard(mask, ranks=2).traffic(1, 4).sent.sum())
    assert sum(total for total, _ in pool.run(2, sharded_attention.sent)) == needed * 2 * 64 * 2
