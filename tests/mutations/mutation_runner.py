"""Whether tests notice faults: makes the listed changes, one at a time, and runs their tests.

The exit code is 1 if a test passes in spite of the change or cannot be run, or if a text to be replaced is not in its
file just once.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "data", "runs", "results", "site")
OUTCOMES = {0: "SURVIVED", 1: "killed"}


def main(listed, root, arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m tests.mutations")
    parser.add_argument("--list", action="store_true", help="print the changes and make none")
    parser.add_argument("-k", metavar="TEXT", default="", help="only those with this text in their names or files")
    asked = parser.parse_args(arguments)
    chosen = [each for each in listed if asked.k in each.name or asked.k in each.file]
    if asked.list:
        for each in chosen:
            print(f"{each.name}\n    {each.file}\n  - {each.old}\n  + {each.new}\n    {each.test}")
        return 0
    if faults := [fault for each in chosen if (fault := fault_of(each, root))]:
        print("\n".join(faults))
        return 1
    if not chosen:
        print(f"no change has {asked.k!r} in its name or file")
        return 1
    width = max(len(each.name) for each in chosen)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder, "tree")
        shutil.copytree(root, copy, symlinks=True, ignore=_LEFT_OUT)
        code, seconds, output = passes(copy, *dict.fromkeys(each.test for each in chosen))
        print(f"{'no change':{width}}  {'passed' if code == 0 else 'FAILED'}  {seconds:6.1f} s", flush=True)
        if code != 0:
            print(output)
            return 1
        for number, each in enumerate(chosen, 1):
            file = copy / each.file
            file.write_text(file.read_text(encoding="utf-8").replace(each.old, each.new), encoding="utf-8")
            code, seconds, output = passes(copy, each.test)
            shutil.copy2(root / each.file, file)
            outcomes.append(OUTCOMES.get(code, f"NOT RUN, pytest's exit code is {code}"))
            print(f"{each.name:{width}}  {outcomes[-1]:8}  {seconds:4.1f} s  {number}/{len(chosen)}", flush=True)
            if code not in OUTCOMES:
                print(output, flush=True)
    killed = outcomes.count("killed")
    print(f"{killed} of {len(chosen)} killed")
    return int(killed < len(chosen))


def fault_of(mutation, root):
    path = root / mutation.file
    found = path.read_text(encoding="utf-8").count(mutation.old) if path.is_file() else 0
    if found != 1:
        return f"{mutation.name}: {mutation.file} must have {mutation.old!r} once; found it {found} times"
    file, _, function = mutation.test.partition("::")
    path = root / file
    if not path.is_file() or f"def {function.partition('[')[0]}(" not in path.read_text(encoding="utf-8"):
        return f"{mutation.name}: {file} must have the test {function}"
    return None


def passes(copy, *tests):
    start = time.perf_counter()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=300", *tests],
        cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, time.perf_counter() - start, done.stdout
