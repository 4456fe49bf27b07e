# --- calculator: exact arithmetic for tools.py (sandbox/catalog/parts/calculator.py) ---

import ast
import decimal
import fractions

from sandbox.toolkit import ToolError, tool

MAX_EXPRESSION_CHARS = 500
MAX_ABS = 10**15
MAX_PLACES = 10


@tool(effect="read", idempotent=True)
def calc(expression: str) -> str:
    """Exact value of an expression with numbers, + - * / and parentheses; round(x, 2) rounds half
    away from zero."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"expression is longer than {MAX_EXPRESSION_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError("not an expression") from error
    return _decimal_text(_value_of(tree.body, expression.strip()), MAX_PLACES)


def _value_of(node: ast.expr, text: str) -> fractions.Fraction:
    match node:
        case ast.Constant(value=bool()):
            value = None
        case ast.Constant(value=int() | float()):
            value = _literal(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value_of(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value_of(operand, text)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            value = _value_of(left, text) + _value_of(right, text)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            value = _value_of(left, text) - _value_of(right, text)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            value = _value_of(left, text) * _value_of(right, text)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            divisor = _value_of(right, text)
            if divisor == 0:
                raise ToolError("division by zero")
            value = _value_of(left, text) / divisor
        case ast.Call(func=ast.Name(id="round"), args=[number, ast.Constant(value=int(places))]):
            if not 0 <= places <= MAX_PLACES:
                raise ToolError(f"round to 0 to {MAX_PLACES} places")
            value = fractions.Fraction(_decimal_text(_value_of(number, text), places))
        case _:
            value = None
    if value is None:
        raise ToolError("only numbers (1234.5), + - * / round(x, n) and parentheses")
    if abs(value) > MAX_ABS or value.denominator > MAX_ABS**4:
        raise ToolError(f"a value is larger than {MAX_ABS} or too fine")
    return value


def _literal(text: str) -> fractions.Fraction | None:
    """Digits with one point; an exponent could ask for a number of a billion digits."""
    plain = text.isascii() and text.replace(".", "", 1).isdigit()
    return fractions.Fraction(text) if plain else None


def _decimal_text(value: fractions.Fraction, places: int) -> str:
    """Rounded half away from zero, without trailing zeros."""
    with decimal.localcontext() as context:
        context.prec = 60
        quotient = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)
        rounded = quotient.quantize(decimal.Decimal(1).scaleb(-places), decimal.ROUND_HALF_UP)
    text = f"{rounded:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text
