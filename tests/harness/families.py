"""Chat templates that behave as those of model families do.

Each is written anew and says only what matters for ids: which tokens mark a
turn, what is trimmed, stripped or added, how tools and their results appear.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from gyre.harness import render

# A system prompt of its own where none is given; no tools.
_SMOLLM2 = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\\nYou are a small model.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# Tools in the system prompt, one JSON object a line; results of one turn
# together under the user's role.
_QWEN_TOOLS = """\
{%- set first = messages[0].content if messages[0].role == 'system' else '@' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (first + '\\n\\n' if first else '') }}
{{- '# Tools\\n\\n<tools>' }}
{%- for t in tools %}{{- '\\n' + (t | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nAnswer with JSON in <tool_call></tool_call>.' }}
{{- '<|im_end|>\\n' }}
{%- elif first %}
{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}
{%- endif %}
{%- macro calls(m) %}
{%- for c in m.tool_calls %}
{{- '\\n' if m.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- macro result(m, loop) %}
{%- if loop.first or loop.previtem.role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endmacro %}
"""

_QWEN25 = (
  _QWEN_TOOLS.replace("'@'", "'You were made to help.'")
  + """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- result(m, loop) }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content + calls(m) + '<|im_end|>\\n' }}
{%- elif m.role == 'user' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
)

# Thinking is written only after the last question that is no tool's result;
# without thinking the prompt ends in an empty block, which history omits.
_QWEN3 = (
  _QWEN_TOOLS.replace("'@'", "''")
  + """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.last = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- result(m, loop) }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}
{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content + calls(m) + '<|im_end|>\\n' }}
{%- elif m.role == 'user' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
)

# A header in two special tokens, everything trimmed, no newline after the
# end; tools before the first question; a date.
_LLAMA3 = """\
{{- bos_token }}
{%- macro turn(role, text) %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{{- text | trim + '<|eot_id|>' }}
{%- endmacro %}
{%- set given = messages[0].role == 'system' %}
{{- turn('system', 'Today: ' + strftime_now('%d %b %Y') + '\\n\\n'
         + (messages[0].content if given else '')) }}
{%- set ns = namespace(tools=tools) %}
{%- set rest = messages[1:] if given else messages %}
{%- for m in rest %}
{%- if m.role == 'user' and ns.tools %}
{{- turn('user', 'Answer with a call in JSON.\\n\\n' + (ns.tools | tojson)
         + '\\n\\n' + m.content) }}
{%- set ns.tools = none %}
{%- elif m.tool_calls %}
{%- set f = m.tool_calls[0].function %}
{{- turn('assistant', '{"name": "' + f.name + '", "parameters": '
         + (f.arguments | tojson) + '}') }}
{%- elif m.role == 'tool' %}
{{- turn('ipython', m.content) }}
{%- else %}
{{- turn(m.role, m.content) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# No end of a turn: the next role's token is the stop. Arguments one a tag.
_GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\\n# Tools\\n<tools>' }}
{%- for t in tools %}{{- '\\n' + (t | tojson) }}{% endfor %}
{{- '\\n</tools>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\\n' + m.content | trim }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}
{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
{{- (v if v is string else v | tojson) + '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}
{{- '<|observation|>' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}
{{- '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""

# Special tokens around calls and results; after a result no header follows.
_DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content }}{% endfor %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'user' %}
{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' }}
{%- endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<｜tool▁outputs▁end｜>' }}
{%- endif %}
{%- else %}
{%- if loop.first or loop.previtem.role != 'tool' %}
{{- '<｜Assistant｜>' }}
{%- endif %}
{{- KEEP }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}
{{- (c.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<｜Assistant｜>' OPEN }}
{%- endif %}
"""


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
  call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
  return f"<tool_call>\n{call}\n</tool_call>"


def _llama(name: str, arguments: Mapping[str, Any]) -> str:
  call = {"name": name, "parameters": arguments}
  return json.dumps(call, ensure_ascii=False)


def _glm(name: str, arguments: Mapping[str, Any]) -> str:
  pairs = "".join(
    f"\n<arg_key>{k}</arg_key>\n<arg_value>"
    f"{v if isinstance(v, str) else json.dumps(v)}</arg_value>"
    for k, v in arguments.items()
  )
  return f"\n<tool_call>{name}{pairs}\n</tool_call>"


def _deepseek(name: str, arguments: Mapping[str, Any]) -> str:
  given = json.dumps(arguments, ensure_ascii=False)
  return (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    f"{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
  )


@dataclasses.dataclass(frozen=True)
class Family:
  """A chat template and what its models sample.

  Attributes:
    template: jinja2 source.
    end: token that ends a turn.
    stops: all tokens that end one.
    write_call: (name, arguments) -> the text that the template writes for it;
      None where it knows no calls.
    args: more variables of the template.
    normalizer: "NFC" where the tokenizer composes characters.
    opens: what every completion begins with.
  """

  template: str
  end: str
  stops: Sequence[str]
  write_call: Callable[[str, Mapping[str, Any]], str] | None = None
  args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  normalizer: str = ""
  opens: str = ""


_IM = ("<|im_end|>", "<|endoftext|>")
_EOS = "<｜end▁of▁sentence｜>"

FAMILIES = {
  "smollm2": Family(_SMOLLM2, "<|im_end|>", _IM),
  "qwen2.5": Family(_QWEN25, "<|im_end|>", _IM, _hermes, normalizer="NFC"),
  "qwen3": Family(_QWEN3, "<|im_end|>", _IM, _hermes, normalizer="NFC"),
  "qwen3_kept": Family(
    _QWEN3.replace(
      "loop.index0 > ns.last and (loop.last or thought)", "thought"
    ),
    *("<|im_end|>", _IM, _hermes),
    normalizer="NFC",
  ),
  "qwen3_off": Family(
    *(_QWEN3, "<|im_end|>", _IM, _hermes),
    args={"enable_thinking": False},
    normalizer="NFC",
  ),
  "llama3": Family(
    *(_LLAMA3, "<|eot_id|>", ("<|eot_id|>", "<|eom_id|>"), _llama)
  ),
  "glm": Family(
    _GLM,
    end="<|user|>",
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    write_call=_glm,
    opens="\n",
  ),
  "deepseek": Family(
    _DEEPSEEK.replace("KEEP", "m.content").replace("OPEN", ""),
    *(_EOS, (_EOS,), _deepseek),
  ),
  "deepseek_r1": Family(
    _DEEPSEEK.replace("KEEP", "m.content.split('</think>')[-1]").replace(
      "OPEN", "+ '<think>\\n'"
    ),
    *(_EOS, (_EOS,), _deepseek),
  ),
}

SPECIAL = (
  *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"),
  *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
  *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
  *("<|observation|>", "<｜User｜>", "<｜Assistant｜>", _EOS),
  *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
  *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
  *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
  "<｜tool▁output▁end｜>",
)

# One token each, yet ordinary text.
PLAIN = (
  *("<think>", "</think>", "<tool_call>", "</tool_call>"),
  *("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>"),
)

_TEXTS = (
  "ls -l the files in the directory; it is done. Call the shell again",
  '{"name": "shell", "arguments": {"command": "ls -l", "all": true}}',
  '{"name": "shell", "parameters": {"command": "cat the file"}}',
)


def tokenizer(normalizer: str = "") -> tokenizers.Tokenizer:
  """A small byte-level tokenizer that knows every family's tokens."""
  own = render.train_tokenizer(_TEXTS * 3, 380, SPECIAL)
  own.add_tokens(
    [tokenizers.AddedToken(t, special=False, normalized=False) for t in PLAIN]
  )
  if normalizer == "NFC":
    own.normalizer = tokenizers.normalizers.NFC()
  return own


def renderer(name: str) -> render.Renderer:
  """The renderer of a family."""
  family = FAMILIES[name]
  return render.Renderer(
    tokenizer(family.normalizer),
    family.template,
    stop_tokens=family.stops,
    bos_token="<bos>",
    eos_token=_EOS if name.startswith("deepseek") else "",
    template_args=family.args,
  )
