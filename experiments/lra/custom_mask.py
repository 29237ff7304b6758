"""An example of a custom sparsity pattern, for ``--mask experiments.lra.custom_mask:beacons``."""

from torch import Tensor

from sparseflash import BlockMask


def beacons(q_len: int, *, block: int) -> BlockMask:
    """A local window, and beacons at the start that see, and are seen by, every token.

    A score is live iff |q - k| <= 48 or q < 16 or k < 16.
    """

    def live(q: Tensor, k: Tensor) -> Tensor:
        return ((q - k).abs() <= 48) | (q < 16) | (k < 16)

    return BlockMask.from_function(live, q_len, block=block)
