import copy
import inspect
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import sparseflash
from sparseflash import BlockMask, huggingface, masks
from sparseflash.huggingface import layer, model_mask
from sparseflash.huggingface.model_mask import ModelMask
from sparseflash.huggingface.rules import fingerprint, unpacked
from tests.drawn.masks import block_masks
from tests.processes.forked import python

transformers = pytest.importorskip("transformers", minversion="5.17")
rules = pytest.importorskip("transformers.masking_utils")

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VIEWS = ("aten::transpose.int", "aten::detach", "aten::alias")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
LLAMA = transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)
# Transformers 5.24 has renamed them.
CACHE = "cache" if "cache" in inspect.signature(LLAMA[0].forward).parameters else "past_key_values"
GPT2 = (
    transformers.GPT2LMHeadModel,
    transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None),
)
MISTRAL = transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=16)
GPT_OSS = (
    transformers.GptOssForCausalLM,
    transformers.GptOssConfig(**SIZES, sliding_window=16, num_local_experts=2, num_experts_per_tok=1),
)
BERT = transformers.BertModel, transformers.BertConfig(**{**SIZES, "pad_token_id": 0})
BART = (
    transformers.BartModel,
    transformers.BartConfig(
        vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.2,
    ),
)  # fmt: skip
LLAMA4 = (
    transformers.Llama4ForCausalLM,
    transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=16
    ),
)
GEMMA4 = (
    transformers.Gemma4ForCausalLM,
    transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 4}, global_head_dim=16, sliding_window=8, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=16,
    ),
)  # fmt: skip
MINIMAX = (
    transformers.MiniMaxM3VLForCausalLM,
    transformers.MiniMaxM3VLTextConfig(
        **SIZES, dense_intermediate_size=64, shared_intermediate_size=64, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention", "minimax_m3_sparse"], mlp_layer_types=["dense", "dense"], index_n_heads=2,
        index_head_dim=16, index_block_size=4, index_topk_blocks=2, index_local_blocks=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
)  # fmt: skip
GEMMA2 = (
    transformers.Gemma2ForCausalLM,
    transformers.Gemma2Config(**SIZES, sliding_window=16, attn_logit_softcapping=0.05, query_pre_attn_scalar=16),
)
GEMMA3_SIZES = {
    **SIZES, "num_hidden_layers": 3, "sliding_window": 16, "query_pre_attn_scalar": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA3 = transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**GEMMA3_SIZES)
T5 = (
    transformers.T5Model,
    transformers.T5Config(
        vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=20, dropout_rate=0.0,
    ),
)  # fmt: skip
SWIN = (
    transformers.SwinModel,
    transformers.SwinConfig(
        image_size=32, patch_size=2, num_channels=3, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    ),
)
VIT = (
    transformers.ViTModel,
    transformers.ViTConfig(
        **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        num_attention_heads=4, image_size=32, patch_size=4,
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    huggingface.register(block=16)


def pair(model, own="eager", ours="block_sparse"):
    kind, config = model
    torch.manual_seed(0)
    theirs = kind(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "sink" in name or "relative" in name:
                parameter.normal_()
    other = copy.deepcopy(theirs)
    theirs.set_attn_implementation(own)
    other.set_attn_implementation(ours)
    return theirs, other


def ids(length, batch=2, seed=0):
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def compared(theirs, ours, kept=None, **inputs):
    results = []
    for model in (theirs, ours):
        model.zero_grad()
        out = model(**inputs)[0]
        out = out if kept is None else out[kept]
        out.square().mean().backward()
        results.append([out.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def name_of(model):
    return model[0].__name__


def padded(where, length=70):
    tokens = torch.ones(2, length, dtype=torch.long)
    tokens[0] = {
        "right": torch.arange(length) < length - 20,
        "left": torch.arange(length) >= 20,
        "scattered": torch.arange(length) % 7 > 0,
    }[where]
    return tokens


@pytest.mark.parametrize("model", [LLAMA, MISTRAL, GPT_OSS, LLAMA4, GEMMA3, GEMMA4, BERT], ids=name_of)
@pytest.mark.parametrize("padding", ["none", "right", "left", "scattered"])
def test_a_model_gives_what_it_gives_with_its_own_attention(model, padding):
    tokens = None if padding == "none" else padded(padding)
    # Implementations differ for queries without a live key.
    everywhere = tokens is None or (padding == "right" and model in (LLAMA, BERT))
    kept = None if everywhere else tokens.bool()
    compared(*pair(model), kept=kept, input_ids=ids(70), attention_mask=tokens)


@pytest.mark.parametrize("target", [39, 40])
def test_cross_attention_sees_all_but_the_padding_of_the_source(target):
    inputs = {"input_ids": ids(40), "attention_mask": padded("right", 40), "decoder_input_ids": ids(40)[:, :target]}
    compared(*pair(BART), **inputs)


def test_cross_attention_has_no_pattern():
    pattern = masks.local(64, window=9, block=16)
    huggingface.register(pattern)
    theirs, ours = pair(BART)
    inputs = {"input_ids": ids(40), "decoder_input_ids": ids(20)}
    with pytest.raises(ValueError, match="a pattern must be for self-attention; got 20 queries and 40 keys"):
        ours(**inputs)
    crossing = ours.decoder.layers[0].encoder_attn
    huggingface.register(lambda module: None if module is crossing else masks.local(64, window=127, block=16), block=16)
    compared(theirs, ours, **inputs)


def test_a_prompt_that_is_seen_by_all_of_it():
    vision = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model", **vision, "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
            "vision_use_head": False, "projection_dim": 64,
        },
        text_config={"model_type": "gemma", **SIZES}, image_token_index=63, vocab_size=64, projection_dim=64,
        hidden_size=64,
    )  # fmt: skip
    tokens = ids(40).clamp(max=62)
    tokens[:, :4] = 63
    images = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    prompt = torch.arange(40).expand(2, -1) >= 15
    compared(
        *pair((transformers.PaliGemmaForConditionalGeneration, config)), input_ids=tokens, pixel_values=images,
        token_type_ids=prompt.long(),
    )  # fmt: skip


def test_images_whose_tokens_see_one_another_in_layers_with_and_without_windows():
    vision = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.Gemma3Config(
        text_config=GEMMA3_SIZES, vision_config={**vision, "num_attention_heads": 4, "image_size": 28, "patch_size": 7},
        mm_tokens_per_image=4, image_token_index=62, boi_token_index=60, eoi_token_index=61,
    )  # fmt: skip
    tokens = ids(50).clamp(max=59)
    tokens[:, 5:9] = tokens[0, 30:34] = 62
    inputs = {
        "input_ids": tokens, "token_type_ids": (tokens == 62).long(),
        "pixel_values": torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
    }  # fmt: skip
    theirs, ours = pair((transformers.Gemma3ForConditionalGeneration, config))
    compared(theirs, ours, **inputs)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(theirs.generate(**inputs, **options), ours.generate(**inputs, **options))


def test_a_model_without_masks_sees_everything():
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    compared(*pair(VIT), pixel_values=images)


def test_packed_sequences_see_themselves():
    places = torch.cat([torch.arange(30), torch.arange(40)])[None].expand(2, -1)
    compared(*pair(LLAMA), input_ids=ids(70), position_ids=places, use_cache=False)


def additive(live):
    return torch.where(live, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", ["additive", "bool", "-10000"])
def test_a_pattern_is_what_it_is_in_a_dense_mask(kind):
    pattern = masks.local(100, window=9, block=16) | masks.butterfly(100, block=16)
    huggingface.register(pattern)
    theirs, ours = pair(LLAMA, own="sdpa" if kind == "bool" else "eager")
    live = (pattern & masks.causal(100, block=16)).crop(q=(0, 70), k=(0, 70)).to_dense().expand(2, 1, -1, -1)
    finished = live if kind == "bool" else additive(live) if kind == "additive" else (~live) * -1e4
    with torch.no_grad():
        want = theirs(ids(70), attention_mask=finished).logits
        torch.testing.assert_close(ours(ids(70)).logits, want, **CLOSE)
        torch.testing.assert_close(ours(ids(70), attention_mask=finished).logits, want, **CLOSE)
        every = theirs(ids(70)).logits
    assert not torch.allclose(want, every, **CLOSE)


def test_each_layer_may_have_a_pattern_of_its_own():
    patterns = [masks.local(70, window=9, block=16), None]
    huggingface.register(lambda module: patterns[module.layer_idx], block=16)
    theirs, ours = pair(LLAMA)
    theirs.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": every}), with_kwargs=True
    )
    causal = masks.causal(70, block=16)
    near, every = (additive(mask.to_dense()) for mask in (patterns[0] & causal, causal))
    with torch.no_grad():
        want = theirs(ids(70, batch=1), attention_mask=near).logits
        torch.testing.assert_close(ours(ids(70, batch=1)).logits, want, **CLOSE)


@pytest.mark.parametrize("model", [LLAMA, GPT2, MISTRAL, GPT_OSS, GEMMA3, GEMMA4], ids=name_of)
@pytest.mark.parametrize(("left", "cache"), [(0, None), (4, None), (4, "static")])
def test_generated_tokens_are_those_of_its_own_attention(model, left, cache):
    theirs, ours = pair(model)
    tokens = torch.ones(2, 9, dtype=torch.long)
    tokens[0, :left] = 0
    options = {
        "attention_mask": tokens, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0,
        "cache_implementation": cache,
    }  # fmt: skip
    assert torch.equal(theirs.generate(ids(9), **options), ours.generate(ids(9), **options))


def test_a_cache_changes_nothing():
    huggingface.register(masks.local(100, window=9, block=16) | masks.strided(100, stride=8, block=16))
    _, ours = pair(LLAMA)
    with torch.no_grad():
        whole, cache, found = ours(ids(70)).logits, None, []
        for begin, end in [(0, 9), (9, 40), *((i, i + 1) for i in range(40, 70))]:
            out = ours(ids(70)[:, begin:end], **{CACHE: cache}, use_cache=True)
            cache = out[CACHE]
            found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, **CLOSE)


@pytest.mark.parametrize("length", [10, 40])
def test_layers_with_windows_forget_in_their_caches(length):
    """Parts shorter and longer than the window, behind caches of two kinds."""
    results = []
    for model in pair(GEMMA3):
        cache, found = None, []
        with torch.no_grad():
            for part in ids(70).split([length, 20, 1, 1, 48 - length], 1):
                out = model(part, **{CACHE: cache}, use_cache=True)
                cache = out[CACHE]
                found.append(out.logits)
            whole = model(ids(70)).logits
        results += [torch.cat(found, 1), whole]
    for each in results[1:]:
        torch.testing.assert_close(each, results[0], **CLOSE)


@pytest.mark.parametrize("model", [LLAMA, MISTRAL, GEMMA2, GPT_OSS], ids=name_of)
@pytest.mark.parametrize("pattern", [None, masks.streaming(100, window=9, sink=2, block=16)], ids=["none", "pattern"])
def test_no_mask_is_built_for_a_generated_token(model, pattern):
    huggingface.register(pattern)
    _, ours = pair(model)
    tokens = torch.ones(2, 9, dtype=torch.long)
    tokens[0, :4] = 0
    options = {"attention_mask": tokens, "do_sample": False, "pad_token_id": 0}
    with (
        mock.patch.object(model_mask, "rule_mask", wraps=model_mask.rule_mask) as built,
        mock.patch.object(layer, "attention_with_cache", wraps=layer.attention_with_cache) as decoded,
    ):
        got = ours.generate(ids(9), max_new_tokens=8, **options)
    assert built.call_count <= 1
    assert decoded.call_count == 7 * 2
    with mock.patch.object(model_mask, "FEW", 0):
        assert torch.equal(ours.generate(ids(9), max_new_tokens=8, **options), got)


def test_padding_that_is_not_on_the_left_gets_a_mask():
    _, ours = pair(LLAMA)
    tokens = torch.ones(2, 9, dtype=torch.long)
    tokens[0, 3:5] = 0
    with (
        torch.no_grad(),
        mock.patch.object(layer, "attention_with_cache", side_effect=AssertionError("decoded")),
    ):
        ours.generate(ids(9), attention_mask=tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_a_static_cache_is_seen_as_far_as_it_is_filled():
    _, ours = pair(LLAMA)
    cache = transformers.StaticCache(ours.config, max_cache_len=64)
    with torch.no_grad():
        want = ours(ids(30)).logits
        found = [ours(ids(30)[:, i : i + 10], **{CACHE: cache}).logits for i in (0, 10, 20)]
        torch.testing.assert_close(torch.cat(found, 1), want, **CLOSE)


def test_dropout_is_that_of_training():
    _, ours = pair((LLAMA[0], transformers.LlamaConfig(**SIZES, attention_dropout=0.5)))
    with torch.no_grad():
        plain = ours(ids(70)).logits
        assert torch.equal(ours(ids(70)).logits, plain)
        assert not torch.allclose(ours.train()(ids(70)).logits, plain, **CLOSE)


@pytest.fixture
def compiles_anew():
    torch.compiler.reset()


def test_a_compiled_model_builds_its_masks_once(compiles_anew):
    """While it traces, Transformers cannot see that nothing is packed, and makes a rule of a tensor."""
    model_mask._masks.clear()
    _, ours = pair(GEMMA3)
    compiled = torch.compile(ours, backend="eager")
    with (
        torch.no_grad(),
        mock.patch.object(model_mask, "rule_mask", side_effect=model_mask.rule_mask) as made,
    ):
        for _ in range(3):
            compiled(ids(70), use_cache=False)
    assert made.call_count == 2  # of layers with windows and without


@pytest.mark.parametrize("patterned", [False, True])
def test_layers_break_no_graph_of_a_compiled_model(patterned, compiles_anew):
    """The graph breaks once, where masks are made."""
    huggingface.register(masks.local(80, window=30, causal=True) if patterned else None, name="whole")

    def compiled(layers):
        torch.compiler.reset()
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": layers})).eval()
        model.set_attn_implementation("whole")
        graphs, counts = [], set()
        called = torch.compile(model, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1])
        for padding in (9, 17, 30):
            tokens = torch.ones(2, 70, dtype=torch.long)
            tokens[1, :padding] = 0
            inputs = {"attention_mask": tokens, "use_cache": False}
            with torch.no_grad():
                torch.testing.assert_close(called(ids(70), **inputs).logits, model(ids(70), **inputs).logits, **CLOSE)
            counts.add(len(graphs))
        (count,) = counts
        return count

    assert compiled(1) == compiled(4)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("own", [rules.causal_mask_function, rules.sliding_window_causal_mask_function(9)])
def test_a_rule_of_packed_sequences_is_kept_where_a_row_has_two(own, moves):
    """moves: newer versions let the model's rule see the positions in the sequences."""
    if moves and not hasattr(rules, "remap_positions_for_packed_sequence"):
        pytest.skip("this version of Transformers has no such rule")
    for second in (0, 1):
        sequences = torch.zeros(2, 40, dtype=torch.long)
        sequences[1, 25:] = second
        places = torch.arange(40).expand(2, -1)
        first = rules.remap_positions_for_packed_sequence(own, places) if moves else own
        rule = rules.and_masks(first, rules.packed_sequence_mask_function(sequences))
        assert unpacked(rule) is (rule if second else own)
    assert unpacked(own) is own and unpacked(user_rule) is user_rule


def test_packed_sequences_of_a_compiled_model_see_themselves(compiles_anew):
    places = torch.stack([torch.cat([torch.arange(30), torch.arange(40)]), torch.arange(70)])
    theirs, ours = pair(LLAMA)
    inputs = {"input_ids": ids(70), "position_ids": places, "use_cache": False}
    with torch.no_grad():
        got = torch.compile(ours, backend="eager")(**inputs).logits
        torch.testing.assert_close(got, theirs(**inputs).logits, **CLOSE)


# ---------------------------------------------------------------------- the masks, score by score


def user_rule(batch, head, q, k):
    return torch.arange(3)[q % 3] == torch.arange(3)[k % 3]


def rule_of(name, number, batch, length, seed):
    random = torch.Generator().manual_seed(seed)
    return {
        "causal": rules.causal_mask_function,
        "everything": rules.bidirectional_mask_function,
        "window": rules.sliding_window_causal_mask_function(number),
        "window both ways": rules.sliding_window_bidirectional_mask_function(number),
        "chunks": rules.chunked_causal_mask_function(number, torch.randint(0, 3, (batch,), generator=random)),
        "packed": rules.and_masks(
            rules.causal_mask_function,
            rules.packed_sequence_mask_function(torch.randint(0, 3, (batch, length), generator=random)),
        ),
        "a user's": rules.or_masks(user_rule, rules.causal_mask_function),
    }[name]  # fmt: skip


@given(
    name=st.sampled_from(["causal", "everything", "window", "window both ways", "chunks", "packed", "a user's"]),
    number=st.integers(1, 40),
    batch=st.integers(1, 3),
    queries=st.integers(1, 60),
    before=st.integers(0, 30),
    room=st.integers(0, 20),
    first=st.integers(0, 20),
    padding=st.sampled_from(["none", "right", "left", "any"]),
    pattern=st.one_of(st.none(), block_masks(130, blocks=(16, 32))),
    seed=st.integers(0, 1000),
)
@example("causal", 1, 2, 40, 0, 0, 0, "right", None, 0)
@example("window", 5, 3, 1, 20, 9, 4, "left", masks.local(130, window=9, block=16), 0)
def test_the_masks_are_transformers_own_within_the_pattern(
    name, number, batch, queries, before, room, first, padding, pattern, seed
):
    """first: keys dropped by a sliding cache; room: of a static cache."""
    q_offset, kv_length = first + before, before + queries + room
    stop = first + kv_length
    if pattern is not None:
        pattern = BlockMask.from_dense(enlarged(pattern.to_dense()[:1, :1], stop), block=pattern.block_q)
    tokens = None
    if padding != "none":
        random = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, stop + 1, (batch, 1), generator=random)
        tokens = {
            "right": torch.arange(stop) < counts,
            "left": torch.arange(stop) >= counts,
            "any": torch.rand(batch, stop, generator=random) < 0.7,
        }[padding]
    rule = rule_of(name, number, batch, stop, seed)
    asked = {
        "batch_size": batch, "q_length": queries, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": first,
        "mask_function": rule, "attention_mask": tokens, "use_vmap": name == "a user's",
    }  # fmt: skip
    want = rules.sdpa_mask(**asked, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    made = rules.ALL_MASK_ATTENTION_FUNCTIONS["block_sparse"](**asked)
    mask = made.within(pattern, torch.device("cpu"))
    if pattern is not None:
        want = want & pattern.to_dense()[:, :, q_offset : q_offset + queries, first:stop]
    live = torch.ones(()).bool() if mask is None else mask.to_dense()
    assert torch.equal(live.expand(batch, 1, queries, kv_length), want)
    some = made[:, :, queries // 2 :, :].within(pattern, torch.device("cpu"))
    live = torch.ones(()).bool() if some is None else some.to_dense()
    assert torch.equal(live.expand(batch, 1, -(-queries // 2), kv_length), want[:, :, queries // 2 :])


def test_the_room_of_a_cache_needs_no_mask_of_padding():
    """The mask of the rule is used as it is, cached and planned."""
    tokens = torch.ones(2, 40, dtype=torch.bool)
    tokens[:, 30:] = False
    asked = {"queries": (0, 30), "keys": (0, 40), "may_cross": False, "block": 16}
    once, again = (
        ModelMask(rules.causal_mask_function, 2, padding=tokens, device=torch.device("cpu"), **asked).within(
            None, torch.device("cpu")
        )
        for _ in range(2)
    )
    assert once is again and once.shape == (1, 1, 30, 40)


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 4, 4), torch.full((4, 4), -1e9).triu(1)[None, None]])
def test_a_finished_mask_is_read_with_one_synchronisation(mask, monkeypatch):
    read = []

    def noted(name, real):
        return lambda self: (read.append(name), real(self))[1]

    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noted(name, getattr(torch.Tensor, name)))
    layer._parts(mask)
    assert read == ["tolist"]


@pytest.mark.parametrize("kind", ["bool", "float", "learned", "-10000", "of three dimensions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_finished_mask_of_one_block_is_not_read(kind, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, 40, 16, generator=generator).to(dtype) for _ in range(4))
    live = torch.rand(2, 1, 40, 40, generator=generator) < 0.5
    live[0, :, 3] = live[1, :, :, 5] = False
    mask = torch.randn(2, 1, 40, 40, generator=generator).masked_fill(~live, torch.finfo(dtype).min).to(dtype)
    if kind == "bool":
        mask = live
    elif kind == "-10000":
        mask = ((~live) * -1e4).to(dtype)
    elif kind == "of three dimensions":
        mask = mask[0]
        q, k, v, dout = (x[:1] for x in (q, k, v, dout))
    mask.requires_grad_(kind == "learned")

    def results(block):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        called = layer.Attention(None, block)
        out, _ = called(torch.nn.Module(), *inputs, mask, scaling=0.25)
        learned = [mask] if kind == "learned" else []
        return out, *torch.autograd.grad(out, inputs + learned, dout.transpose(1, 2))

    want = results(16)
    monkeypatch.setattr(layer, "_parts", mock.Mock(side_effect=AssertionError("read")))
    got = results(128)
    assert not got[0][0, 3].any() and got[0].any()
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_finished_mask_of_one_block_breaks_no_graph(compiles_anew):
    q, k, v = (torch.randn(2, 4, 40, 16) for _ in range(3))
    mask = torch.zeros(2, 1, 40, 40).masked_fill(torch.rand(40, 40) < 0.5, -1e4)
    called = layer.Attention(None, 128)
    compiled = torch.compile(called, backend="eager", fullgraph=True)
    module = torch.nn.Module()
    got, want = (each(module, q, k, v, mask, scaling=0.25)[0] for each in (compiled, called))
    torch.testing.assert_close(got, want)


def test_a_finished_mask_of_one_block_takes_one_operation_besides_attention():
    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            called.append(function.name())
            return function(*arguments, **(keywords or {}))

    called = []
    q, k, v = (torch.randn(2, 40, 4, 16).transpose(1, 2) for _ in range(3))
    mask = torch.randn(2, 4, 40, 40)
    with Recorded():
        layer.Attention(None, 128)(torch.nn.Module(), q, k, v, mask, scaling=0.25)
    others = [name for name in called if name not in VIEWS and not name.startswith("sparseflash::")]
    assert others == ["aten::threshold"]


def test_a_finished_mask_of_one_block_leaves_large_scores_alone():
    q, k, v = (60 * torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0)) for _ in range(3))
    live = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    got, want = (layer.Attention(None, block)(torch.nn.Module(), q, k, v, live, scaling=8.0)[0] for block in (128, 16))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


def enlarged(dense, length):
    repeats = [-(-length // n) for n in dense.shape[2:]]
    return dense.repeat(1, 1, *repeats)


@pytest.mark.parametrize(
    "asks",
    [lambda b: b == 1, lambda b: b != 0, lambda b: b in (1,), lambda b: b > 0, lambda b: bool(b), lambda b: 0 + b],
)
def test_a_rule_may_ask_for_the_row_in_any_way(asks):
    def rule(batch, head, q, k):
        return (k <= q) | torch.as_tensor(asks(batch)).bool()

    asked = ModelMask(rule, 2, (0, 40), (0, 40), None, False, 16, torch.device("cpu"))
    live = asked.within(None, torch.device("cpu")).to_dense()
    assert torch.equal(live[0, 0], torch.ones(40, 40).tril().bool()) and live[1].all()


def test_masks_of_known_rules_are_kept():
    _, ours = pair(MISTRAL)
    seen = []
    attention = ours.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"].within(None, torch.device("cpu"))),
        with_kwargs=True,
    )
    with torch.no_grad():
        for length in (40, 40, 41):
            ours(ids(length))
    assert seen[0] is seen[1] is not seen[2]
    assert fingerprint(rules.sliding_window_causal_mask_function(3)) == fingerprint(
        rules.sliding_window_causal_mask_function(3)
    )
    assert fingerprint(rules.sliding_window_causal_mask_function(3)) != fingerprint(
        rules.sliding_window_causal_mask_function(4)
    )
    assert fingerprint(rules.and_masks(user_rule, rules.causal_mask_function)) is None
    assert fingerprint(rules.packed_sequence_mask_function(torch.zeros(1, 3))) is None


def test_what_is_kept_serves_batches_of_any_size():
    rule = rules.and_masks(rules.bidirectional_mask_function, rules.sliding_window_bidirectional_overlay(5))
    for batch in (3, 2, 1):
        asked = ModelMask(rule, batch, (0, 40), (0, 40), None, False, 16, torch.device("cpu"))
        live = asked.within(None, torch.device("cpu")).to_dense()
        assert torch.equal(live, masks.local(40, window=11, block=16).to_dense()), batch


def test_images_with_a_pattern_make_it_once():
    huggingface.register(masks.local(65, window=9, block=16))
    _, ours = pair(VIT)
    with mock.patch.object(model_mask, "rule_mask", side_effect=model_mask.rule_mask) as made:
        for _ in range(3):
            ours(pixel_values=torch.zeros(1, 3, 32, 32))
    assert made.call_count == 1


def test_what_is_kept_is_bounded():
    model_mask._masks.clear()
    for length in range(1, 3 * model_mask._KEPT):
        asked = ModelMask(rules.causal_mask_function, 1, (0, length), (0, length), None, False, 16, torch.device("cpu"))
        asked.within(None, torch.device("cpu"))
        assert len(model_mask._masks) <= model_mask._KEPT


def test_what_is_kept_is_freed_by_clear_caches():
    asked = ModelMask(rules.causal_mask_function, 1, (0, 40), (0, 40), None, False, 16, torch.device("cpu"))
    kept = weakref.ref(asked.within(None, torch.device("cpu")))
    del asked
    assert kept() is not None
    sparseflash.clear_caches()
    assert kept() is None


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("name", ["sparseflash", "a|b", "user/repository", "", None])
def test_names_that_transformers_would_read_are_refused(name):
    with pytest.raises(ValueError, match="name must be an identifier that does not contain flash"):
        huggingface.register(name=name)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_names_of_others_are_refused(name):
    with pytest.raises(ValueError, match="must not be the name of another"):
        huggingface.register(name=name)


@pytest.mark.parametrize("padding", ["none", "right"])
def test_a_soft_cap_of_the_scores_is_the_models_own(padding):
    tokens = None if padding == "none" else padded(padding)
    compared(*pair(GEMMA2), kept=None if tokens is None else tokens.bool(), input_ids=ids(70), attention_mask=tokens)


def test_relative_tables_get_their_gradients_in_encoder_and_decoder():
    inputs = {"input_ids": ids(40), "attention_mask": padded("right", 40), "decoder_input_ids": ids(31)}
    theirs, ours = pair(T5)
    compared(theirs, ours, **inputs)
    assert any("relative" in name and p.grad.abs().max() > 0 for name, p in ours.named_parameters())


def test_swins_biases_and_shifted_windows_are_its_own():
    theirs, ours = pair(SWIN)
    compared(theirs, ours, pixel_values=torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert any("relative" in name and p.grad.abs().max() > 0 for name, p in ours.named_parameters())


def test_what_a_finished_mask_adds_to_live_scores_is_added():
    added = torch.randn(2, 1, 40, 40, generator=torch.Generator().manual_seed(0))
    added = added.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    compared(*pair(LLAMA), input_ids=ids(40), attention_mask=added)


def test_a_function_of_a_length_is_refused_when_a_layer_calls_it():
    huggingface.register(lambda n: masks.local(n, window=9), name="of_length")
    model, _ = pair(LLAMA)
    model.set_attn_implementation("of_length")
    with pytest.raises(
        TypeError, match=r"attention module; called with \w*Attention, it raises '.*'\. Instead of a function of the"
    ) as raised:
        model(ids(40))
    assert "\n" not in str(raised.value)


def test_patterns_that_are_none_are_refused():
    with pytest.raises(TypeError, match="BlockMask"):
        huggingface.register(torch.ones(3, 3))
    for function in (masks.causal, partial(masks.local, window=9)):
        with pytest.raises(TypeError, match=r"function of an attention module; got a function of q_len\. Call it with"):
            huggingface.register(function)
    for function in (lambda q, k: k <= q, lambda b, h, q, k: k <= q, lambda: None):
        with pytest.raises(
            TypeError, match=r"got a function of \(.*\)\. From a rule on .*BlockMask\.from_function\(rule"
        ):
            huggingface.register(function)
    for function in (lambda module, other=None: None, lambda *given: None):
        huggingface.register(function)
    huggingface.register(lambda module: torch.ones(3, 3))
    with pytest.raises(TypeError, match="BlockMask"):
        pair(LLAMA)[1](ids(10))


def test_a_pattern_that_is_too_short_is_refused():
    huggingface.register(masks.local(60, window=9, block=16))
    _, ours = pair(LLAMA)
    with pytest.raises(ValueError, match=r"as long as a row of the batch, .* 70 tokens; it has 60 queries"):
        ours(ids(70))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MINIMAX, "needs blocks that it chooses itself"),
    ],
)
def test_what_is_no_mask_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        pair(model)[1](ids(10))


def test_weights_as_a_result_are_refused():
    _, ours = pair(LLAMA)
    with pytest.raises(ValueError, match=r"needs its weights as a result: select 'eager' for it \(output_attentions\)"):
        ours(ids(10), output_attentions=True)
    ours(ids(10), output_attentions=False)


def test_finished_masks_that_are_none_are_refused():
    _, ours = pair(LLAMA)
    with pytest.raises(TypeError, match="must be bool or floating point"):
        ours(ids(10), attention_mask=torch.ones(2, 1, 10, 10, dtype=torch.int64))
    huggingface.register(masks.local(60, window=9, block=16))
    with torch.no_grad():
        cache = ours(ids(10), use_cache=True)[CACHE]
        with pytest.raises(ValueError, match="must give the positions of its 3 queries among 13 keys"):
            ours(ids(3), **{CACHE: cache}, attention_mask=torch.ones(2, 1, 3, 13, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(10,), (2, 10, 10)])
def test_masks_that_are_neither_padding_nor_finished_are_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[batch, tokens\], .*; got \["):
        pair(LLAMA)[1](ids(10), attention_mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(1, 1, 40, 1), (1, 1, 3, 40), (1, 1, 40, 39)])
def test_a_finished_mask_of_other_sizes_is_refused(shape):
    q = torch.zeros(1, 2, 40, 16)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match="must be of 40 queries, or 1, and 40 keys; got shape"):
        layer.Attention(None, 128)(torch.nn.Module(), q, q, q, mask)


def test_masks_that_a_model_computes_with_are_told():
    asked = ModelMask(rules.causal_mask_function, 1, (0, 9), (0, 9), None, False, 16, torch.device("cpu"))
    for call in (lambda: asked + 1, lambda: torch.ones(()) + asked, lambda: asked[0], lambda: asked[:, :, ::2, :]):
        with pytest.raises(TypeError, match="this model computes with its masks"):
            call()
    with pytest.raises(AttributeError, match=r"computes with its masks \(\.dtype\)"):
        _ = asked.dtype


def test_without_transformers_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "from sparseflash import huggingface\n"
        "try:\n    huggingface.register()\n"
        "except ImportError as error:\n    print(error)"
    )
    done = python("-c", program)
    assert "needs Transformers 5.17 or newer" in done.stdout
