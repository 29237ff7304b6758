import sys
from pathlib import Path

from tests.mutations.mutation_list import MUTATIONS
from tests.mutations.mutation_runner import main

if __name__ == "__main__":
    sys.exit(main(MUTATIONS, Path(__file__).resolve().parents[2]))
