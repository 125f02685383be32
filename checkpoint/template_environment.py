"""Jinja environment of chat templates, with limits: templates are untrusted code of the model.

A rendering has a budget, to which each operation is charged before it is done: by the characters
and elements that it reads or makes, and by `STEP_COST` for each call, filter and pass of a loop.
So time and memory of a template are bounded, whatever it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Limits of the time to compile a template. Published ones have at most half of either.
MAX_SOURCE_CHARS = 1 << 16
MAX_NODES = 1 << 14
STEP_COST = 32
BASE_BUDGET = 16 << 20
BUDGET_PER_INPUT = 100  # for each character or element of the template's variables
# They read no more than the elements of a list; what these hold is charged where it is used.
SHALLOW_FILTERS = frozenset(
    {"count", "d", "default", "first", "items", "last", "length", "list", "map", "reject"}
    | {"rejectattr", "reverse", "select", "selectattr", "slice", "attr", "batch"}
)
SHALLOW_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "iterable"})
# Filters and methods of texts that may make more than they read: as much as the product.
PRODUCTS = frozenset(
    {"batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "rjust"}
    | {"round", "slice", "sum", "tojson", "translate", "zfill"}
)
LIST_SEARCHES = ("count", "index")  # which compare all elements
UNUSED_FILTERS = ("filesizeformat", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# Formats with widths of four digits, or of a variable: they make long texts from short ones.
WIDE_FORMAT = re.compile(
    r"%(\([^)]*\))?[-#0 +.\d]*(\d{4,}|\*)|\{[^{}]*:[^{}]*(\d{4,}|\{)",
)
FORMAT_COST = 256  # for each character of a format: those of a number with a width


class TemplateLimitError(jinja2.TemplateError):
    """A template does too much."""


class _Budget:
    """Cost that a rendering may still cause. Values cannot change, so sizes are remembered."""

    def __init__(self, variables: Mapping[str, object]) -> None:
        self._sizes: dict[int, tuple[object, int]] = {}  # by id, with the value that owns the id
        self._left = BASE_BUDGET + BUDGET_PER_INPUT * self.size(dict(variables))

    def spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise TemplateLimitError("it takes too much time or memory")

    def size(self, value: object) -> int:
        """Return the characters and elements of a value, as often as it refers to them."""
        if isinstance(value, str | bytes | range):
            return len(value) + 1
        if isinstance(value, list | tuple | dict):
            known = self._sizes.get(id(value))
            if known is None:
                known = self._sizes[id(value)] = (value, self._sum(value))
            return known[1]
        if isinstance(value, set | frozenset | KeysView | ValuesView | ItemsView):
            return self._sum(value)
        if isinstance(value, Namespace):
            raise TemplateLimitError("it uses a namespace as a value")
        return value.bit_length() // 8 + 1 if isinstance(value, int) else 1

    def _sum(self, values: Iterable[object]) -> int:
        total = 8 + sum(map(self.size, values))
        if isinstance(values, dict):
            total += sum(map(self.size, values.values()))
        return total


_budget: ContextVar[_Budget] = ContextVar("_budget")


def _concat(texts: Iterable[str]) -> str:
    parts = list(texts)
    _budget.get().spend(sum(map(len, parts)))
    return "".join(parts)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox in which templates change nothing, with a budget of operations."""

    concat = staticmethod(_concat)
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed when a template is compiled
            finalize=jinja2.pass_context(_finalize),
            extensions=[jinja2.ext.loopcontrols, _GenerationBlocks],
        )
        self.globals.pop("lipsum")
        for name in UNUSED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        for known, shallow in ((self.filters, SHALLOW_FILTERS), (self.tests, SHALLOW_TESTS)):
            for name, function in known.items():
                known[name] = _charged(name, function, is_shallow=name in shallow)
        self.filters |= {"_steps": _Steps, "_used": _use, "_copied": _copy}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: clock().strftime(form)

    def _parse(self, source: str, *names: Any) -> jinja2.nodes.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise jinja2.TemplateSyntaxError(
                f"it has {len(source)} characters; at most {MAX_SOURCE_CHARS} are supported", 1
            )
        return super()._parse(source, *names)

    def _generate(self, source: jinja2.nodes.Template, *names: Any, **options: Any) -> str:
        _insert_charges(source)
        return str(super()._generate(source, *names, **options))

    def render(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """Render within a budget. Raises TemplateLimitError, or whatever the template raises."""
        token = _budget.set(_Budget(variables))
        try:
            return str(template.render(variables))
        finally:
            _budget.reset(token)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_listed, args))
        _charge_call(called, (*args, *kwargs.values()))
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget.get().spend(STEP_COST + _cost_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _use(argument)  # it is hashed
        return super().getitem(obj, argument)


def _insert_charges(tree: jinja2.nodes.Template) -> None:
    """Charge what the sandbox has no hook for: loops, comparisons, joined texts, slices, keys."""

    def through(name: str, node: Any) -> jinja2.nodes.Filter:
        return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    nodes = list(tree.find_all(jinja2.nodes.Node))
    if len(nodes) > MAX_NODES:
        raise jinja2.TemplateSyntaxError(
            f"it has {len(nodes)} expressions; at most {MAX_NODES} are supported", 1
        )
    for node in nodes:
        if isinstance(node, jinja2.nodes.For):
            node.iter = through("_steps", node.iter)
        elif isinstance(node, jinja2.nodes.Concat):
            node.nodes = [through("_used", each) for each in node.nodes]
        elif isinstance(node, jinja2.nodes.Compare):
            node.expr = through("_used", node.expr)
            for operand in node.ops:
                operand.expr = through("_used", operand.expr)
        elif isinstance(node, jinja2.nodes.Pair):
            node.key = through("_used", node.key)
        elif isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice):
            node.node = through("_copied", node.node)


