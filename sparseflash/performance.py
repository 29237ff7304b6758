"""The category of warnings about slower kernels."""


class PerformanceWarning(UserWarning):
    """A call runs on slower kernels than the documentation's timings are for. Its results are just as exact.

    >>> import warnings, sparseflash
    >>> warnings.filterwarnings("ignore", category=sparseflash.PerformanceWarning)  # silences it

    It is given on GPUs of compute capability 9.0 when a call is prepared, once per process for each kind of reason;
    `explain` has the full answer.
    """
