"""A sum whose order depends on the number of its terms alone: reduce='fixed' adds micro-batches up so."""

from __future__ import annotations

import torch


class SummationTree:
    """Leaves are added one by one, and neighbours are summed as soon as both are there:

        ((g0 + g1) + (g2 + g3)) + (g4 + g5)        of six leaves

    that is, pairs of leaves, then pairs of pairs, and so on; in the end what has no neighbour is added to the
    sum on its left, the smallest first. For n leaves at most log2(n) + 1 sums are held.
    """

    def __init__(self) -> None:
        self.leaves = 0
        self._sums: list[torch.Tensor] = []  # of 2^k leaves each, the largest first

    def add(self, leaf: torch.Tensor) -> None:
        """Takes over the tensor."""
        self.leaves += 1
        count = self.leaves
        while count % 2 == 0:
            leaf = self._sums.pop().add_(leaf)
            count //= 2
        self._sums.append(leaf)

    def total(self) -> torch.Tensor:
        """The sum of all leaves; afterwards the tree is empty."""
        total = self._sums.pop()
        while self._sums:
            total = self._sums.pop().add_(total)
        self.leaves = 0
        return total
