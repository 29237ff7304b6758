"""Writes the figures into the pages, or checks them: `python -m docs.figures [--check | --stale | --names PATTERN]`."""

import argparse
import sys
from fnmatch import fnmatch

from docs.figures.handwritten import handwritten
from docs.figures.marks import Page, contradictions, filled, pages
from docs.figures.stale import changes
from docs.figures.store import number, stored


def problems(checked: list[Page]) -> list[str]:
    """The findings of `--check`: marks that cannot be filled in, contradictions, outdated or handwritten figures."""
    found = [f"{page.name}: {error}" for page in checked for error in page.errors]
    found += [f"two places must show one figure; {each}" for each in contradictions(checked)]
    found += [f"{page.name} is out of date: run python -m docs.figures" for page in checked if not page.is_current()]
    found += [f"{each} must say: run python -m docs.figures" for page in checked for each in page.unmarked]
    return found + [
        f"{each}: a measured number must come from the store, between marks"
        for page in checked
        if is_held(page)
        for each in handwritten(page.path)
    ]


def is_held(page: Page) -> bool:
    """Whether the page may have no measured number by hand."""
    return page.path.suffix == ".md" and not page.name.startswith("masks/")


def stale(checked: list[Page]) -> list[str]:
    """A line for each run whose kernels have changed since, with the pages that cite it."""
    lines = []
    for key, file in stored().items():
        count = changes(file)
        if count:
            cited = ", ".join(page.name for page in checked if key in page.cited)
            lines.append(
                f"{key}: {file.run.commit}, {count} commits to its kernels since; cited by {cited or 'no page'}"
            )
    return lines


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.figures", description=__doc__)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--check", action="store_true", help="change nothing; fail if anything is out of date or wrong")
    ways.add_argument("--stale", action="store_true", help="list the runs that are older than their kernels")
    ways.add_argument("--names", metavar="PATTERN", help="list the stored figures whose names match, * for anything")
    asked = parser.parse_args()
    if asked.names:
        for key, file in stored().items():
            for each in file.measurements:
                if fnmatch(each.name, asked.names):
                    value = "failed" if each.value is None else f"{number(each.value)} {each.unit}"
                    print(f"{each.name} @ {key.partition('/')[2]}  {value}")
        return 0
    checked = [filled(path) for path in pages()]
    if asked.stale:
        print("\n".join(stale(checked)))
        return 0
    if asked.check:
        print("\n".join(problems(checked)))
        return bool(problems(checked))
    for page in checked:
        if not page.is_current():
            page.path.write_text(page.after, encoding="utf-8")
            print(page.name)
    errors = [f"{page.name}: {error}" for page in checked for error in page.errors]
    print("\n".join(errors), file=sys.stderr)
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
