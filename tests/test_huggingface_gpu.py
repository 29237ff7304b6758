from dataclasses import replace
from unittest import mock

import pytest
import torch

from experiments.benchmarks.huggingface.exactness import Yardstick
from experiments.benchmarks.huggingface.generation import COMPILED, DYNAMIC, SAME, STATIC, Way, same_tokens
from experiments.benchmarks.huggingface.implementations import OURS, with_attention
from experiments.benchmarks.huggingface.shapes import GENERATED, SHAPES, Shape
from sparseflash.huggingface import layer

transformers = pytest.importorskip("transformers", minversion="5.17")

DEVICE = torch.device("cuda")
TOKENS = 300
# The weights make attention neither uniform nor one-hot.
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.08,
}  # fmt: skip
GROUPED = SIZES | {"vocab_size": 64, "head_dim": 64, "num_key_value_heads": 2}
SMALL = {
    "llama": GROUPED,
    "gpt2": {"vocab_size": 64, "n_embd": 256, "n_layer": 2, "n_head": 4, "initializer_range": 0.08},
    "bert": SIZES | {"vocab_size": 64},
    "gemma2": GROUPED | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 2.0},
    "gpt-oss": GROUPED,
}
MODELS = {shape.name: replace(shape, small=SMALL[shape.name]) for shape in SHAPES if shape.name in SMALL}
MODELS["vit"] = Shape(
    "vit", model="ViTForImageClassification", config="ViTConfig", settings=SIZES | {"image_size": 64, "patch_size": 4},
    small={}, tokens=0, batch=2,
)  # fmt: skip
# Warnings of these packages about themselves are not ours to fix.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def made(name, dtype=torch.bfloat16):
    shape = MODELS[name]
    model = shape.made(dtype, DEVICE, tokens=TOKENS, small=True, check=True)
    return model, Yardstick.of(
        model,
        lambda seed: shape.inputs(model, DEVICE, tokens=TOKENS, batch=shape.batch if name == "vit" else 2, seed=seed),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_exact(name, dtype):
    model, yardstick = made(name, dtype)
    found = yardstick.compare(with_attention(model, OURS))
    assert found.exact, str(found)


def test_a_compiled_model_is_exact():
    model, yardstick = made("llama")
    ours = with_attention(model, OURS)
    torch.compiler.reset()
    found = yardstick.compare(ours, call=torch.compile(ours))
    assert found.exact, str(found)


def test_layers_that_are_computed_again_are_exact():
    model, yardstick = made("llama")
    ours = with_attention(model, OURS).train()
    ours.gradient_checkpointing_enable()
    with mock.patch.object(layer, "attention", wraps=layer.attention) as attention:
        found = yardstick.compare(ours)
    assert attention.call_count == 2 * 2
    assert found.exact, str(found)


def test_low_rank_adapters_have_exact_gradients():
    peft = pytest.importorskip("peft")
    shape = MODELS["llama"]
    model = shape.made(torch.float32, DEVICE, tokens=TOKENS, small=True, check=True)

    def tuned(base):
        torch.manual_seed(1)
        targets = ["q_proj", "v_proj"]
        config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(base, config).eval()

    ours = tuned(with_attention(model, OURS))
    eager = tuned(model)
    yardstick = Yardstick.of(eager, lambda seed: shape.inputs(eager, DEVICE, tokens=TOKENS, batch=2, seed=seed))
    assert len(yardstick.truth) == 1 + 2 * 2 * 2
    found = yardstick.compare(ours)
    assert found.exact, str(found)


def test_a_model_that_is_loaded_onto_the_gpu_gives_the_same(tmp_path):
    pytest.importorskip("accelerate")
    model = MODELS["llama"].made(torch.bfloat16, DEVICE, tokens=TOKENS, small=True, check=True)
    ours = with_attention(model, OURS)
    ours.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, device_map=str(model.device), dtype=torch.bfloat16, attn_implementation="block_sparse"
    )
    # Transformers computed the rotary frequencies of one model on the CPU, of the other on the GPU: last bits differ.
    for name, buffer in loaded.named_buffers():
        ours.get_buffer(name).copy_(buffer)
    ids = MODELS["llama"].inputs(model, DEVICE, tokens=TOKENS, batch=2)["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, ours(ids).logits)


def test_the_trainer_has_the_losses_of_eager_attention(tmp_path):
    pytest.importorskip("accelerate")
    shape = MODELS["llama"]
    model = shape.made(torch.float32, DEVICE, tokens=TOKENS, small=True, check=True)
    ids = shape.inputs(model, torch.device("cpu"), tokens=TOKENS, batch=16)["input_ids"]
    start = {name: each.clone() for name, each in model.state_dict().items()}
    losses = []
    for name in ("eager", OURS):
        trained = with_attention(model, name)
        trained.load_state_dict(start)
        arguments = transformers.TrainingArguments(
            str(tmp_path / name), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE.type == "cpu",
        )  # fmt: skip
        trainer = transformers.Trainer(trained, arguments, train_dataset=[{"input_ids": x, "labels": x} for x in ids])
        trainer.train()
        losses.append([float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", [DYNAMIC, STATIC, COMPILED])
def test_a_batch_with_padding_on_the_left_generates_eagers_tokens(cache):
    """In fp32, where rounding does not choose the tokens."""
    shape = replace(GENERATED, small=GROUPED)
    model = shape.made(torch.float32, DEVICE, tokens=TOKENS, small=True, check=False)
    torch.compiler.reset()
    assert same_tokens(model, [Way(OURS, cache)]) == {f"{OURS}, {cache}": SAME}


def test_a_finished_mask_of_one_block_is_not_waited_for():
    q, k, v = (torch.randn(8, 3, 49, 32, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.randn(8, 1, 49, 49, device=DEVICE, dtype=torch.bfloat16)
    called = layer.Attention(None, 128)
    called(torch.nn.Module(), q, k, v, mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        called(torch.nn.Module(), q, k, v, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
