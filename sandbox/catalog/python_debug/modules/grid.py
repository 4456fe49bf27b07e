"""Tables of numbers: lists of rows."""


def transpose(rows):
    """Rows become columns."""
    return [list(column) for column in zip(*rows, strict=True)]


def rotate(rows):
    """A quarter turn clockwise."""
    return transpose(rows[::-1])


def multiply(left, right):
    """Matrix product; ValueError when the sizes do not fit."""
    if len(left[0]) != len(right):
        raise ValueError("sizes do not fit")
    columns = transpose(right)
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left
    ]


def neighbours(rows, y, x):
    """Values beside a cell, above and below first, then left and right."""
    found = []
    for step_y, step_x in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        other_y, other_x = y + step_y, x + step_x
        if 0 <= other_y < len(rows) and 0 <= other_x < len(rows[0]):
            found.append(rows[other_y][other_x])
    return found


def peaks(rows):
    """[y, x] of every cell that is larger than all its neighbours."""
    found = []
    for y in range(len(rows)):
        for x in range(len(rows[0])):
            if all(rows[y][x] > value for value in neighbours(rows, y, x)):
                found.append([y, x])
    return found


def spiral(rows):
    """Values from the outside to the inside, clockwise from the top left."""
    values = []
    while rows:
        values += rows[0]
        rows = [list(row) for row in zip(*rows[1:], strict=True)][::-1]
    return values
