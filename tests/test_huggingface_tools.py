import copy

import pytest
import torch

from sparseflash import huggingface, masks

transformers = pytest.importorskip("transformers", minversion="5.17")

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
IDS = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(0))
# Warnings of these packages about themselves are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def pair():
    huggingface.register(block=16)
    theirs, ours = llama(), llama()
    theirs.set_attn_implementation("sdpa")
    ours.set_attn_implementation("block_sparse")
    return theirs, ours


@pytest.mark.parametrize("left", [0, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}, {"use_cache": False},
        {"num_beams": 3, "cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16},
    ],
    ids=str,
)  # fmt: skip
def test_every_way_to_generate_gives_sdpas_tokens(options, left):
    ids = IDS[:1] if "prompt_lookup_num_tokens" in options else IDS
    tokens = torch.ones_like(ids)
    tokens[0, :left] = 0
    options = {"attention_mask": tokens, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    theirs, ours = pair()
    assert torch.equal(theirs.generate(ids, **options), ours.generate(ids, **options))


def test_sampling_and_assisted_decoding_give_sdpas_tokens():
    found = []
    for model in pair():
        torch.manual_seed(3)
        sampled = model.generate(IDS, max_new_tokens=12, do_sample=True, pad_token_id=0)
        helped = model.generate(
            IDS[:1], assistant_model=copy.deepcopy(model), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        found.append((sampled, helped))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_model_on_the_meta_device_gives_shapes():
    huggingface.register(masks.local(64, window=9, block=16))
    with torch.device("meta"):
        model = llama()
    model.set_attn_implementation("block_sparse")
    logits = model(IDS.to("meta")).logits
    assert logits.shape == (2, 40, 64) and logits.device.type == "meta"


def test_an_export_says_that_it_cannot_be():
    _, ours = pair()
    with pytest.raises(NotImplementedError, match=r"torch\.export must see a mask made of tensors"):
        torch.export.export(ours, (), {"input_ids": IDS, "use_cache": False}, strict=False)


def test_lora_trains_saves_loads_and_merges(tmp_path):
    peft = pytest.importorskip("peft")
    found = []
    for model in pair():
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        tuned = peft.get_peft_model(model, config)
        out = tuned(input_ids=IDS, labels=IDS)
        out.loss.backward()
        gradients = [parameter.grad for parameter in tuned.parameters() if parameter.grad is not None]
        assert len(gradients) == 2 * 2 * 2
        tuned.save_pretrained(tmp_path)
        base = llama()
        base.set_attn_implementation(model.config._attn_implementation)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        torch.testing.assert_close(loaded(IDS).logits, out.logits)
        merged = tuned.eval().merge_and_unload()
        found.append([out.logits.detach(), *gradients, merged.generate(IDS, max_new_tokens=8, pad_token_id=0)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_the_trainer_checkpoints_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    rows = torch.randint(1, 64, (16, 40), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    losses = []
    for model in pair():
        folder = tmp_path / model.config._attn_implementation
        options = {"report_to": [], "use_cpu": True, "logging_steps": 1, "save_steps": 3, "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=6, per_device_train_batch_size=4, gradient_checkpointing=True, **options
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        losses.append([float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
        end = model.eval()(IDS).logits
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        torch.testing.assert_close(model.eval()(IDS).logits, end)
        loaded = transformers.LlamaForCausalLM.from_pretrained(
            folder / "checkpoint-6", attn_implementation=model.config._attn_implementation
        )
        torch.testing.assert_close(loaded(IDS).logits, end)
    assert len(losses[0]) == 6
    torch.testing.assert_close(*map(torch.tensor, losses), **CLOSE)


def test_accelerate_trains_in_mixed_precision():
    accelerate = pytest.importorskip("accelerate")
    rows = IDS.repeat(4, 1)
    losses = []
    for model in pair():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2)
        )
        losses.append([])
        for batch in batches:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[1][-1] < losses[1][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=2e-3, atol=0)


@pytest.mark.parametrize("where", ["cpu", "auto", "disk"])
def test_a_device_map_changes_nothing(where, tmp_path):
    pytest.importorskip("accelerate")
    _, ours = pair()
    ours.save_pretrained(tmp_path)
    parts = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    split = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    options = {"device_map": split, "offload_folder": tmp_path / "parts"} if where == "disk" else {"device_map": where}
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="block_sparse", **options)
    torch.testing.assert_close(loaded(IDS).logits, ours(IDS).logits)
    choice = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(IDS, **choice), ours.generate(IDS, **choice))
