from experiments.pathx.cli import app

if __name__ == "__main__":
    app()
