import os
import subprocess
import sys
from pathlib import Path

import experiments

ROOT = Path(experiments.__file__).parents[1]


def torchrun(*words, processes=2, check=True):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PYTHONFAULTHANDLER"] = "1"
    command = [sys.executable, *launcher, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
