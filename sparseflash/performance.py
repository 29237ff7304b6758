"""The category of the library's warnings of slower kernels."""


class PerformanceWarning(UserWarning):
    """A call runs on slower kernels than those that the documentation's figures are of. Its results are as exact.

    >>> import warnings, sparseflash
    >>> warnings.filterwarnings("ignore", category=sparseflash.PerformanceWarning)  # silences it

    It is given on GPUs of compute capability 9.0 when a call is prepared, once a process for each kind of reason;
    `explain` has the full answer. Where the portable kernels are as fast as those for Hopper there is none.
    """
