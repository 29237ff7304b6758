"""`python -m tests.fuzzing`: see calls.py."""

import sys

from tests.fuzzing.calls import main

if __name__ == "__main__":
    sys.exit(main())
