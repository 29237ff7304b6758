from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from experiments.lm.model import transformer
from experiments.lm.model.attention import attention_over
from experiments.lm.steps import AccumulatingSteps, Batch, check_recordable
from experiments.lm.train import Run
from experiments.training.cuda_graphs import GraphSteps
from experiments.training.optimizer import adamw, apply_gradients
from tests.experiments.lm.models import model_of, tiny, tokens
from tests.experiments.training.host_graphs import use_host_graphs
from tests.watched.waiting import NoWaiting, waiting_raises

CPU = torch.device("cpu")
LR = 1e-2


def batches(count, sequences, length=64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(300, (sequences, length + 1), generator=generator) for _ in range(count)]


def steps_of(model, part, device=CPU, **more):
    return AccumulatingSteps(model, adamw(model, LR, 0.1), device, part=part, clip=1.0, **more)


def same_weights(first, second):
    return all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


def losses_by_hand(model, found, part):
    """The gradients of the parts' losses, added up by autograd; clipping; AdamW."""
    optimizer, losses = adamw(model, LR, 0.1), []
    for ids in found:
        optimizer.zero_grad()
        total = torch.zeros(())
        for each in ids.split(part):
            loss = model(each[:, :-1], each[:, 1:]) * (len(each) / len(ids))
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        apply_gradients(optimizer, LR)
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("sequences", "part", "graphs"), [(4, 4, 1), (6, 2, 2), (5, 2, 2)])
def test_steps_in_parts_have_the_bits_of_their_definition(monkeypatch, recorded, sequences, part, graphs):
    use_host_graphs(monkeypatch)
    model, other = model_of("local,dense", "sdpa"), model_of("local,dense", "sdpa")
    found = batches(3, sequences)
    steps = steps_of(other, part, recorded=recorded)
    steps.prepare(Batch(found[2]))
    assert [steps(Batch(ids), LR).loss.item() for ids in found] == losses_by_hand(model, found, part)
    assert same_weights(model, other)
    assert not recorded or len(steps.full_parts.captured) == graphs


def test_every_size_and_every_attention_has_a_graph_of_its_own(monkeypatch):
    use_host_graphs(monkeypatch)
    model, other = model_of("dense", "sdpa"), model_of("dense", "sdpa")
    plain, recorded = steps_of(model, 2), steps_of(other, 2, recorded=True)
    dense, local = model.attentions, model_of("local", "sdpa").attentions
    (four,), (six,) = batches(1, 4), batches(1, 6)
    for ids, attentions in ((four, dense), (six, dense), (six, local), (four, dense), (six, dense)):
        model.attentions = other.attentions = attentions
        assert torch.equal(plain(Batch(ids), LR).loss, recorded(Batch(ids), LR).loss)
    assert same_weights(model, other)
    assert len(recorded.full_parts.captured) == 6


@pytest.mark.parametrize("more", [{}, {"recompute": True}, {"positions": "learned"}])
def test_nothing_in_a_step_asks_the_device_for_a_value(more):
    model = model_of("dense", "sdpa", **more)
    steps, (ids,) = steps_of(model, 2), batches(1, 4)
    with NoWaiting():
        steps.gradients(Batch(ids))


@pytest.mark.parametrize(("compiling", "recompute"), [("block", False), ("block", True), ("model", False)])
def test_what_the_first_part_has_compiled_serves_those_that_add(monkeypatch, compiling, recompute):
    """Nothing can be compiled while a graph is captured."""
    compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(transformer, "compiled", compiled)
    torch._dynamo.reset()
    steps = steps_of(model_of("dense", "sdpa", compiling=compiling, recompute=recompute), 2)
    (ids,) = batches(1, 4)
    steps.gradients(Batch(ids[:2].clone()))
    with torch.compiler.set_stance("fail_on_recompile"):
        steps.gradients(Batch(ids))


@pytest.mark.parametrize(("device", "processes"), [("cpu", 1), ("cuda", 2)])
def test_only_one_process_on_a_gpu_records(device, processes):
    check_recordable(torch.device("cuda"))
    message = (
        f"--recorded must have one process on a GPU, .*; got {processes} on {device}: .*goes on with --no-recorded"
    )
    with pytest.raises(ValueError, match=message):
        check_recordable(torch.device(device), processes)


def test_what_cannot_be_recorded_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"documents must be joined .*; got separate: choose --no-recorded"):
        tiny(recorded=True, documents="separate")
    with pytest.raises(ValueError, match="--recorded must have one process on a GPU"):
        Run(tiny(recorded=True), tokens(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def recordable(device, compiling="none", recompute=False):
    model = model_of(
        "local,dense", "sparseflash", length=256, dtype=torch.bfloat16, compiling=compiling, recompute=recompute
    ).to(device)
    masks = [attention.keywords["mask"].to(device) for attention in model.attentions]
    model.attentions = tuple(attention_over(mask, "sparseflash") for mask in masks)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("compiling", "recompute"), [("none", False), ("block", False), ("block", True), ("model", False)]
)
@pytest.mark.parametrize("sequences", [4, 5])
def test_recorded_steps_have_the_bits_of_the_hosts(compiling, recompute, sequences):
    device = torch.device("cuda")
    model = recordable(device, compiling, recompute)
    other = recordable(device, compiling, recompute)
    assert same_weights(model, other)
    plain, recorded = steps_of(model, 2, device), steps_of(other, 2, device, recorded=True)
    found = [Batch(ids) for ids in batches(3, sequences, 256)]
    recorded.prepare(found[0])
    assert type(recorded.full_parts) is GraphSteps and len(recorded.full_parts.captured) == 2
    for batch in found:
        assert torch.equal(plain(batch, LR).loss, recorded(batch, LR).loss)
    assert same_weights(model, other)


@pytest.mark.gpu
def test_no_recorded_step_waits_for_the_gpu():
    device = torch.device("cuda")
    steps = steps_of(recordable(device, "block"), 2, device, recorded=True)
    first, *others = [Batch(ids) for ids in batches(3, 4, 256)]
    steps(first, LR)
    with waiting_raises():
        for batch in others:
            steps(batch, LR)


@pytest.mark.gpu
def test_a_recorded_run_that_is_resumed_has_the_bits_of_one_that_the_host_launched(tmp_path):
    store = tokens(tmp_path)
    changes = {"device": "cuda", "precision": "bf16", "micro_tokens": 256, "head_dim": 64}
    Run(tiny(**changes), store, tmp_path / "plain").train()
    recorded = tiny(**changes, recorded=True)
    assert Run(recorded, store, tmp_path / "recorded").train(pause=lambda step: step == 4) is None
    Run(recorded, store, tmp_path / "recorded", resume=True).train()
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "recorded"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
