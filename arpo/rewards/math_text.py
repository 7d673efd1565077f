# ruff: noqa: RUF001 (the signs that look like letters are meant)
r"""Converts other notations of mathematics to LaTeX: Unicode signs, and the output of Python and sympy."""

from __future__ import annotations

import ast
import re
import unicodedata
from fractions import Fraction

_SIGNS = {
    "°": r"^\circ ", "º": r"^\circ ", "∞": r"\infty ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "×": r"\times ", "÷": r"\div ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ",
    "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∉": r"\notin ", "∪": r"\cup ", "∩": r"\cap ",
    "∅": r"\emptyset ", "∖": r"\setminus ", "⊂": r"\subset ", "⊆": r"\subseteq ", "∑": r"\sum ", "∏": r"\prod ",
    "∫": r"\int ", "∨": r"\lor ", "∧": r"\land ", "¬": r"\neg ", "⇒": r"\implies ", "→": r"\to ", "∣": r"\mid ",
    "…": r"\ldots ", "⋯": r"\cdots ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "′": "'", "″": "''", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
}  # fmt: skip
_LETTERS = {i: unicodedata.normalize("NFKC", chr(i)) for i in (*range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800))}
"""Full-width characters, and letters of mathematical alphabets (from copied PDFs) -> plain characters."""
_TABLE = {**_LETTERS, **{ord(sign): latex for sign, latex in _SIGNS.items()}}
_POWER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
_INDEX = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₐₑᵢⱼₖₘₙₓ]+")
_PARTS = re.compile("([0-9]?)([¼½¾⅐-⅞])")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|\\[a-z]+|[^\W\d_]))")
_DEGREES = {"√": "", "∛": "[3]", "∜": "[4]"}

