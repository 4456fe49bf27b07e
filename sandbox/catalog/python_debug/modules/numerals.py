"""Numbers in other notations."""

ROMAN = [
    [1000, "M"],
    [900, "CM"],
    [500, "D"],
    [400, "CD"],
    [100, "C"],
    [90, "XC"],
    [50, "L"],
    [40, "XL"],
    [10, "X"],
    [9, "IX"],
    [5, "V"],
    [4, "IV"],
    [1, "I"],
]
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def to_roman(number):
    """1994 -> "MCMXCIV"; 1 to 3999."""
    if not 1 <= number <= 3999:
        raise ValueError("1 to 3999")
    text = ""
    for value, letters in ROMAN:
        while number >= value:
            text += letters
            number -= value
    return text


def from_roman(text):
    """ "MCMXCIV" -> 1994."""
    values = {letters: value for value, letters in ROMAN if len(letters) == 1}
    total = 0
    for index, letter in enumerate(text):
        value = values[letter]
        if index + 1 < len(text) and values[text[index + 1]] > value:
            total -= value
        else:
            total += value
    return total


def to_base(number, base):
    """Digits of a number in a base from 2 to 36; a minus in front of negative numbers."""
    if not 2 <= base <= 36:
        raise ValueError("base must be 2 to 36")
    if number < 0:
        return "-" + to_base(-number, base)
    text = DIGITS[number % base]
    while number >= base:
        number //= base
        text = DIGITS[number % base] + text
    return text


def checksum_ok(text):
    """Luhn: from the right, every second digit counts double, and its digits are added."""
    total = 0
    for index, char in enumerate(reversed(text)):
        digit = int(char)
        if index % 2 == 1:
            digit *= 2
            if digit > 9:
                digit -= 9
        total += digit
    return total % 10 == 0
