"""Cards that stand for the architectures which kernels are compiled for, and what fits on each."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.kernels.gpus import GPU

KIB = 1 << 10
REGISTERS = 64 * KIB
"""Of a multiprocessor, for all of the architectures here."""


@dataclass(frozen=True)
class Card:
    """Limits of a multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability").

    Attributes
    ----------
    name : str
    gpu : GPU
    shared, shared_of_all : int
        Bytes of shared memory that a program may have, and that all programs of a multiprocessor
        have together.
    reserved : int
        Bytes of it that the system takes for each program.
    warps, programs : int
        The most on a multiprocessor.
    """

    name: str
    gpu: GPU
    shared: int
    shared_of_all: int
    reserved: int
    warps: int
    programs: int

    def together(self, registers: int, shared: int, warps: int) -> int:
        """Programs of a kernel that a multiprocessor holds at once; 0 if none fits.

        Registers are handed out to whole warps, 256 at a time.
        """
        if shared > self.shared:
            return 0
        of_a_warp = -(-32 * registers // 256) * 256
        return min(self.programs, self.warps // warps, REGISTERS // of_a_warp // warps,
                   self.shared_of_all // (shared + self.reserved or 1))


CARDS = {card.gpu.architecture: card for card in (
    Card("T4", GPU(75, 40), 64 * KIB, 64 * KIB, 0, 32, 16),
    Card("A100", GPU(80, 108), 163 * KIB, 164 * KIB, KIB, 64, 32),
    Card("H100", GPU(90, 132), 227 * KIB, 228 * KIB, KIB, 64, 32),
)}
"""By architecture."""
