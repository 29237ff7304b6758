"""python -m tests.fitting [--changes none few any] [--seed N] [--out FILE]

Compiles drawn cases that cover every pair of properties, for GPUs of compute capability 8.0, 8.6, 8.9, 9.0 and 10.0,
seconds each; cases in the file are not compiled again. Exits with 1 if a kernel does not fit.
"""

import argparse
import sys
from pathlib import Path

from experiments.benchmarks.interpreter import compile_kernels

RESULTS = Path("experiments/results/compile")


def main() -> int:
    compile_kernels()
    import triton

    from tests.fitting.cases import CHANGES, covering
    from tests.fitting.fits import fits_of, read, write

    parser = argparse.ArgumentParser(
        prog="python -m tests.fitting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=CHANGES, help="how many score modifications")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn cases")
    parser.add_argument("--out", type=Path, default=RESULTS / f"fits-triton-{triton.__version__}.csv")
    options = parser.parse_args()
    found = read(options.out)
    done = {fit.case for fit in found}
    cases = {str(case): case for kind in options.changes for case in covering(kind, options.seed)}
    left = {name: case for name, case in cases.items() if name not in done}
    for number, (name, case) in enumerate(left.items(), start=1):
        found += fits_of(case)
        write(options.out, found)
        print(f"{number} of {len(left)}: {name}", flush=True)
    over = [fit for fit in found if not fit.fits]
    fewer = sum(fit.has_fewer_stages for fit in found)
    of_cases = f"{len(found)} kernels of {len({fit.case for fit in found})} cases"
    print(f"{of_cases}, {fewer} of them with fewer stages than chosen; {len(over)} do not fit.")
    for fit in over:
        print(f"{fit.case}: {fit.kernel} {fit.config}, {fit.shared} bytes")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
