"""Knights and Knaves: puzzles of truth-tellers and liars, each with exactly one solution."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from areal_jax.tasks.datasets.drawn import Draws
from areal_jax.tasks.datasets.instructions import INSTRUCTIONS, with_parts
from areal_jax.tasks.datasets.procedural import SEPARATOR, Procedural, numbers_up_to
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt

PEOPLE = range(2, 9)
LETTERS = "ABCDEFGH"
"""Names of persons in compact prompts."""
NAMES = ("Ann", "Bob", "Cid", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Joan", "Kai", "Lena", "Milo")
"""Names of persons in chats."""

MARKS = {"and": "&", "or": "|", "if": ">", "iff": "="}
"""Connective -> its mark in compact prompts. "if" joins a condition (left) and its consequence."""

_WORDS = {"and": "{} and {}", "or": "{} or {}", "if": "if {}, then {}", "iff": "{} if and only if {}"}

ASK = "?"
"""The last character of a compact prompt."""

ALPHABET = LETTERS + "kn:(),=&|>" + SEPARATOR + ASK
"""The characters of compact prompts and responses.

They are the same for all settings, so that a model trained with some can be evaluated with others.
"""

_BETWEEN = re.compile(r"[,;.\n]|\band\b")
_VERDICT = re.compile(r"(\w+) ?(?:is (?:a )?|[=:] ?)(knight|knave|k|n)")


class Claim(NamedTuple):
    """The claim that person number `person` is a knight, or a knave."""

    person: int
    is_knight: bool


class Compound(NamedTuple):
    """Two statements joined by one of MARKS."""

    connective: str
    left: Claim | Compound
    right: Claim | Compound


Statement = Claim | Compound


class Knights(Procedural):
    """Knights and Knaves with each person's kind as a sub-answer: procedural, no files.

    Knights always tell the truth, knaves always lie, and each person makes one statement; exactly one
    assignment of kinds is consistent. A sub-answer is one person's kind, the final answer is all of them.
    Prompt i depends on i and the settings alone. About one problem in ten is in the test split; problems that
    differ in the names or the order of the persons alone are in the same split. If `size` exceeds the number
    of distinct problems, prompts repeat. After Xie et al. 2024, "On memorization of large language models in
    logical reasoning".
    """

    def __init__(
        self,
        *,
        people: int = 3,
        min_people: int | None = None,
        depth: int = 1,
        compact: bool = False,
        split: str = "train",
        size: int = 100_000,
        template: str = "interleave",
        reward: Mapping[str, Any] | None = None,
        system: str | None = INSTRUCTIONS,
    ) -> None:
        """The number of persons is drawn uniformly from min_people..people, by default it is `people`.

        A statement is a claim about one other person, or two claims joined by and, or, if-then, or if and
        only if; with depth=2, each of the two may itself be such a compound. (Claims alone never have exactly
        one solution: all kinds can be swapped.) `compact`: a problem is asked as "A:Bn;B:Ak&Bk?", to be
        answered by "A=k,B=n", and the task has a tokenizer of its own, for small models without pretraining.
        `split`: train or test; `size`: number of prompts. `template` and `reward`: as of Interleaved.
        `system`: the system message, null for none; {instructions} stands for the explanation of the
        template.
        """
        super().__init__(
            split=split,
            size=size,
            template=template,
            reward=reward,
            system=system,
            alphabet=ALPHABET if compact else "",
        )
        self._counts = numbers_up_to("people", people, min_people, PEOPLE)
        if depth not in (1, 2):
            raise TaskError(f"depth={depth} is out of range; give 1 or 2")
        self._depth = depth

    def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Returns a thought and a drawn kind for each person, then all drawn kinds as the final answer."""
        draws = Draws(rng.bit_generator)
        names = prompt.info["people"]
        drawn = [self._verdict(name, draws.below(2) == 1) for name in names]
        if prompt.text is not None:
            thoughts = [*prompt.text.removesuffix(ASK).split(SEPARATOR), "".join(names)]
        else:
            thoughts = [
                *(f"I examine what follows for {name}." for name in names),
                "I put all this together.",
            ]
        return thoughts, [*drawn, self._together(drawn)]

    def normalized(self, text: str) -> str:
        found = verdicts(text)
        return ",".join(f"{name}={kind}" for name, kind in found) if found else super().normalized(text)

    def parsed_answer(self, prompt: Prompt, text: str) -> str | None:
        """Returns each person's kind, in the prompt's order of persons, such as "ann=k,bob=n".

        None if a person is missing, named twice or unknown, or if another word is in the text.
        """
        found = verdicts(text)
        names = [name.casefold() for name in prompt.info["people"]]
        if found is None or sorted(name for name, _ in found) != sorted(names):
            return None
        kinds = dict(found)
        return ",".join(f"{name}={kinds[name]}" for name in names)

    def _drawn(self, draws: Draws) -> Prompt:
        people = draws.one(self._counts)
        statements, world = self._problem(draws, people)
        names = list(LETTERS[:people]) if self._is_compact else draws.some(NAMES, people)
        steps = tuple(map(self._verdict, names, world))
        info = {"people": tuple(names), "steps": steps, "answer": self._together(steps)}
        if self._is_compact:
            said = (f"{name}:{in_symbols(said)}" for name, said in zip(names, statements, strict=True))
            return self._asked(SEPARATOR.join(said) + ASK, info)
        return self._asked(self._words(names, statements), info)

    def _problem(self, draws: Draws, people: int) -> tuple[tuple[Statement, ...], tuple[bool, ...]]:
        """Returns the statements of a problem in this task's split, and its solution."""

        def draw() -> tuple[tuple[Statement, ...], tuple[bool, ...]] | None:
            statements = tuple(
                _drawn_statement(draws, speaker, people, self._depth) for speaker in range(people)
            )
            if not self._is_own(_shape_of_all(statements)):
                return None
            found = solutions(statements, people)
            return (statements, found[0]) if len(found) == 1 else None

        return self._first(draw)

    def _verdict(self, name: str, is_knight: bool) -> str:
        if self._is_compact:
            return f"{name}={'k' if is_knight else 'n'}"
        return f"{name} is a {'knight' if is_knight else 'knave'}"

    def _together(self, verdicts: Sequence[str]) -> str:
        return ("," if self._is_compact else ", ").join(verdicts)

    def _words(self, names: Sequence[str], statements: Sequence[Statement]) -> str:
        said = "\n".join(
            f'{name} says: "{_capital(in_words(statement, names, speaker))}."'
            for speaker, (name, statement) in enumerate(zip(names, statements, strict=True))
        )
        question = (
            "Each person on an island is a knight or a knave. Knights always tell the truth, and knaves "
            f"always lie.\n{said}\n"
            '"Or" allows that both parts are true, and "if ..., then ..." is false only if its first part is '
            "true and its second part is false. Which persons are knights, and which are knaves? The final "
            'answer names each person once, in the form "NAME is a knight, NAME is a knave".'
        )
        parts = 'A partial answer is about one person, in the form "NAME is a knight".'
        return with_parts(self.template, question, parts)


