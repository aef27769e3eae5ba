"""A fault that ptxas does not report: registers that are written while a product reads them.

A product of sm_90's warp groups may take its left operand from registers, and the program goes on
beside it. Where a loop's step ends with such products under way, some compilers (Triton 3.6 with
its ptxas) let the next step write registers that have not been read yet
(github.com/triton-lang/triton/issues/9433). Results are then wrong now and then: a check of one
call passes.
"""

from __future__ import annotations

import re

_PRODUCT = re.compile(r"warp_group_dot [^\n]*dot_op<\{opIdx = 0")
_WAIT = re.compile(r"warp_group_dot_wait [^\n]*pendings = (\d+)")
_LOOP = re.compile(r"^( *)(?:%[\w:]+ = )?scf\.(?:for|while) [^\n]*\n(.*?)^\1\}", re.M | re.S)


def left_under_way(code: str) -> int:
    """Products from registers that may be under way when a step of a loop ends: the most of any
    loop.

    Parameters
    ----------
    code : str
        A kernel in Triton's dialect for GPUs (``asm["ttgir"]``).
    """
    most = 0
    for _, body in _LOOP.findall(code):
        waits = _WAIT.findall(body)
        if _PRODUCT.search(body) and waits:
            most = max(most, int(waits[-1]))
        most = max(most, left_under_way(body))
    return most
