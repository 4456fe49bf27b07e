"""Small text layouts."""


def wrap(text, width):
    """Lines of at most ``width`` characters; a longer word stands on a line of its own."""
    lines = []
    line = ""
    for word in text.split():
        if not line:
            line = word
        elif len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def truncate(text, width):
    """The text, or its beginning with "..." at the end, ``width`` characters in all."""
    if width < 3:
        raise ValueError("width must be 3 or more")
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def slug(text):
    """Lower-case letters and digits, words joined by single hyphens."""
    words = []
    word = ""
    for char in text.lower() + " ":
        if char.isalnum():
            word += char
        elif word:
            words.append(word)
            word = ""
    return "-".join(words)


def columns(rows):
    """Rows of texts as lines; each column is as wide as its widest text, two spaces between."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
