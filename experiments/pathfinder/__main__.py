if __name__ == "__main__":
    from experiments.pathfinder.cli import app

    app(prog_name="python -m experiments.pathfinder")
