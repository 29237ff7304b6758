"""`python tests/mutations`: see mutation_runner.py."""

import sys
from pathlib import Path

from mutation_list import MUTATIONS
from mutation_runner import main

sys.exit(main(MUTATIONS, Path(__file__).resolve().parents[2]))
