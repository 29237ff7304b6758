"""The command line, `sparseflash show | check | bench | convert | patterns | info`."""


def main() -> None:
    """Runs the command line; its dependencies are in the extra `cli`."""
    try:
        from sparseflash.cli.app import app
    except ModuleNotFoundError as failure:
        if failure.name not in ("rich", "typer"):
            raise
        raise SystemExit(f"the command line needs {failure.name}: pip install 'sparseflash[cli]'") from None
    app()
