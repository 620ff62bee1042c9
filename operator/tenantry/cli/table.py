"""Plain text tables: columns as wide as they must be, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines without trailing spaces or a final newline. The last column is never padded."""
    grid = [[cell.upper() for cell in header], *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in grid) for i in range(len(header))]
    right = [all(_number(row[i]) for row in grid[1:]) for i in range(len(header))]
    lines = []
    for row in grid:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def _number(cell: str) -> bool:
    return not cell.strip("0123456789.,-% ")
