"""Whether kernels are interpreted. Import this module before modules with kernels, for its error without Triton."""

from __future__ import annotations

try:
    import triton
    from triton.runtime.interpreter import InterpretedFunction
except ModuleNotFoundError as error:
    raise RuntimeError(
        "backend='triton' needs the package triton, which is not installed: pip install triton (Linux), or use "
        "backend='blockwise' (for a cache 'reference')."
    ) from error


@triton.jit
def _nothing() -> None:
    pass


INTERPRETED = isinstance(_nothing, InterpretedFunction)