class _Steps:
    """Iterable of a loop, each pass of which is charged."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[object]:
        budget = _budget.get()
        for value in self._values:
            budget.spend(STEP_COST)
            yield value


def _use(value: Any) -> Any:
    """Charge for a value that is read as a whole."""
    budget = _budget.get()
    budget.spend(budget.size(value))
    return value


def _copy(value: Any) -> Any:
    """Charge for the elements of a value, but not for what they refer to."""
    _budget.get().spend(len(value) if isinstance(value, str | bytes | list | tuple) else 1)
    return value


def _finalize(_context: Context, value: Any) -> Any:
    _budget.get().spend(STEP_COST)
    return _use(value)


def _listed(value: Any) -> Any:
    """Return a list instead of an iterator, whose size is not known."""
    is_loop = isinstance(value, LoopContext)
    return list(value) if isinstance(value, Iterator) and not is_loop else value


def _charged(name: str, function: Any, *, is_shallow: bool) -> Any:
    """Return a filter or test that is charged before it is called."""

    @wraps(function)  # and whether it takes the context
    def charge(*args: Any, **kwargs: Any) -> Any:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        args = (*args[:first], *map(_listed, args[first:]))
        values = (*args[first:], *kwargs.values())
        _charge(name, values, is_shallow=is_shallow)
        return function(*args, **kwargs)

    return charge


def _charge_call(called: Any, values: tuple[Any, ...]) -> None:
    name = getattr(called, "__name__", "")
    owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
    if isinstance(called, LoopContext):
        _budget.get().spend(STEP_COST * sum(len(each) for each in values if _is_sequence(each)))
    if isinstance(called, Macro | LoopContext) or called is Namespace or called is dict:
        _budget.get().spend(STEP_COST * (1 + len(values)))
    elif owner is None or (isinstance(owner, dict | list | tuple) and name not in LIST_SEARCHES):
        _charge(name, values, is_shallow=False)
    else:
        _charge(name, (owner, *values), is_shallow=False)


def _charge(name: str, values: tuple[Any, ...], *, is_shallow: bool) -> None:
    budget = _budget.get()
    sizes = [
        len(value) if is_shallow and _is_sequence(value) else budget.size(value) for value in values
    ]
    cost = STEP_COST + sum(sizes)
    if name in ("format", "format_map"):
        cost += _cost_of_format(values[0], sum(sizes[1:]))
    elif name == "replace" and isinstance(values[0], str):
        cost += values[0].count(str(values[1])) * len(str(values[2]))
    elif name == "join":
        cost += sizes[0] * max(map(len, filter(_is_sequence, values[1:])), default=0)
    elif name in PRODUCTS:
        numbers = (abs(value) for value in values[1:] if isinstance(value, int))
        cost += sizes[0] * (sum(sizes[1:]) + sum(numbers))
    budget.spend(cost)


def _cost_of_binop(operator: str, left: Any, right: Any) -> int:
    budget = _budget.get()
    first, second = (
        len(each) if isinstance(each, list | tuple) else budget.size(each) for each in (left, right)
    )
    if operator == "%" and isinstance(left, str):
        return _cost_of_format(left, budget.size(right))
    if operator == "**" and isinstance(right, int):
        return first * abs(right)
    if operator == "*":
        repeats = left if _is_sequence(right) else right if _is_sequence(left) else 1
        return first * second * (abs(repeats) if isinstance(repeats, int) else 1)
    return first + second


def _cost_of_format(form: object, num_chars: int) -> int:
    if WIDE_FORMAT.search(str(form)):
        raise TemplateLimitError("it formats with a width of more than three digits")
    return len(str(form)) * (FORMAT_COST + num_chars)


def _is_sequence(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict | range)


class _GenerationBlocks(jinja2.ext.Extension):
    """The `{% generation %}` block, which marks assistant text and renders only its content."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which models are not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
