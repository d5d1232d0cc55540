"""Chat templates by name, for files without one, in the formats that models were trained with."""

from __future__ import annotations

from typing import Final

# For formats without a system role: the system prompt becomes part of the first message.
_SYSTEM = """{% set system = '' %}
{% if messages[0].role == 'system' %}
{% set system = messages[0].content %}{% set messages = messages[1:] %}
{% endif %}
"""

_CHATML = """{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{{ '<|im_start|>assistant\n' }}"""

_LLAMA_2 = (
    _SYSTEM
    + """{% set system = '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' if system else '' %}
{% for m in messages %}
{% if m.role == 'user' -%}
{{ bos_token }}[INST] {{ ((system if loop.first else '') ~ m.content) | trim }} [/INST]
{%- else -%}
{{ ' ' }}{{ m.content | trim }} {{ eos_token }}
{%- endif %}
{% endfor %}"""
)

_LLAMA_3 = """{{ bos_token }}
{%- for m in messages %}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endfor %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"""

_GEMMA = (
    _SYSTEM
    + """{{ bos_token }}
{%- for m in messages %}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ system | trim ~ '\n\n' if loop.first and system else '' }}{{ m.content | trim }}<end_of_turn>
{% endfor %}
{{ '<start_of_turn>model\n' }}"""
)

_PHI_3 = """{% for m in messages %}
<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}
{{ '<|assistant|>\n' }}"""

_PHI_4 = """{% for m in messages %}
<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>
{%- endfor %}
{{ '<|im_start|>assistant<|im_sep|>' }}"""

_ZEPHYR = """{% for m in messages %}
<|{{ m.role }}|>
{{ m.content }}{{ eos_token }}{{ '\n' }}
{%- endfor %}
{{ '<|assistant|>\n' }}"""

_VICUNA = """{% for m in messages %}
{% if m.role == 'system' -%}
{{ m.content }}{{ ' ' }}
{%- elif m.role == 'user' -%}
USER: {{ m.content }}{{ ' ' }}
{%- else -%}
ASSISTANT: {{ m.content }}{{ eos_token }}
{%- endif %}
{% endfor %}
{{ 'ASSISTANT:' }}"""

_OPENCHAT = """{{ bos_token }}
{%- for m in messages %}
{{ '' if m.role == 'system' else 'GPT4 Correct ' ~ m.role | title ~ ': ' }}
{{- m.content }}<|end_of_turn|>
{%- endfor %}
{{ 'GPT4 Correct Assistant:' }}"""

_MISTRAL_7 = """{{ bos_token }}
{%- for m in messages %}
{% if m.role == 'system' -%}
[SYSTEM_PROMPT] {{ m.content }}[/SYSTEM_PROMPT]
{%- elif m.role == 'user' -%}
[INST] {{ m.content }}[/INST]
{%- else -%}
{{ ' ' }}{{ m.content }}{{ eos_token }}
{%- endif %}
{% endfor %}"""


def _mistral(begin: str, end: str, answer: str) -> str:
    """`begin` and `end` surround user messages; `answer` is an expression for the assistant's."""
    return (
        _SYSTEM
        + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        + f"{begin}{{{{ system ~ '\\n\\n' if loop.first and system else '' }}}}"
        + f"{{{{ m.content }}}}{end}{{% else %}}{{{{ {answer} ~ eos_token }}}}"
        + "{% endif %}{% endfor %}"
    )


# By llama.cpp's names.
BUILTIN_TEMPLATES: Final = {
    "chatml": _CHATML,
    "gemma": _GEMMA,
    "llama2": _LLAMA_2,
    "llama3": _LLAMA_3,
    "mistral-v1": _mistral(" [INST] ", " [/INST]", "' ' ~ m.content"),
    "mistral-v3": _mistral("[INST] ", "[/INST]", "' ' ~ m.content | trim"),
    "mistral-v3-tekken": _mistral("[INST]", "[/INST]", "m.content"),
    "mistral-v7": _MISTRAL_7,
    "openchat": _OPENCHAT,
    "phi3": _PHI_3,
    "phi4": _PHI_4,
    "vicuna": _VICUNA,
    "zephyr": _ZEPHYR,
}
