"""Features of Jinja2 one by one: the text of transformers, and special tokens of the template."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_cpp.model.chat_template import ChatTemplate
from support.needs import packages
from support.vocabularies import byte_pairs
from support.vocabularies import tokenizer_of as tokenizer

SPECIAL = ["<s>", "</s>", "<|user|>", "<|x|>", "[INST]", "[/INST]"]
TOKENIZER = tokenizer(byte_pairs(*((text, 3) for text in SPECIAL), bos_token_id=258))
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "true if a < b & [c], é",
        "parameters": {"type": "object", "properties": {"op": {"enum": ["<", "[", "</s>"]}}},
    },
}
MESSAGES = [
    {"role": "user", "content": " Is 1 < 2? [x]\n"},
    {"role": "assistant", "content": "<think>\nhm [\n</think>\n\nYes </s"},
    {"role": "user", "content": "Why <|x|> [INST]?"},
]

# "c" is a message's text.
FEATURES = [
    # Texts that templates look for in messages.
    "{{ c.split('</think>')[-1] }}<s>",
    "{{ c.split('</think>')[0].split('<think>')[-1].strip('\\n') }}<s>",
    "{{ '<' in c }}{{ '[' in c }}{{ c.startswith('<') }}{{ c.endswith(']\\n') }}<s>",
    "{{ c.index(' ') }}{{ c.find('[') }}{{ c.count('<') }}{{ c | length }}<s>",
    "{{ c[0] == '<' }}{{ c[-1] == '[' }}{{ c < '[' }}{{ c == '<' }}<s>",
    "{{ c.replace('<think>', '[') }}<s>",
    "{{ c.rsplit('<', 1) }}{{ c.partition('<') }}{{ c.splitlines() }}<s>",
    "{{ c.lstrip('<[ ') }}{{ c.strip('[\\n') }}{{ c.removeprefix('<think>') }}<s>",
    "{% if c is string and '</think>' in c %}{{ c | reverse }}{% endif %}<s>",
    # Expressions that print objects.
    "{{ messages }}{{ tools }}<s>",
    "{{ tools | string }}{{ 'x' ~ tools ~ '<s>' }}",
    "{{ tools | tojson }}{{ messages | tojson(indent=2) }}<s>",
    "{{ tools | tojson(ensure_ascii=True) }}{{ c | tojson(ensure_ascii=True) }}<s>",
    "{{ tools | tojson(sort_keys=True, separators=(',', ':')) }}<s>",
    "{{ {'a': ['<s>', 1, none, true, 1.5]} }}{{ ('<s>', c) }}",
    "{{ {'a': c} | tojson }}{{ ['<', c] | tojson }}<s>",
    "{{ '%r' % c }}{{ '%s' % [c] }}{{ '{!r}'.format(c) }}<s>",
    "{{ tools[0].function.parameters | pprint }}<s>",
    "{{ tools[0] | dictsort }}{{ tools[0].items() | list }}<s>",
    # How text is put together.
    "<s>{{ c }}</s>",
    "{{ '<s>' + c + '</s>' }}",
    "{{ '<s>' ~ c ~ 1 ~ none ~ '</s>' }}",
    "{{ '<|' + role + '|>' }}{{ '<|' ~ role ~ '|>' ~ c }}",
    "{{ bos_token + c + eos_token }}",
    "{{ '<s>' * 2 }}{{ 2 * '</s>' }}",
    "{{ '%s%s</s>' % ('<s>', c) }}{{ '<s>%5d%%' % 3 }}{{ '<s>%(x)s' % {'x': c} }}",
    "{{ '<s>{}</s>{}'.format(c, '<s>') }}{{ '{x:>9}<s>{x}'.format(x=c) }}",
    "{{ '<s>{0[role]}{0[content]}'.format(messages[0]) }}{{ '<s>{a}'.format_map({'a': c}) }}",
    "{{ '<s>%s' | format(c) }}",
    "{{ ['<s>', c, '</s>'] | join }}{{ [c, c] | join('<s>') }}{{ '</s>'.join([c, 'x']) }}",
    "{{ messages | map(attribute='content') | join('</s>') }}",
    "{{ messages | join('</s>', attribute='role') }}",
    "{{ c.replace('Is', '<s>').replace('Yes', '</s>') }}",
    "{{ c | replace('Is', '<s>') | replace('Why', '</s>') }}",
    "{{ '<s>x</s>'.replace('x', c) }}{{ '<s>' | replace('<', '<') }}",
    "{{ ('<s>' ~ c).split('s')[0] ~ 's>' }}{{ ('x<s>' ~ c)[1:4] }}{{ '<s>'[:2] ~ '>' }}",
    "{{ '<S>' | lower }}{{ '<s>'.upper() | lower }}{{ ('<S>' ~ c) | lower }}",
    "{{ '  <s> ' | trim }}{{ ' <s>'.strip() }}{{ '<s>' | trim('x') }}",
    "{% for x in ['<s>', c, '</s>'] %}{{ x }}{% endfor %}",
    "{% for x in '<s>' %}{{ x }}{% endfor %}{{ '<s>' | list | join }}",
    "{% for x in '<s> </s>'.split() %}{{ x }}{% endfor %}",
    "{{ '<s>' | first ~ 's>' }}{{ '<s>' | reverse | reverse }}",
    "{{ {'user': '<s>', 'assistant': '</s>'}[role] }}{{ {'a': '<s>'}.get('a') }}",
    "{{ {'a': '<s>'}.a }}{{ dict(a='<s>')['a'] }}",
    "{% set x = '<s>' ~ c %}{{ x }}",
    "{% set x %}<s>{{ c }}{% endset %}{{ x }}",
    "{% set x | upper %}{{ c }}{% endset %}{{ x }}<s>",
    "{% set n = namespace(x='<s>') %}{% for m in messages %}{% set n.x = n.x + m.content %}"
    "{% endfor %}{{ n.x }}",
    "{% macro f(x, y='</s>') %}<s>{{ x }}{{ y }}{% endmacro %}{{ f(c) }}{{ f(c, y='<s>') ~ c }}",
    "{% macro f() %}<s>{{ caller(1) }}</s>{% endmacro %}{% call(x) f() %}{{ c }}{% endcall %}",
    "{% filter upper %}{{ c }}{% endfilter %}{% filter trim %} <s> {% endfilter %}",
    "{% for m in messages recursive %}<s>{{ m.content }}{{ loop([]) }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('<s>', '</s>') }}{{ loop.index }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ '<s>' if loop.first else '</s>' }}{% endfor %}",
    "{% for k, v in messages[0] | items %}<s>{{ k }}={{ v }}{% endfor %}",
    "{% for r, g in messages | groupby('role') %}<s>{{ r }}{{ g | length }}{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}<s>",
    "{{ messages | rejectattr('role', 'in', ['user']) | list | last }}<s>",
    "{{ messages | map('tojson') | join('<s>') }}{{ [c] | map('upper') | first }}",
    "{{ x | default('<s>') }}{{ '' | default('</s>', true) }}{{ none or '<s>' }}",
    "{{ ['</s>', '<s>'] | sort | first }}{{ ['<s>', '<s>'] | unique | join }}",
    "{{ ['<s>', '</s>'] | batch(1) | list | length }}{{ ['<s>'] + ['</s>'] }}<s>",
    "{{ '<s>' is string }}{{ c is mapping }}{{ x is defined }}{{ 'a' is in c }}<s>",
    "{{ c | capitalize }}{{ c | title }}{{ c | upper }}<s>",
    "{{ c | center(30) }}{{ c | indent }}{{ c | indent(2, true) }}{{ c | truncate(9) }}<s>",
    "{{ c | wordwrap(9) }}{{ c | wordcount }}{{ c | urlencode }}{{ c | striptags }}<s>",
    "{{ c | escape }}{{ c | e | string }}{{ (c | safe) + '<b>' }}{{ '<b>' + (c | safe) }}<s>",
    "{{ (c | e) ~ c }}{{ c | forceescape }}{{ {'a': c} | xmlattr }}{{ c | urlize }}<s>",
    "{% autoescape true %}{{ c }}{{ '<b>' ~ c }}{{ [c] | join('<') }}{% endautoescape %}<s>",
    "{{ c | list | length }}{{ c | first }}{{ c | last }}{{ c | int }}{{ '3' | int + 1 }}<s>",
    "{{ '<s>' if c else '' }}{{ '<s>' and '</s>' }}{{ not '<s>' }}",
    "{% raw %}{{ <s> }}{% endraw %}{# <s> #}",
    "  {%- if true -%}  <s>  {%- endif %}\n  {{- '</s>' -}}  \n",
    "{% generation %}<s>{{ c }}{% endgeneration %}",
    "{{ c.encode is defined }}{{ '<s>'.isalpha() }}{{ '<s>'.zfill(5) }}{{ 'a'.center(9, '<') }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}<s>{% endfor %}",
    "{{ '<s>' | attr('upper') is defined }}{{ '<s>'.nothing is defined }}<s>",
    "{{ range(3) | join('<s>') }}{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}",
    "{% with x = '<s>' %}{{ x ~ c }}{% endwith %}",
    "{% block b %}<s>{{ messages[0].content }}{% endblock %}",
]
# Their text is made of the template's in ways that marks do not follow.
UNMARKED = [
    "{{ {'a': ['<s>', 1, none, true, 1.5]} }}{{ ('<s>', c) }}",
    "{{ c.encode is defined }}{{ '<s>'.isalpha() }}{{ '<s>'.zfill(5) }}{{ 'a'.center(9, '<') }}",
]

ERRORS = [
    "{{ raise_exception('No <s>: ' ~ c) }}",
    "{{ c + 1 }}",
    "{{ '<s>' + 1 }}",
    "{{ 1 + '<s>' }}",
    "{{ '<s>' + tools }}",
    "{{ '<s>' + x }}",
    "{{ x + '<s>' }}",
    "{{ '<s>' % (c, c) }}",
    "{{ '<s>'.x() }}",
    "{{ '<s>'.__class__ }}{{ ''.__class__.mro() }}",
    "{{ messages['<s>'].x }}",
    "{{ [c, 1] | sort }}",
    "{{ tools[c] + c }}",
    "{{ '{x}'.format(c) }}",
    "{{ x | tojson }}",
]


def rendered(source: str, message: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    found: Any = render_jinja_template(
        conversations=[MESSAGES],
        tools=[TOOL],
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        c=message["content"],
        role=message["role"],
    )
    text: str = found[0][0]
    return text


@packages("transformers")
@pytest.mark.parametrize("source", FEATURES)
def test_text_is_that_of_transformers(source: str) -> None:
    template = ChatTemplate(f"{source}{{# {{{{ #}}", TOKENIZER, tool_parser="hermes")
    for message in MESSAGES:
        given = {"c": message["content"], "role": message["role"]}
        found = template.text(MESSAGES, tools=[TOOL], variables=given)
        assert found == rendered(f"{source}{{# {{{{ #}}", message)


@packages("transformers")
@pytest.mark.parametrize("source", ERRORS)
def test_errors_are_those_of_transformers(source: str) -> None:
    template = ChatTemplate(source, TOKENIZER, tool_parser="hermes")
    with pytest.raises(Exception) as expected:  # noqa: PT011 - of any type
        rendered(source, MESSAGES[2])
    with pytest.raises(ValueError, match="refuses these messages") as found:
        template.text(MESSAGES, tools=[TOOL], variables={"c": MESSAGES[2]["content"]})
    assert str(found.value) == f"the chat template refuses these messages: {expected.value}"


@pytest.mark.parametrize("source", FEATURES)
def test_special_tokens_are_the_templates(source: str) -> None:
    """All of them, and as many if texts of the same form have some."""
    template = ChatTemplate(f"{source}{{# {{{{ #}}", TOKENIZER, tool_parser="hermes")
    hostile = "".join(SPECIAL) + " Is Yes <s> Why"
    harmless = hostile.replace("<", "(").replace("[", "(")

    def given(text: str) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": text, "parameters": {text: text}}}
        return {
            "messages": [{"role": role, "content": text} for role in ("user", "assistant")],
            "tools": [tool],
            "variables": {"c": text, "role": "user"},
        }

    tokens = template.prompt(**given(harmless)).tokens
    if source not in UNMARKED:
        assert tokens == TOKENIZER.encode(template.text(**given(harmless)), parse_special=True)
    special = [token for token in tokens if token >= 258]
    assert [i for i in template.prompt(**given(hostile)).tokens if i >= 258] == special
