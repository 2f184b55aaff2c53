"""Chat templates that behave as those of three model families do, and tokenizers for them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from areal_jax.tasks.hf_tokenizer import HFTokenizer

SMOLLM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""One block for each message, and a system message where there is none."""

QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n"
    "{% endif %}Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "Answer with <tool_call> </tool_call>.<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = m.reasoning_content or '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if not loop.first or content }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Thoughts before the last question are dropped; successive results of tools share one block."""

LLAMA = (
    "{{ bos_token }}{% set ns = namespace(system='') %}"
    "{% if messages[0]['role'] == 'system' %}{% set ns.system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
    "{{ ns.system }}<|eot_id|>"
    "{% if tools %}<|start_header_id|>user<|end_header_id|>\n\nFunctions:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n\n"
    "{{ messages[0]['content'] | trim }}<|eot_id|>{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m['content'] | tojson }}<|eot_id|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one tool call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Tools stand in the first question; one call at a time; results are JSON."""

COUNTING = (
    "{% for m in messages %}[{{ loop.index }}] {{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[{{ messages | length + 1 }}] assistant: {% endif %}"
)
"""What follows an answer depends on how much was said before."""

SPECIAL = (
    "<|bos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|python_tag|>",
)
ENDS = {"smollm": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>", "counting": "<|im_end|>"}
TEMPLATES = {"smollm": SMOLLM, "qwen": QWEN, "llama": LLAMA, "counting": COUNTING}


def tokenizer_of(folder: Path, family: str) -> HFTokenizer:
    """A byte-level BPE with a few merges, among them some across the borders of words and of JSON."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ċ", "Ċ"), ("Ġ", "t"), ('"', ":"), ("}", "}"), ("<", "/"), (":", "Ġ")]
    words = alphabet + ["".join(pair) for pair in merges]
    backend = Backend(BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": ENDS[family], "chat_template": TEMPLATES[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HFTokenizer.from_folder(folder)
