"""`python -m tests.fuzzing`: see calls.py."""

from tests.fuzzing.calls import main

if __name__ == "__main__":
    main()
