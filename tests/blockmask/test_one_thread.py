import sys
import threading

import pytest
import torch

from sparseflash import BlockMask, masks
from sparseflash.blockmask.ops.place import place
from sparseflash.blockmask.threads import one_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's threads may not be OpenMP's")


@pytest.fixture(autouse=True)
def two_threads():
    """The tests run with one thread otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_only_the_thread_itself_has_one():
    inside, found = threading.Event(), []
    leave = threading.Event()

    def other():
        found.append(torch.get_num_threads())
        inside.wait()
        found.append(torch.get_num_threads())
        new = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        new.start()
        new.join()
        leave.set()

    with_own = threading.Thread(target=other)
    with_own.start()
    with one_thread():
        assert torch.get_num_threads() == 1
        inside.set()
        leave.wait()
        assert torch.get_num_threads() == 1
    with_own.join()
    assert found == [2, 2, 2]
    assert torch.get_num_threads() == 2


def test_the_number_comes_back_after_an_error_and_from_within():
    with pytest.raises(ZeroDivisionError), one_thread():
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
    with one_thread(only_if=False):
        assert torch.get_num_threads() == 2


def test_a_number_that_is_set_within_stays():
    with one_thread():
        torch.set_num_threads(3)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.causal(300, block=32),
        lambda: masks.documents([100, 200], block=32),
        lambda: masks.neighborhood((16, 16), window=3, block=32),
        lambda: BlockMask.from_function(lambda q, k: k <= q, 300, block=32),
        lambda: BlockMask.from_dense(torch.ones(64, 64).tril() > 0, block=32),
        lambda: BlockMask.from_tiles([0], [0], 64, block=32),
        lambda: MASK & OTHER,
        lambda: MASK | OTHER,
        lambda: MASK ^ OTHER,
        lambda: MASK - OTHER,
        lambda: ~MASK,
        lambda: MASK.reblock(64),
        lambda: MASK.crop(q=(5, 100)),
        lambda: MASK.permute(torch.arange(300).flip(0)),
        lambda: MASK.select(heads=[0]),
        lambda: MASK.transpose(),
        lambda: MASK.with_lengths([100]).bake_lengths(),
        lambda: place([(MASK, 0, 0), (OTHER, 300, 300)], 600, 600),
    ],
)
def test_masks_are_made_on_one_thread(build, monkeypatch):
    found, check = [], BlockMask.__post_init__
    monkeypatch.setattr(
        BlockMask, "__post_init__", lambda mask: (found.append(torch.get_num_threads()), check(mask))[1]
    )
    build()
    assert found and set(found) == {1}
    assert torch.get_num_threads() == 2


MASK, OTHER = masks.causal(300, block=32), masks.local(300, window=30, block=32)
