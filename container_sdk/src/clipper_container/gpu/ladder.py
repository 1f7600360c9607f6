"""The batch sizes of a model on a GPU: static ones, so that each can be a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass, field

QUARTERS_FROM = 4  # from this size on, steps are a quarter or less, so that little is padded


@dataclass
class BatchLadder:
    """The sizes up to a largest one, and how many rows were added to reach them.

    sizes: 1, 2, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ..., and batch_max.
    """

    batch_max: int
    sizes: list[int] = field(init=False)
    rows: int = 0  # of the batches so far
    padded: int = 0  # rows that were added to them

    def __post_init__(self) -> None:
        if self.batch_max < 1:
            raise ValueError(f"batch_max is {self.batch_max}; a batch has at least one row.")
        sizes, size = [], 1
        while size < self.batch_max:
            sizes.append(size)
            step = size if size < QUARTERS_FROM else (1 << (size.bit_length() - 1)) // 4
            size += step
        self.sizes = [*sizes, self.batch_max]

    def choose(self, rows: int) -> int:
        """Return the smallest size for so many rows, and count what is padded.

        Raises: ValueError above the largest.
        """
        for size in self.sizes:
            if size >= rows:
                self.rows += rows
                self.padded += size - rows
                return size
        raise ValueError(f"{rows} rows are more than the largest batch, {self.sizes[-1]}.")

    def lower(self, below: int) -> int:
        """Remove the sizes from `below` on; return the largest that is left. One row is kept."""
        self.sizes = [size for size in self.sizes if size < below] or [1]
        self.batch_max = self.sizes[-1]
        return self.batch_max

    @property
    def padding(self) -> float:
        """The share of rows that were added, of all rows computed."""
        return self.padded / (self.rows + self.padded) if self.rows else 0.0
