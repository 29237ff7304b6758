"""The command line, `sparseflash show | check | bench | convert | patterns | info`.

It shows the cost and reach of a mask, checks on this machine that attention with it is exact, times it, converts it for
other libraries, and lists the patterns and the machine's kernels. app.py has the commands, options.py, names.py and
output.py their common parts, expression.py and sources.py evaluate the MASK argument, and each command has a file of
its own; strip.py draws the reach of a mask by layers.
"""


def main() -> None:
    """Runs the command line; its dependencies are in the extra `cli`."""
    try:
        from sparseflash.cli.app import app
    except ModuleNotFoundError as failure:
        if failure.name not in ("rich", "typer"):
            raise
        raise SystemExit(f"the command line needs {failure.name}: pip install 'sparseflash[cli]'") from None
    app()
