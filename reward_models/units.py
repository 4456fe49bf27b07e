"""How large is a task? Unit extractors by name: pages of its PDFs, lines of its code.

A budget is rate x units (reward_models.budget). Families say their units as they draw an instance;
for a task folder that says none they are counted from the files the agent is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from infra.errors import ConfigError

Extractor = Callable[[Path], float | None]
"""Units of one file; None: this file has none of that kind."""

CODE_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("py", "pyi", "js", "jsx", "ts", "tsx", "go", "rs", "c", "h", "cc", "cpp", "hpp", "java"),
        *("kt", "rb", "php", "cs", "scala", "sh", "sql", "lua", "swift"),
    )
)
MAX_FILES = 10_000


def pdf_pages(path: Path) -> float | None:
    """ConfigError for a file that is named .pdf and is none."""
    if path.suffix.lower() != ".pdf":
        return None
    import pypdf
    from pypdf.errors import PyPdfError

    try:
        return float(len(pypdf.PdfReader(path).pages))
    except (PyPdfError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as PDF ({error}); mend it, or say the task's units yourself: "
            "[metadata.parl.budget] units = {pdf_pages = 12}"
        ) from error


def code_lines(path: Path) -> float | None:
    """Lines that are not blank."""
    if path.suffix.lower() not in CODE_SUFFIXES:
        return None
    with path.open("rb") as file:
        return float(sum(bool(line.strip()) for line in file))


EXTRACTORS: dict[str, Extractor] = {"pdf_pages": pdf_pages, "code_lines": code_lines}
"""More are registered here, under the name that budget.rates gives a rate."""


def units_of(root: Path, extractors: Iterable[str] = tuple(EXTRACTORS)) -> dict[str, float]:
    """Sums over all files below ``root`` (a folder or one file); kinds without any are left out.

    ConfigError: an unknown extractor, a broken PDF, more than MAX_FILES files.
    """
    names = list(extractors)
    unknown = sorted(set(names) - set(EXTRACTORS))
    if unknown:
        raise ConfigError(
            f"no unit extractor {unknown[0]!r}; expected some of {', '.join(sorted(EXTRACTORS))}"
        )
    totals: dict[str, float] = {}
    for number, path in enumerate(_files(root)):
        if number == MAX_FILES:
            raise ConfigError(
                f"{root} holds more than {MAX_FILES} files; say the task's units yourself: "
                "[metadata.parl.budget] units = {code_lines = 5000}"
            )
        for name in names:
            units = EXTRACTORS[name](path)
            if units is not None:
                totals[name] = totals.get(name, 0.0) + units
    return {name: value for name, value in totals.items() if value}


def _files(root: Path) -> Iterable[Path]:
    if root.is_file():
        return [root]
    # a link may lead out of the task
    return (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
