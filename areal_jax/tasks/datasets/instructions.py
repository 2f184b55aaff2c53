"""The system message that explains a template of think and answer blocks to a chat model."""

from __future__ import annotations

from areal_jax.tasks.blocks import check_template

INSTRUCTIONS = "{instructions}"
"""The placeholder in the setting `system`; the system message has the template's instructions there."""

_TEXTS = {
    "interleave": (
        "Work in turns of thinking and answering. Write each thought between <think> and </think>. As soon "
        "as a part of the result is certain, state this part alone between <answer> and </answer>: the user "
        "sees the answers at once, and never the thoughts. Then go on thinking in a new <think> block, until "
        "the problem is solved. The last <answer> block contains the final answer. Write nothing outside of "
        "these blocks."
    ),
    "think_answer": (
        "First think the whole problem through between <think> and </think>. Then state the final answer "
        "alone between <answer> and </answer>. Use one block of each kind, and write nothing outside of them."
    ),
    "delayed": (
        "First think the whole problem through in one block between <think> and </think>. Then state what "
        "you found, each part of the result alone in a block of its own between <answer> and </answer>. The "
        "last <answer> block contains the final answer. Write nothing outside of these blocks."
    ),
}


def instructions(template: str) -> str:
    """Returns the text that explains a template of `blocks.TEMPLATES` to a model.

    Raises TaskError if the template is unknown.
    """
    check_template(template)
    return _TEXTS[template]


def system_message(system: str | None, template: str) -> str | None:
    """Returns `system` with the template's instructions in place of {instructions}; None if it is None."""
    return None if system is None else system.replace(INSTRUCTIONS, instructions(template))


def with_parts(template: str, question: str, parts: str) -> str:
    """Returns a question; `parts`, the form of partial answers, follows if the template has such answers."""
    return question if template == "think_answer" else f"{question} {parts}"
