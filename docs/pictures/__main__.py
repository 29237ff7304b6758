"""Draws the pictures: `python -m docs.pictures [NAME ...]`."""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from docs.pictures import kernels, patterns, selection, speed, summary

IMAGES = Path(__file__).resolve().parents[1] / "pages" / "images"
FIGURES = {**summary.FIGURES, **speed.FIGURES, **selection.FIGURES, **patterns.FIGURES, **kernels.FIGURES}


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG; the same versions of everything write the same bytes."""
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main(names: list[str]) -> None:
    """Draws the figures whose names begin with one of `names`, or all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        if not names or name.startswith(tuple(names)):
            save(draw(), IMAGES / name)
            print(IMAGES / name)


if __name__ == "__main__":
    main(sys.argv[1:])
