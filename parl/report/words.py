"""How numbers are written: the same digits in progress lines, tables and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def rate(value: float | None) -> str:
    """0.9316 -> ".932"; None -> "-"."""
    if value is None:
        return "-"
    return f"{value:.3f}".removeprefix("0") if value < 1 else f"{value:.2f}"


def tokens(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """72.4 -> "1:12"; 3723 -> "1:02:03"; None -> "?"."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def small(value: float | None) -> str:
    """A difference that should be tiny: "3.1e-06"; None -> "-"."""
    return "-" if value is None else f"{value:.1e}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def by_type(values: Mapping[str, float | None], write: Callable[[float | None], str]) -> str:
    """{"lookup": .91, "add": .53} -> "add .530 lookup .910": names in order."""
    return " ".join(f"{name} {write(value)}" for name, value in sorted(values.items()))
