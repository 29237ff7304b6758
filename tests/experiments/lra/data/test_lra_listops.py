import doctest
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.lra.data import batches
from experiments.lra.data.listops import grammar, tokens

seeds = st.integers(0, 2**32)


def expression(seed: int, longer_than: int = 3, shorter_than: int = 300) -> list[int]:
    rng = random.Random(seed)
    while True:
        drawn = grammar.draw(rng, longer_than, shorter_than)
        if drawn is not None:
            return drawn


def parse(printed: str):
    words = iter(printed.split())

    def read():
        word = next(words)
        if word != "(":
            return word
        pair = (read(), read())
        assert next(words) == ")"
        return pair

    tree = read()
    assert next(words, None) is None
    return tree


def value(tree):
    """By currying: an operator collects one argument a pair until "]" applies it."""
    if isinstance(tree, str):
        return int(tree) if tree.isdigit() else tree
    function, argument = value(tree[0]), value(tree[1])
    if isinstance(function, str):
        return function, [argument]
    name, arguments = function
    if argument != "]":
        return name, [*arguments, argument]
    return {
        "[MIN": lambda: min(arguments),
        "[MAX": lambda: max(arguments),
        "[SM": lambda: sum(arguments) % 10,
        "[MED": lambda: int(statistics.median(arguments)),
    }[name]()


@given(seeds)
def test_value_agrees_with_an_independent_evaluation_of_the_printed_form(seed):
    drawn = expression(seed)
    assert grammar.evaluate(drawn) == value(parse(grammar.render(drawn)))


@given(seeds)
def test_expressions_keep_to_the_grammar(seed):
    arguments = []
    for token in expression(seed):
        if token == grammar.CLOSE:
            assert 2 <= arguments.pop() <= grammar.MAX_ARGS
            continue
        if arguments:
            arguments[-1] += 1
        if token >= grammar.MIN:
            arguments.append(0)
            assert len(arguments) < grammar.MAX_DEPTH
    assert not arguments


@given(seeds, st.integers(3, 60), st.integers(2, 60))
def test_lengths_lie_strictly_between_the_bounds(seed, longer_than, more):
    assert longer_than < len(expression(seed, longer_than, longer_than + more)) < longer_than + more


def test_giving_up_early_rejects_nothing_that_fits():
    generous = random.Random(5)
    kept = [drawn for _ in range(3000) if (drawn := grammar.draw(generous, 0, 10**6)) and len(drawn) < 40]
    strict = random.Random(6)
    strictly = sum(grammar.draw(strict, 0, 40) is not None for _ in range(3000))
    assert strictly == pytest.approx(len(kept), abs=4 * (2 * 3000 * 0.1 * 0.9) ** 0.5)


def test_distribution_is_the_published_one():
    """Measured on a large sample of the original generator, each within four standard errors."""
    rng = random.Random(0)
    draws = 20_000
    kept = [drawn for _ in range(draws) if (drawn := grammar.draw(rng, 500, 2000)) is not None]
    count = len(kept)
    assert count / draws == pytest.approx(0.0825, abs=4 * (0.0825 * 0.9175 / draws) ** 0.5)
    assert sum(map(len, kept)) / count == pytest.approx(1035, abs=4 * 400 / count**0.5)

    values = Counter(map(grammar.evaluate, kept))
    for digit, chance in ((0, 0.168), (9, 0.169), (4, 0.088)):
        assert values[digit] / count == pytest.approx(chance, abs=4 * (0.168 / count) ** 0.5)

    by_root = Counter((drawn[0], grammar.evaluate(drawn)) for drawn in kept)
    best = sum(max(by_root[root, digit] for digit in range(10)) for root in range(grammar.MIN, grammar.CLOSE))
    assert best / count == pytest.approx(0.361, abs=4 * (0.361 * 0.639 / count) ** 0.5)


@given(seeds)
def test_tokens_of_the_printed_form_are_the_expression(seed):
    drawn = expression(seed)
    encoded = tokens.encode(grammar.render(drawn).encode())
    assert list(encoded) == [token + 1 for token in drawn]
    assert tokens.decode(encoded) == [grammar.NAMES[token] for token in drawn]


@pytest.mark.parametrize("source", [b"( [MAX 12 )", b"( [FOO 1 )", b"( a 1 )", b"", b"( [MAX  1 )", b"[MAX1"])
def test_foreign_tokens_are_refused(source):
    with pytest.raises(ValueError, match="a token that ListOps does not have"):
        tokens.encode(source)


@pytest.mark.parametrize("module", [batches, grammar, tokens])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
