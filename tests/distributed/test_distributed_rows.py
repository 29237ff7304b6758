import numpy as np
import torch

from sparseflash.distributed.rows import Additions, Rows


def rows(*runs, counts):
    starts, sizes = np.array(runs, dtype=np.int64).T
    return Rows(starts, sizes, counts)


def test_rows_that_two_tensors_have_are_rounded_once():
    """2,048 + 1 is 2,048 in fp16, but 2,048 + 1 + 1 is 2,050."""
    added = Additions([rows((1, 2), counts=[2]), rows((2, 2), counts=[2])])
    ones = torch.ones(2, 1).half()
    found = added(torch.full((4, 1), 2048.0).half(), [ones, ones], 4)
    assert found.dtype == torch.float16 and found.flatten().tolist() == [2048.0, 2048.0, 2050.0, 2048.0]


def test_rows_that_go_to_two_ranks_are_added_for_both():
    for second, wanted in ((1, [1, 2, 1, 0, 0]), (2, [1, 1, 1, 1, 0]), (3, [1, 1, 0, 1, 1])):
        added = Additions([rows((0, 2), (second, 2), counts=[2, 2])])
        assert added(torch.zeros(5, 1), [torch.ones(4, 1)], 5).flatten().tolist() == wanted
