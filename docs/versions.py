"""`python -m docs.versions`: what the pages say of PyTorch and Triton, from `sparseflash/backends/triton/versions.py`.

A test compares the pages with it. After a change of that list, put what this prints in their place.
"""

from sparseflash.backends.triton.versions import MEASURED, named, releases

RESULTS = "../../experiments/results"  # from the pages


def sentence() -> str:
    """What README.md and the tutorial say."""
    first, last = MEASURED[0].triton, MEASURED[-1].triton
    return (
        f"The kernels for Hopper were measured with Triton {named((first,))} to {named((last,))}, which PyTorch "
        f"{releases()} for CUDA bring; with a newer Triton they are checked before they serve."
    )


def table() -> str:
    """The table of the FAQ."""
    lines = [
        "| Triton | PyTorch for CUDA that brings it | compute capability 9.0 | other GPUs from 8.0 on | speed |",
        "|---|---|---|---|---|",
    ]
    for each in MEASURED:
        run = f"[stored run]({RESULTS}/{each.run}/README.md)" if each.run else "no run stored"
        torch = ", ".join(each.torch)
        lines.append(f"| {named((each.triton,))} | {torch} | kernels for Hopper | portable kernels | {run} |")
    lines.append("| others | | kernels for Hopper that pass a check | portable kernels | not measured |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(sentence(), table(), sep="\n\n")
