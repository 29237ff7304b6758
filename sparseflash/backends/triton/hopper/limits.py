"""When the Hopper kernels are chosen: where they were measured faster than the portable ones."""

from __future__ import annotations

from typing import NamedTuple

from sparseflash.backends.triton.hopper.configs import SMALL, WIDEST_BACKWARD, is_common


class Limits(NamedTuple):
    """Where these kernels were measured faster than the portable ones: experiments/results/tried/choice.csv.

    Limits are for one head, so that a row's bits do not depend on its batch; except `most_room`, as gradients depend on
    the batch in any case.
    """

    forward_queries_64: int = 512
    forward_queries_small: int = 1024  # in blocks of 64
    forward_queries_dynamic: int = 4096  # for a dynamic mask
    backward_queries: int = 512
    backward_queries_filled_64: int = 4096  # in small blocks that fill tiles of 128, at D = 64
    backward_queries_padded: int = 2048  # of sequences with lengths
    most_keys_a_query: int = 4  # beyond this, queries are few and the portable kernels split their keys
    few_queries: int = 16  # from this number on, the forward of few queries is chosen all the same
    few_queries_other: int = 128  # the same at head dims without a configuration of their own
    few_queries_backward: int = 128  # the same for the backward
    forward_dim: int = 64  # the least of D and Dv
    backward_dim: int = 32
    forward_queries_other: int = 512  # at head dims without a configuration of their own
    backward_queries_dynamic: int = 16_384  # for a dynamic mask
    backward_queries_dynamic_wide: int = 2048  # the same above head dim 128
    most_room: float = 1 / 8  # of the memory of q, for the backward's lists of a dynamic mask
    backward_dim_small: int = 64  # the least of D and Dv in blocks of 64, of a mask that is not dynamic
    backward_queries_small: int = 16_384  # in tiles of 64

    def least_queries(
        self, dims: tuple[int, int], block: tuple[int, int], *, backward: bool, dynamic: bool, filled: bool = False
    ) -> int:  # fmt: skip
        """These kernels are chosen from this number of queries a head on. filled: small blocks in tiles of 128."""
        if backward and dynamic:
            is_wide = max(dims) > WIDEST_BACKWARD
            return self.backward_queries_dynamic_wide if is_wide else self.backward_queries_dynamic
        if backward and filled:
            return self.backward_queries_filled_64 if dims[0] == 64 else self.backward_queries
        if backward:
            return self.backward_queries_small if block == SMALL else self.backward_queries
        if dynamic:
            return self.forward_queries_dynamic
        if not is_common(dims):
            return self.forward_queries_other
        if block == SMALL:
            return self.forward_queries_small
        return self.forward_queries_64 if dims[0] == 64 else 1


LIMITS = Limits()
