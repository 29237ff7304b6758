"""`python -m experiments.benchmarks NAME [options]`: runs a benchmark; `show FILE` prints a record as a table."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    folders = [path.parent.name for path in FOLDER.glob("*/__main__.py")]
    return sorted([*folders, *(path.stem for path in FOLDER.glob("*.py") if "\napp = " in path.read_text())])


def module_of(name: str) -> str:
    """A folder without a program may be left of an earlier one."""
    is_folder = (FOLDER / name / "__main__.py").exists()
    return f"experiments.benchmarks.{name}{'.__main__' if is_folder else ''}"


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("--help", "-h"):
        print(f"{__doc__}\n\nBenchmarks, each with a --help of its own: {', '.join(names())}")
    elif name == "show":
        from experiments.benchmarks.harness import table
        from experiments.measurements import read

        if not sys.argv[2:]:
            sys.exit("show needs the .jsonl file of a run, or several")
        for file in sys.argv[2:]:
            try:
                run, measurements = read(file)
            except (OSError, ValueError) as error:
                sys.exit(f"show must be given .jsonl files of runs; got {file}: {error}")
            print(f"{table.about(run)}\n\n{table.markdown(measurements)}\n")
    elif name in names():
        del sys.argv[1]
        import_module(module_of(name)).app(prog_name=f"python -m experiments.benchmarks {name}")
    else:
        sys.exit(f"the benchmark must be from {', '.join(names())}, or show FILE...; got {name!r}")


if __name__ == "__main__":
    main()
