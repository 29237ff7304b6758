import typer

from experiments.benchmarks.selection.blocks import blocks
from experiments.benchmarks.selection.ideas import ideas

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(ideas)
app.command()(blocks)

if __name__ == "__main__":
    app()