_SPELLINGS = (
    (re.compile(r"\\\$|\\pounds(?![A-Za-z])|[€£¥]"), ""),  # a unit may be missing
    (re.compile(r"^\s*(?:=|\\approx(?![A-Za-z]))"), ""),
    (re.compile(r"\\(?:displaystyle|[bB]igg?[lrm]?)(?![A-Za-z])"), ""),
    (re.compile(r"(?:\s|~|\\[,;:!])+(?=\\?%)"), ""),
    (re.compile(r"(?<=[\d)}])\\(text[a-z]*|mathrm|mbox)\{(?=[A-Za-z]{4})"), r" \\\1{"),  # 17\text{marbles}
    (re.compile(r"\\lor(?![A-Za-z])"), r"\\text{ or }"),
    (re.compile(r"\\land(?![A-Za-z])"), r"\\text{ and }"),
    (re.compile(r"\\not\s*="), r"\\neq "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(bar|overline)(?:\s+|(?=\d))([A-Za-z0-9])"), r"\\\1{\2}"),
    (re.compile(r"\\(?:operatorname|mathrm|text|mathfrak)\{(Re|Im)\}"), r"\\\1"),
)
"""LaTeX that math-verify cannot parse -> the same in other LaTeX."""

_GREEK = re.findall(
    "[a-z]+", "alpha beta gamma delta epsilon zeta eta theta kappa mu nu xi rho sigma tau phi chi psi omega"
)
_NAMES = {"pi": r"\pi", "oo": r"\infty", "E": "e", "I": "i", **{name: rf"\{name} " for name in _GREEK}}
_FUNCTIONS = {
    "sqrt": r"\sqrt{%s}", "cbrt": r"\sqrt[3]{%s}", "exp": "e^{%s}", "log": r"\ln{(%s)}", "ln": r"\ln{(%s)}",
    "abs": "|%s|", "Abs": "|%s|", "factorial": "(%s)!", "floor": r"\lfloor %s\rfloor", "ceiling": r"\lceil %s\rceil",
    "asin": r"\arcsin{(%s)}", "acos": r"\arccos{(%s)}", "atan": r"\arctan{(%s)}", "Rational": r"\frac{%s}{%s}",
    "Fraction": r"\frac{%s}{%s}", "binomial": r"\binom{%s}{%s}",
    **{name: rf"\{name}{{(%s)}}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
}  # fmt: skip
PYTHON = re.compile(rf"\*|(?<![A-Za-z])(?:pi|oo|{'|'.join([*_FUNCTIONS, *_GREEK])})(?![A-Za-z])")
"""A star or one of these names marks a text without a backslash as Python."""
_OMITTED_STAR = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*(?=(?!e[-+]?\d)[A-Za-z(])")


def from_unicode(text: str) -> str:
    r"""Convert Unicode signs to LaTeX.

    >>> from_unicode("√6/2"), from_unicode("x²"), from_unicode("2½"), from_unicode("３，１４")
    ('\\sqrt{6}/2', 'x^{2}', '2 1/2', '3,14')
    """
    if text.isascii():
        return text
    text = _POWER.sub(lambda m: f"^{{{_plain(m[0])}}}", text)
    text = _INDEX.sub(lambda m: f"_{{{_plain(m[0])}}}", text)
    text = _PARTS.sub(_fraction, text).replace("\u2044", "/")
    # Each space becomes a blank (category Zs), and invisible format characters (Cf) go.
    text = "".join(" " if unicodedata.category(c) == "Zs" else c for c in text if unicodedata.category(c) != "Cf")
    text = text.translate(_TABLE)
    return _ROOT.sub(lambda m: rf"\sqrt{_DEGREES[m[1]]}{{{m[2] or m[3] or m[4] or ''}}}", text)


def respelled(text: str) -> str:
    r"""Respell LaTeX for math-verify.

    >>> respelled(r"x \not= 2 \lor x = 3"), respelled(r"z\bar z + \operatorname{Re}(z)")
    ('x \\neq  2 \\text{ or } x = 3', 'z\\bar{z} + \\Re(z)')
    """
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _fraction(match: re.Match) -> str:
    """Convert "½". After a digit it makes a mixed number."""
    above, below = unicodedata.normalize("NFKC", match[2]).split("\u2044")
    return f"{match[1]} {above}/{below}" if match[1] else rf"\frac{{{above}}}{{{below}}}"


def from_python(text: str) -> str:
    r"""Convert the output of Python or sympy to LaTeX. Other texts stay unchanged. Nothing is evaluated.

    >>> from_python("pi/4"), from_python("x**2 + 1 = 0"), from_python("(1, 2*pi]"), from_python("cat")
    ('\\frac{\\pi}{4}', '{x}^{2}+1=0', '(1,2\\cdot \\pi]', 'cat')
    """
    if "\\" in text or not PYTHON.search(text):
        return text
    try:
        return _list(text)
    except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):  # the text is not Python
        return text


def _list(text: str) -> str:
    """Convert an answer that may be a list, a tuple, an interval or an equation.

    Raises the errors of `ast.parse` and `_latex`.
    """
    text = text.strip()
    parts = [""]  # items and separators in turn: "a=(b,c)" -> "a", "=", "(b,c)"
    depth = 0
    num_in_first_bracket = 0  # characters up to the end of the bracket that the text starts with
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and not num_in_first_bracket:
            num_in_first_bracket = i + 1
        if depth == 0 and c in ",;=<>":
            parts += [c, ""]
        else:
            parts[-1] += c
    if len(parts) > 1:
        return "".join(part if part in ("", *",;=<>") else _list(part) for part in parts)
    is_in_brackets = text[:1] in tuple("([{") and num_in_first_bracket == len(text)
    if is_in_brackets and ("," in text or text[0] != "("):  # (x) is no tuple
        opening, closing = (rf"\{bracket}" if bracket in "{}" else bracket for bracket in (text[0], text[-1]))
        return opening + _list(text[1:-1]) + closing
    source = _OMITTED_STAR.sub(r"\1*", text.replace("^", "**"))
    return _latex(ast.parse(source, mode="eval").body)


def _latex(node: ast.expr) -> str:
    """Convert a Python expression. Raises ValueError if it is not arithmetic, KeyError for an unknown name or function,
    and TypeError for a call with a wrong number of arguments."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return str(Fraction(repr(number))) if "e" in repr(number) else repr(number)
        case ast.Name(id=name):
            return _NAMES[name] if name in _NAMES or len(name) > 1 else f"{{{name}}}"
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return ("-" if isinstance(node.op, ast.USub) else "") + _bracketed(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return rf"\frac{{{_latex(left)}}}{{{_latex(right)}}}"
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return f"{_bracketed(left)}^{{{_latex(right)}}}"
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return rf"{_bracketed(left)}\cdot {_bracketed(right)}"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            first = _bracketed(left) if isinstance(left, ast.Call) else _latex(left)
            return f"{first}{'+' if isinstance(sign, ast.Add) else '-'}{_bracketed(right)}"
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _FUNCTIONS[name] % tuple(_latex(argument) for argument in arguments)
    raise ValueError("no arithmetic")


def _bracketed(node: ast.expr) -> str:
    r"""Put brackets around everything except a number, a name or a fraction. Without them, cos(x)**2 would become
    \cos (x)^2, the cosine of a square."""
    text = _latex(node)
    is_fraction = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return text if is_fraction or isinstance(node, ast.Constant | ast.Name) else f"({text})"
