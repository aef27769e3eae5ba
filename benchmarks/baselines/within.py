"""Runs a module as ``python -m`` does, in a share of the GPU's memory: BYTES MODULE ARGUMENTS...

It stands alone: it runs with nothing of the benchmarks on its path.
"""

import os
import runpy
import sys

import torch


def main() -> None:
    limit, module = int(sys.argv[1]), sys.argv[2]
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = os.getcwd()  # as of python -m, in place of this file's folder
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
