"""Positions "tree": an operator finds its arguments."""

import random

import pytest
import torch

from experiments.lra.data.listops import grammar
from experiments.lra.model.positions import Nesting, TreeRotation
from experiments.lra.tasks import TASKS
from experiments.training.layers.transformer import SelfAttention
from sparseflash import BlockMask
from sparseflash.nn.rotary import rotate
from tests.experiments.lra.models import fake_batch, model_with

LISTOPS = TASKS["listops"]


def expression(seed: int) -> list[int]:
    rng = random.Random(seed)
    while (found := grammar.draw(rng, 60, 200)) is None:
        pass
    return found


def operators(tokens: list[int]) -> list[int]:
    """Of each token, the index of the operator that it is an argument of; a bracket closes outside of its own."""
    found, open_ones = [], []
    for place, token in enumerate(tokens):
        if token == grammar.CLOSE:
            open_ones.pop()
        found.append(open_ones[-1] if open_ones else -1)
        if grammar.MIN <= token < grammar.CLOSE:
            open_ones.append(place)
    return found


def padded(*expressions: list[int]) -> torch.Tensor:
    length = max(map(len, expressions)) + 5
    return torch.tensor([[token + 1 for token in each] + [0] * (length - len(each)) for each in expressions])


@pytest.fixture
def nesting():
    return Nesting(LISTOPS.brackets, LISTOPS.vocabulary, 8)


def test_parents_are_the_innermost_open_brackets(nesting):
    expressions = [expression(seed) for seed in range(4)]
    ids = padded(*expressions)
    found = nesting.parents(ids, nesting.depths(ids))
    for row, tokens in zip(found.tolist(), expressions, strict=True):
        assert row[: len(tokens)] == operators(tokens)
        assert set(row[len(tokens) :]) == {-1}


def test_heads_find_the_arguments_of_each_operator_before_any_training(nesting):
    heads, dim = 3, 64
    tokens = expression(7)
    ids = padded(tokens)
    tree = TreeRotation(heads, dim)
    attention = SelfAttention(24, heads, dim, 0.0, qk_norm=True)
    tree.begin(attention)
    rotations = tree(torch.arange(ids.shape[1])[None], nesting.parents(ids, nesting.depths(ids)))
    q, k, _ = attention.project(torch.zeros(1, ids.shape[1], 24), rotations)
    scores = (q @ k.mT)[0]  # of tokens without contents
    parents = torch.tensor(operators(tokens))
    places = [place for place, token in enumerate(tokens) if grammar.MIN <= token < grammar.CLOSE]
    for place in places:
        own = parents == place
        for head in range(1, heads):
            row = scores[head, place, : len(tokens)]
            assert row[own].min() > 1.5 * row[~own].max()
    at = torch.arange(ids.shape[1])[None]
    line = tree(at, at)  # the first head does not read the tree
    assert torch.equal(rotate(torch.ones(1, heads, ids.shape[1], dim), rotations.keys)[:, 0],
                       rotate(torch.ones(1, heads, ids.shape[1], dim), line.queries)[:, 0])  # fmt: skip


def test_a_model_reads_which_operator_an_argument_belongs_to():
    tokens = [grammar.MAX, grammar.MIN, 3, 4, grammar.CLOSE, 5, grammar.CLOSE]
    moved = [grammar.MAX, grammar.MIN, 3, grammar.CLOSE, 4, 5, grammar.CLOSE]
    lengths = torch.tensor([7, 7], dtype=torch.int32)
    model = model_with(BlockMask.dense(48, block=16), positions="tree", qk_norm=True).eval()
    ids = torch.nn.functional.pad(padded(tokens, moved)[:, :7], (0, 9))
    nesting = model.nesting
    assert nesting.parents(ids, nesting.depths(ids))[:, 4].tolist() == [0, 0]
    assert nesting.parents(ids, nesting.depths(ids))[:, 3].tolist() == [1, 0]
    answers = model(ids, lengths)
    assert not torch.allclose(answers[0], answers[1], atol=1e-3)


def test_gradients_reach_all_weights():
    batch = fake_batch()
    model = model_with(BlockMask.dense(48, block=16), positions="tree", qk_norm=True, pool="first")
    model(batch.ids, batch.lengths).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
