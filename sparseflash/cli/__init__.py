"""The command line, `sparseflash show | check | bench | convert | patterns | info`: what a mask costs and reaches,
whether attention with it is exact on this machine, how fast it is, the same mask for another library, and which
patterns there are.

app.py has the commands, options.py and output.py what they share, expression.py and sources.py evaluate the MASK
argument, and each command has a file of its own.

It may import what its users may: `sparseflash`, `attention`, `analysis`, `draw`, `explain`, `interop`, `testing` and
`masks`.
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
