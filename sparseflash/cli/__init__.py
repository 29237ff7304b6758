"""The command line, `sparseflash show | check | bench`: what a mask costs and reaches, whether attention under it is
exact on this machine, and how fast it is there.

app.py has the options, expression.py and sources.py find the mask that is asked for, and each command is a file of its
own. May import what its users may: `sparseflash`, `attention`, `analysis`, `interop`, `testing` and `masks`.
"""


def main() -> None:
    """Run the command line; what it needs besides the library is in the extra `cli`."""
    try:
        from sparseflash.cli.app import app
    except ModuleNotFoundError as failure:
        if failure.name not in ("rich", "typer"):
            raise
        raise SystemExit(f"the command line needs {failure.name}: pip install 'sparseflash[cli]'") from None
    app()
