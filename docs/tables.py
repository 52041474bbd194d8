"""Copies tables of benchmarks/results into the pages of the documentation; with --check, only says which are stale.

A page marks the place: ``<!-- table: report.md: in-domain | needs; without: Brier*; all of these* -->``, then the
table, then ``<!-- end -->``. The mark names the file and how a line begins (the table's header, or the heading above
it), and may leave out columns and rows by patterns for their first cell or cells.
"""

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- table: (\S+): ([^;]+?)(?:; without: (.+?))? -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def table(file: str, start: str, without: str | None) -> str:
    """Return the first table at or below the line of a results file that begins like that."""
    text = (ROOT / "benchmarks" / "results" / file).read_text()
    line = re.search(rf"^(\| *)?{re.escape(start)}", text, flags=re.MULTILINE)
    found = line and re.search(r"(^\|.*\n)+", text[line.start() :], flags=re.MULTILINE)
    if not found:
        raise SystemExit(f"benchmarks/results/{file} has no table at a line that begins with {start!r}.")
    rows = [[cell.strip() for cell in row[1:-1].split("|")] for row in found.group().splitlines()]
    for pattern in re.split(r";\s+", without) if without else ():
        kept = [place for place, name in enumerate(rows[0]) if not place or not fnmatchcase(name, pattern)]
        fewer = [[row[place] for place in kept] for row in rows if not fnmatchcase(" | ".join(row), f"{pattern} | *")]
        if fewer == rows:
            raise SystemExit(f"The table {start!r} of benchmarks/results/{file} has no row or column {pattern!r}.")
        rows = fewer
    return "".join(
        f"|{'|'.join(row)}|\n" if set("".join(row)) <= set("-:") else f"| {' | '.join(row)} |\n" for row in rows
    )


def filled(page: str) -> str:
    """Return the text of a page with every marked table as it stands in the results."""
    return PLACE.sub(lambda place: f"{place[1]}\n{table(*place.group(2, 3, 4))}\n{place[5]}", page)


def main() -> None:
    """Write the pages that are stale, or name them and fail."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    stale = [page for page in pages if filled(page.read_text()) != page.read_text()]
    if "--check" in sys.argv and stale:
        raise SystemExit(f"Run python docs/tables.py: stale tables in {', '.join(str(page) for page in stale)}.")
    for page in stale:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
