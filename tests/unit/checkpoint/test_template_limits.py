"""Chat templates that would take all time or memory, and those that must not be refused."""

from __future__ import annotations

import resource
from datetime import UTC, datetime

import jinja2
import pytest

from baton.checkpoint.template_environment import MAX_SOURCE_CHARS, TemplateEnvironment
from baton.checkpoint.tokenizer import TEMPLATE_ERRORS

FOR_ALL = "{% for a in range(99999) %}"
END = "{% endfor %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = "
HOSTILE = {
    "nested loops": f"{FOR_ALL * 9}{END * 9}",
    "loop of output": f"{FOR_ALL}{{{{ 'x' * 9999 }}}}{END}",
    "loop in a macro": f"{{% macro m() %}}{FOR_ALL}x{END}{{% endmacro %}}"
    f"{FOR_ALL}{{{{ m() }}}}{END}",
    "exponential macro": "{% macro m(n) %}{{ m(n - 1) }}{{ m(n - 1) }}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for a in [[1] * 500] * 500 recursive %}{{ loop([a] * 500) }}{% endfor %}",
    "doubled by ~": f"{DOUBLED}ns.x ~ ns.x %}}{END}",
    "doubled by +": f"{DOUBLED}ns.x + ns.x %}}{END}",
    "doubled by a list": f"{DOUBLED}[ns.x, ns.x] %}}{END}{{{{ ns.x }}}}",
    "doubled by a tuple, as a key": f"{DOUBLED}(ns.x, ns.x) %}}{END}{{{{ {{ns.x: 1}} }}}}",
    "doubled by a tuple, looked up": f"{DOUBLED}(ns.x, ns.x) %}}{END}{{{{ {{}}[ns.x] }}}}",
    "doubled by a dict": f"{DOUBLED}dict(a=ns.x, b=ns.x) %}}{END}{{{{ ns.x|tojson }}}}",
    "doubled by a filter": f"{DOUBLED}[1, 1]|map(attribute='q', default=ns.x)|list %}}{END}"
    "{{ ns.x|string }}",
    "doubled and compared": f"{DOUBLED}[ns.x, ns.x] %}}{END}{{{{ ns.x == [ns.x[0], ns.x[1]] }}}}",
    "doubled and searched": f"{DOUBLED}[ns.x, ns.x] %}}{END}{{{{ ns.x.index(1) }}}}",
    "doubled in an error": f"{DOUBLED}[ns.x, ns.x] %}}{END}{{{{ raise_exception(ns.x) }}}}",
    "namespaces in each other": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = [namespace(x=ns.x), namespace(x=ns.x)] %}{% endfor %}{{ ns.x }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{{ 'x' * 999999999999 }}",
    "list product": "{{ ([0] * 999999999)|length }}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "center": "{{ 'x'|center(999999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999999) }}",
    "indent": "{{ ('x\n' * 9999)|indent(9999999) }}",
    "json indent": "{{ [1]|tojson(indent=9999999999) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace by a filter": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "join": "{{ ('x' * 99999).join('a' * 99999) }}",
    "join of one text": "{{ range(99999)|map(attribute='q', default='x' * 99999)|join }}",
    "format": "{{ '%999999999d' % 1 }}",
    "format of a variable width": "{{ '%*d' % (999999999, 1) }}",
    "format by a filter": "{{ '%999999999d'|format(1) }}",
    "format by a method": "{{ '{:999999999}'.format(1) }}",
    "format by a map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "format of a nested width": "{{ '{:{}}'.format(1, 999999999) }}",
    "format of one text": "{{ ('{0}' * 9999).format('x' * 99999) }}",
    "batch": "{{ [1]|batch(999999999, 0)|list|length }}",
    "slice": "{{ [1]|slice(999999999)|list|length }}",
    "round": "{{ 1.5|round(999999999) }}",
    "slices in a loop": f"{{% set x = 'x' * 999999 %}}{FOR_ALL}{{% set y = x[1:] %}}{END}",
    "sets in a loop": f"{FOR_ALL}{{% set y %}}{'x' * 9999}{{% endset %}}{END}",
    "sum of lists": "{{ ([[1] * 9999] * 9999)|sum(start=[])|length }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "long source": "x" * (MAX_SOURCE_CHARS + 1),
    "lorem ipsum": "{{ lipsum(999999) }}",
}
USEFUL = """
{%- set ns = namespace(texts=[], last='') -%}
{%- for m in messages if m.role != 'system' -%}
{%- set ns.texts = ns.texts + [m] -%}
{%- set ns.last = (messages|selectattr('role', 'equalto', 'user')|list|last).content -%}
<|{{ m.role }}|>{{ m['content'].replace('</think>', '<|end|>').split('<|end|>')[-1]|trim }}
{{- '\n' if not loop.last else '' }}{{ loop.index }}/{{ loop.length }}
{%- endfor -%}
{%- for tool in tools %}{{ tool|tojson(indent=2) }}{{ "%s: 2024" % tool.name }}{% endfor -%}
{{ messages[::-1][0].content[:9] }}{{ {'a': 1}.items()|list }}{{ ns.texts|length }}
"""


@pytest.fixture
def environment() -> TemplateEnvironment:
    return TemplateEnvironment(lambda: datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_an_endless_template_is_refused_before_it_takes_memory(
    source: str, environment: TemplateEnvironment
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(TEMPLATE_ERRORS):
        environment.render(environment.from_string(source), {"messages": []})

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_a_long_chat_is_rendered_as_without_limits(environment: TemplateEnvironment) -> None:
    messages = [
        {
            "role": "user" if turn % 2 else "assistant",
            "content": f"</think>{turn} " + "word " * 5000,
        }
        for turn in range(150)
    ]
    tools = [{"name": "tool", "parameters": {"type": "object", "properties": {}}}]
    variables = {"messages": messages, "tools": tools}

    found = environment.render(environment.from_string(USEFUL), variables)

    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = environment.filters["tojson"].__wrapped__
    assert found == plain.from_string(USEFUL).render(variables)
    assert len(found) > 3_000_000
