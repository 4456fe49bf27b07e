"""Whole-number formulas with + - * / and parentheses; / rounds down."""


def tokens(text):
    """Numbers and signs, in order; ValueError for another character."""
    found = []
    number = ""
    for char in text + " ":
        if char.isdigit():
            number += char
            continue
        if number:
            found.append(number)
            number = ""
        if char in "+-*/()":
            found.append(char)
        elif char != " ":
            raise ValueError("unknown character")
    return found


def postfix(text):
    """The formula with every sign behind its numbers; * and / bind tighter than + and -."""
    rank = {"+": 1, "-": 1, "*": 2, "/": 2}
    output = []
    waiting = []
    for token in tokens(text):
        if token == "(":
            waiting.append(token)
        elif token == ")":
            while waiting and waiting[-1] != "(":
                output.append(waiting.pop())
            if not waiting:
                raise ValueError("a parenthesis was never opened")
            waiting.pop()
        elif token in rank:
            while waiting and rank.get(waiting[-1], 0) >= rank[token]:
                output.append(waiting.pop())
            waiting.append(token)
        else:
            output.append(token)
    return output + waiting[::-1]


def value(text):
    """Value of the formula."""
    stack = []
    for token in postfix(text):
        if token not in ("+", "-", "*", "/"):
            stack.append(int(token))
            continue
        right, left = stack.pop(), stack.pop()
        if token == "+":
            stack.append(left + right)
        elif token == "-":
            stack.append(left - right)
        elif token == "*":
            stack.append(left * right)
        else:
            stack.append(left // right)
    return stack[0]
