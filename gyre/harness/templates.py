"""Chat templates for models that bring none.

A model trained from scratch pays for every token of its prompt, so `MINIMAL`
spends one special token on a message and one on the end of a turn; nothing
else is written.
"""

from __future__ import annotations

END = "<|end|>"

#: Special tokens of MINIMAL, in the order in which they get their ids.
MINIMAL_TOKENS = (END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

#: "<|user|>text<|assistant|>reply<|end|><|tool|>output<|assistant|>"
MINIMAL = (
  "{% for m in messages %}"
  "{{ '<|' + m['role'] + '|>' + m['content'] }}"
  "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CHATML_END = "<|im_end|>"
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", CHATML_END)

#: OpenAI's ChatML, without a default system prompt.
CHATML = (
  "{% for m in messages %}"
  "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
