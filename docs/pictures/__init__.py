"""The pictures of the documentation and of README.md, drawn by the library and from stored results.

    python -m docs.pictures            # all of them, into docs/pages/images
    python -m docs.pictures speed      # some of them

`speed` and `selection` draw stored measurements (experiments/results), `patterns` masks, `kernels` how kernels work.
"""
