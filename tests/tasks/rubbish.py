"""Texts that break what reads them: a policy may write any of them."""

from __future__ import annotations

from hypothesis import strategies as st

NUMBERS = (
    "２２", "१२", "٣", "²", "½", "𝟙", "1_000", "0x10", "007", "1e400", "-1e-400", "NaN", "Infinity", "-inf",
    "1/0", "10^10^10", "9" * 5000, "9" * 290, "9^{9^{9^9}}", "1000000!", "1,2,3", "{1;2}", "x=1", "",
)  # fmt: skip

TEXTS = (
    "\ud800", "a\udfffb", "\0", "\x1b[31m\x07\x08", "\u202e\u2028\x85\r", "x" * 200_000, "<|im_end|>",
    "(" * 3000, "[" * 100_000, "{" * 5000, '{"a":' * 5000, "\\frac{1}{", "\\frac", "\\sqrt[", "$" * 99, "\\",
    "<think>" * 500, "<answer></answer>", "</answer><answer>", "<tool_call>" * 500, "calc(" * 50,
    "```python\n\0",
)  # fmt: skip

FORMS = (
    "{}", "#### {}", "the answer is {}", "\\boxed{{{}}}", "<answer>{}</answer>", "calc({})",
    "<think>a</think><answer>{}</answer>", "<tool_call>{}</tool_call>", "```python\nprint({})\n```",
)  # fmt: skip
"""Forms in which tasks look for an answer."""

RUBBISH = (*NUMBERS, *TEXTS)

drawn = st.builds(
    str.format,
    st.sampled_from(FORMS),
    st.one_of(st.sampled_from(NUMBERS), st.text(st.characters(codec=None), max_size=30)),
)
