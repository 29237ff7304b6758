import dataclasses
import re
import sys

import pytest
import torch

from sparseflash import BlockMask
from tests.blockmask.mask_values import int32, two_patterns, window


def changed(array, place, value):
    array = array.clone()
    array[place] = value
    return array


def reordered(mask, order):
    order = torch.tensor(order)
    number = torch.cat([torch.zeros(1, dtype=torch.int64), order.argsort() + 1])
    return dataclasses.replace(mask, bits=mask.bits[order], tile=number[mask.tile.long()].int())


def stored_twice():
    mask = window()
    return dataclasses.replace(
        mask,
        indptr=int32([*mask.indptr.tolist(), *(mask.indptr + 7).tolist()[1:]]),
        indices=mask.indices.repeat(2),
        tile=mask.tile.repeat(2),
        pattern=int32([[0, 1]]),
    )


def one_tile(row, col):
    return BlockMask.from_tiles(torch.tensor([row]), torch.tensor([col]), 32, block=16)


def replace(make=window):
    """`replace()(field=change, ...)`: how to break a mask by changing some of its arrays."""

    def breaker(**changes):
        def broken():
            mask = make()
            return dataclasses.replace(mask, **{name: change(mask) for name, change in changes.items()})

        return broken

    return breaker


BROKEN = [
    (r"indptr must run from 0 to the 7 stored tiles", replace()(indptr=lambda m: int32([1, 2, 5, 7]))),
    (r"indptr must run from 0 to the 7 stored tiles", replace()(indptr=lambda m: int32([0, 2, 5, 6]))),
    (r"indptr must not decrease", replace()(indptr=lambda m: int32([0, 5, 2, 7]))),
    (r"indices must lie in 0\.\.2", replace()(indices=lambda m: changed(m.indices, 6, 3))),
    (r"indices must lie in 0\.\.2", replace()(indices=lambda m: changed(m.indices, 0, -1))),
    (r"indices must strictly increase in a row", replace()(indices=lambda m: changed(m.indices, 0, 1))),
    (r"indices must strictly increase in a row", replace()(indices=lambda m: int32([1, 0, 0, 1, 2, 1, 2]))),
    (r"tile must lie in 0\.\.4", replace()(tile=lambda m: changed(m.tile, 0, 5))),
    (r"tile must lie in 0\.\.4", replace()(tile=lambda m: changed(m.tile, 0, -1))),
    (r"partial tiles must be numbered as they first appear", lambda: reordered(window(), [1, 0, 2, 3])),
    (r"partial tiles must be numbered as they first appear", replace()(bits=lambda m: torch.cat([m.bits, m.bits[:1]]))),
    (r"a tile with no live score must not be stored", replace()(bits=lambda m: changed(m.bits, 1, 0))),
    (r"a tile with every score live must be tile 0", replace()(bits=lambda m: changed(m.bits, 1, 2**16 - 1))),
    (r"bits past the block must be 0", replace()(bits=lambda m: changed(m.bits, (1, 0, 0), 1 << 20))),
    (r"equal partial tiles must be stored once", replace()(bits=lambda m: changed(m.bits, 1, m.bits[0]))),
    (r"scores past q_len or k_len must be dead", replace()(bits=lambda m: changed(m.bits, (3, 8, 0), 1))),
    (r"scores past q_len or k_len must be dead", replace()(bits=lambda m: changed(m.bits, (3, 0, 0), 1 << 8))),
    (r"scores past q_len or k_len must be dead", replace()(bits=lambda m: changed(m.bits, (3, 15, 0), 1 << 15))),
    (r"scores past q_len or k_len must be dead", replace(lambda: one_tile(1, 0))(q_len=lambda m: 31)),
    (r"scores past q_len or k_len must be dead", replace(lambda: one_tile(0, 1))(k_len=lambda m: 31)),
    (r"pattern must lie in 0\.\.1", replace(two_patterns)(pattern=lambda m: int32([[0, 2]]))),
    (r"pattern must lie in 0\.\.1", replace(two_patterns)(pattern=lambda m: int32([[-1, 1]]))),
    (r"patterns must be numbered as they first appear", replace(two_patterns)(pattern=lambda m: int32([[1, 0]]))),
    (r"patterns must be numbered .* and each one used", replace(two_patterns)(pattern=lambda m: int32([[0, 0]]))),
    (r"equal patterns must be stored once", stored_twice),
    (r"lengths of queries must lie in 0\.\.40", replace()(lengths=lambda m: int32([[3, -1], [3, 3]]))),
    (r"lengths of keys must lie in 0\.\.40", replace()(lengths=lambda m: int32([[3], [41]]))),
]


@pytest.mark.parametrize(("rule", "broken"), BROKEN)
def test_validate_names_the_broken_rule(rule, broken):
    with pytest.raises(ValueError, match=rf"^not a valid BlockMask: {rule}"):
        broken().validate()


def rules_of(mask):
    rules, before = set(), sys.getprofile()

    def called(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "must":
            rules.add(re.sub(r"\d+", "n", frame.f_locals["rule"]))

    sys.setprofile(called)
    try:
        mask.validate()
    finally:
        sys.setprofile(before)
    return rules


def test_every_rule_of_validate_is_broken_above():
    reached = set()
    for _, broken in BROKEN:
        with pytest.raises(ValueError, match=r"^not a valid BlockMask: ") as error:
            broken().validate()
        reached.add(re.sub(r"\d+", "n", str(error.value)).removeprefix("not a valid BlockMask: ").removesuffix("."))
    assert reached == rules_of(window().with_lengths([3]))
