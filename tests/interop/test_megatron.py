import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from sparseflash import attention, masks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

from sparseflash.interop.megatron import SparseDotProductAttention  # noqa: E402

N, TOKENS = 40, torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(0))
CAUSAL = torch.ones(1, 1, N, N, dtype=torch.bool).triu(1)  # True: dead


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(tensor_parallel.get_cuda_rng_tracker(), "fork", lambda *_: nullcontext(), raising=False)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def built(core_attention, **options):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    others = {"use_cpu_initialization": True, "pipeline_dtype": torch.float32, "attention_dropout": 0.0}
    config = TransformerConfig(**sizes, **others, hidden_dropout=0.0, **options)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core_attention
    torch.manual_seed(0)
    return GPTModel(config, spec, vocab_size=128, max_sequence_length=N)


def run(model, mask=None):
    return model(TOKENS, torch.arange(N).expand(2, -1), mask, labels=TOKENS.roll(-1, 1))


def alike(ours, theirs, mask, their_mask):
    got, want = run(ours, mask), run(theirs, their_mask)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(loss.mean(), list(m.parameters())) for loss, m in ((got, ours), (want, theirs))]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mask", [None, CAUSAL])
@pytest.mark.parametrize("options", [{}, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}])
def test_a_causal_model_is_that_of_megatron(mask, options):
    alike(built(SparseDotProductAttention, **options), built(DotProductAttention, **options), mask, CAUSAL)


def test_a_pattern_is_what_its_mask_is():
    pattern = partial(masks.local, window=9, causal=True)
    dead = ~pattern(N).to_dense()
    alike(built(partial(SparseDotProductAttention, pattern=pattern)), built(DotProductAttention), None, dead)


def test_masks_of_the_batch_are_taken():
    document = torch.tensor([[0] * 11 + [1] * 29, [0] * 40])
    dead = CAUSAL | (document[:, None, :, None] != document[:, None, None])
    alike(built(SparseDotProductAttention), built(DotProductAttention), dead, dead)


def test_a_window_of_the_config_is_its_layers():
    options = {"window_size": (8, 0), "window_attn_skip_freq": [0, 1]}
    model = built(SparseDotProductAttention, **options)
    first, second = (layer.self_attention.core_attention for layer in model.decoder.layers)
    q, k, v = torch.randn(N, 2, 4, 16), torch.randn(N, 2, 2, 16), torch.randn(N, 2, 2, 16)
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    for layer, mask in ((first, masks.causal(N)), (second, masks.local(N, left=8, right=0))):
        want = attention(*heads, mask).permute(2, 0, 1, 3).flatten(2)
        torch.testing.assert_close(layer(q, k, v, None), want)


def test_the_softmax_offset_is_that_of_megatron():
    ours, theirs = built(SparseDotProductAttention), built(DotProductAttention)
    offsets = [torch.nn.Parameter(torch.linspace(-1, 1, 4)) for _ in range(2)]
    for model, offset in zip((ours, theirs), offsets):
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.softmax_offset = offset
    alike(ours, theirs, None, CAUSAL)


def test_packed_sequences_are_each_their_own():
    core = built(SparseDotProductAttention).decoder.layers[0].self_attention.core_attention
    q, k, v = torch.randn(N, 4, 16), torch.randn(N, 2, 16), torch.randn(N, 2, 16)
    sums = torch.tensor([0, 11, N], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=sums, cu_seqlens_kv=sums)
    got = core(q, k, v, None, packed_seq_params=packed)
    parts = [core(*(x[at][:, None] for x in (q, k, v)), None)[:, 0] for at in (slice(0, 11), slice(11, N))]
    torch.testing.assert_close(got, torch.cat(parts))
    padded = PackedSeqParams(qkv_format="thd", cu_seqlens_q=sums, cu_seqlens_kv=sums, cu_seqlens_q_padded=sums + 1)
    with pytest.raises(ValueError, match="cu_seqlens_q_padded must be None: pack sequences without padding between"):
        core(q, k, v, None, packed_seq_params=padded)


def test_what_cannot_be_taken_is_refused_in_a_sentence():
    core = (
        built(partial(SparseDotProductAttention, pattern=masks.causal)).decoder.layers[0].self_attention.core_attention
    )
    x = torch.randn(N, 2, 4, 16)
    with pytest.raises(ValueError, match="attention_mask must be None with a pattern, which says what is live"):
        core(x, x, x, CAUSAL)
    with pytest.raises(ValueError, match="attention_bias must be None, as for DotProductAttention; got 'a tensor'"):
        core(x, x, x, None, attention_bias=CAUSAL)
