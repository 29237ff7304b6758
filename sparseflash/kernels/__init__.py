"""The Triton backend. Importing it needs Triton; nothing else in the library does."""

try:
    import triton as triton
except ModuleNotFoundError as error:
    raise RuntimeError(
        "backend='triton' needs the package triton, which is not installed: pip install triton (Linux), or use "
        "backend='blockwise'."
    ) from error

from sparseflash.kernels.op import attention as triton_attention
from sparseflash.kernels.op import repeated

__all__ = ["repeated", "triton_attention"]
