"""Hostile chat templates: each ends in one clear error, soon and in bounded memory."""

import time

import pytest
from jinja2 import TemplateError

from nanobeacon import template
from nanobeacon.config import parse_config

TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "set range": (
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "output": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "times": "{{ 'a' * 10**10 }}",
    "times list": "{{ [1] * 10**10 }}",
    "tilde": (
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "plus": (
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "list doubling": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
    ),
    "power": "{{ 9**(9**9) }}",
    "center": "{{ 'a'.center(10**10) }}",
    "center f": "{{ 'a'|center(10**10) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format f": "{{ '%10000000000d'|format(1) }}",
    "star": "{{ '%*d' % (10**10, 1) }}",
    "nested format": "{{ '{:{}}'.format(1, 10**10) }}",
    "replace": "{% set a = 'a'*1000000 %}{{ a.replace('a', a) }}",
    "replace f": "{% set a = 'a'*1000000 %}{{ a|replace('a', a) }}",
    "join": "{% set a = 'a'*1000000 %}{{ a.join(a) }}",
    "join f": "{% set a = 'a'*1000000 %}{{ a|join(a) }}",
    "indent": "{% set a = '\n'*1000000 %}{{ a|indent(1000000) }}",
    "expandtabs": "{% set a = '\t'*1000000 %}{{ a.expandtabs(1000000) }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macro tree": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"),
    "block": (
        "{% set a = 'a'*1000000 %}{% set x %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endset %}"
    ),
    "list str": "{{ ['a'*1000000]*1000000 }}",
    "tojson": "{{ [[1]]|tojson(indent=1000000000) }}",
    "recursive": "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "attr": "{{ ''.__class__.__mro__ }}",
    "attr2": "{{ ''|attr('__class__') }}X{{ cycler.__init__.__globals__ }}",
    "equality": (
        "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(50) %}"
        "{% set ns.a=[ns.a,ns.a] %}{% set ns.b=[ns.b,ns.b] %}{% endfor %}"
        "{{ ns.a == ns.b }}"
    ),
    "deep for": "{% for a in b %}" * 1000 + "{% endfor %}" * 1000,
    "nested expr": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "map": "{{ range(99999)|map('string')|list|join(('a'*1000000)) }}",
    "zero": "{{ 1/0 }}",
    "dict": (
        "{% set ns=namespace(d={}) %}{% for i in range(60) %}"
        "{% set ns.d={'a':ns.d,'b':ns.d} %}{% endfor %}{{ ns.d|tojson }}"
    ),
    "if chain": "{% for i in range(99999) if range(99999)|sort %}{% endfor %}",
    "call sort": ("{% for i in range(99999) %}{% if range(99999)|sort|length %}{% endif %}{% endfor %}"),
}
ERRORS = (TemplateError, RecursionError, ZeroDivisionError)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_can_neither_run_for_ever_nor_fill_the_memory(name, monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 0.1)
    began = time.monotonic()
    with pytest.raises(ERRORS):
        template.rendered(template.compiled(TEMPLATES[name]), {"messages": []})
    assert time.monotonic() - began < 5  # of 0.1 allowed: far from for ever


@pytest.mark.parametrize("source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}"])
def test_a_template_reads_no_other_file(source):
    with pytest.raises(TypeError, match="no loader"):
        template.rendered(template.compiled(source), {"messages": []})


def test_an_ordinary_template_is_not_bounded():
    source = "{% for m in messages %}{{ m.role ~ ': ' + m.content|trim }}\n{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1_000_000}] * 5
    text = template.rendered(template.compiled(source), {"messages": messages})
    assert len(text) == 5 * (1_000_000 + len("user: \n"))


def test_a_layer_count_that_no_model_has_is_refused_before_anything_is_built():
    config = {"model_type": "llama", "num_hidden_layers": 10**9, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="num_hidden_layers is 1000000000"):
        parse_config(config)
