"""Figures and tables in the pages, written from the stored runs in `experiments/results`.

    python -m docs.figures            # rewrites them in README.md, docs/pages and docstrings
    python -m docs.figures --check    # lists errors and outdated figures, and changes nothing
    python -m docs.figures --stale    # lists the runs whose kernels have changed since, and the pages that cite them
    python -m docs.figures --names 'speed/*/64/forward/*'    # lists what is stored

A figure stands between two comments:

    It takes <!-- figure: speed/dense/64/forward/sparseflash --><!-- /figure --> on an H200.

After `figure:` stands one of these. Where several files of the benchmark have the name, `h200` is meant; ` @ FILE` at
the end means another:

    speed/dense/64/forward/sparseflash                 a value with its unit: 0.312 ms
    speed/dense/64/forward/sparseflash in TFLOP/s      the rate of the work in its settings; GB/s likewise: 704 TFLOP/s
    speed/dense/64/forward/fa4 / speed/dense/64/forward/sparseflash
                                                       the first over the second, of one file: 1.12; bold if above 1
                                                       by more than the noise (`store.verdict`); ` with noise` at the
                                                       end adds it, 0.98 ± 0.03, if it is more than 0.01
    speed/dense/64/forward/fa4 + speed/dense/64/backward/fa4 / ...
                                                       the same of sums, on both sides, without wildcards
    speed/{dense,causal}/*/forward/fa4                 the least and the largest of several: 0.312 to 1.71 ms
    speed/*/64/forward/fa4 / speed/*/64/forward/sparseflash
                                                       the same of ratios: 0.78 to 1.39

The other marks: `<!-- table: NAME -->`, a table that `tables.py` defines; `<!-- text: NAME -->`, a sentence of
`tables.py`; `<!-- run: speed/h200 -->`, the device, versions, commit and date of a run; `<!-- runs -->`, a list of all
runs that the page cites. A page must name each run that it cites, in one of these ways, which say whether the run's
kernels have changed since. A mark may not stand first in a line of running text: Markdown would take the line for HTML.
"""