def holds(statement: Statement, world: Sequence[bool]) -> bool:
    """Returns whether a statement is true in a world, which says of each person whether it is a knight."""
    if isinstance(statement, Claim):
        return world[statement.person] == statement.is_knight
    left, right = holds(statement.left, world), holds(statement.right, world)
    truth = {"and": left and right, "or": left or right, "if": not left or right, "iff": left == right}
    return truth[statement.connective]


def solutions(statements: Sequence[Statement], people: int) -> list[tuple[bool, ...]]:
    """Returns all consistent worlds: person i is a knight (True) exactly if statement i is true."""
    worlds = product((True, False), repeat=people)
    return [
        world
        for world in worlds
        if all(holds(said, world) == speaker for said, speaker in zip(statements, world, strict=True))
    ]


def verdicts(text: str) -> tuple[tuple[str, str], ...] | None:
    """Returns (name in lower case, "k" or "n") of each verdict in a text; None if it has any other words.

    A verdict is of the form "Ann is a knight" or "A=k"; commas, semicolons, periods, newlines and "and"
    separate verdicts.
    """
    parts = (" ".join(part.split()) for part in _BETWEEN.split(text.casefold()))
    found = [_VERDICT.fullmatch(part) for part in parts if part]
    kinds = tuple(
        (match[1], {"knight": "k", "knave": "n"}.get(match[2], match[2])) for match in found if match
    )
    return kinds if found and len(kinds) == len(found) else None


def in_symbols(statement: Statement) -> str:
    """Returns a statement as in compact prompts, such as "Bk&(Cn>Ak)"."""
    if isinstance(statement, Claim):
        return LETTERS[statement.person] + ("k" if statement.is_knight else "n")
    left, right = (
        in_symbols(side) if isinstance(side, Claim) else f"({in_symbols(side)})"
        for side in (statement.left, statement.right)
    )
    return left + MARKS[statement.connective] + right


def in_words(statement: Statement, names: Sequence[str], speaker: int) -> str:
    """Returns a statement as person number `speaker` says it, such as "I am a knave and Bob is a knight"."""
    if isinstance(statement, Claim):
        subject = "I am" if statement.person == speaker else f"{names[statement.person]} is"
        return f"{subject} a {'knight' if statement.is_knight else 'knave'}"
    left, right = (
        in_words(side, names, speaker) if isinstance(side, Claim) else f"({in_words(side, names, speaker)})"
        for side in (statement.left, statement.right)
    )
    return _WORDS[statement.connective].format(left, right)


def _drawn_statement(draws: Draws, speaker: int, people: int, depth: int) -> Statement:
    """Returns a claim about another person, or a compound; each connective is as likely as a claim."""
    kind = draws.one(("claim", *MARKS))
    if kind == "claim":
        other = draws.below(people - 1)
        return Claim(other + (other >= speaker), draws.below(2) == 1)
    return _drawn_compound(draws, kind, people, depth)


def _drawn_compound(draws: Draws, connective: str, people: int, depth: int) -> Compound:
    """Returns a compound of claims about two different persons; the speaker may be one of them.

    If `depth` is above 1, each side is as likely a compound itself.
    """

    def side(person: int) -> Statement:
        if depth > 1 and draws.below(2):
            return _drawn_compound(draws, draws.one(tuple(MARKS)), people, depth - 1)
        return Claim(person, draws.below(2) == 1)

    left, right = draws.some(range(people), 2)
    return Compound(connective, side(left), side(right))


def _shape_of_all(statements: Sequence[Statement]) -> str:
    """Returns a text that is the same for problems that differ in the order of persons or of sides alone."""
    return SEPARATOR.join(sorted(_shape(said, speaker) for speaker, said in enumerate(statements)))


def _shape(statement: Statement, speaker: int) -> str:
    """Returns a statement's text with "I" for the speaker, "x" for any other person, and sides in order."""
    if isinstance(statement, Claim):
        return ("I" if statement.person == speaker else "x") + ("k" if statement.is_knight else "n")
    sides = sorted([_shape(statement.left, speaker), _shape(statement.right, speaker)])
    return f"({MARKS[statement.connective].join(sides)})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
