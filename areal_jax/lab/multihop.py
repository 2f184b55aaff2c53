"""Questions of several hops over a small invented world, which the prompt describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from areal_jax.tasks.datasets.drawn import Draws
from areal_jax.tasks.datasets.instructions import INSTRUCTIONS, with_parts
from areal_jax.tasks.datasets.procedural import Procedural, numbers_up_to
from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt

HOPS = range(2, 5)
MAX_DISTRACTORS = 20
"""With more paragraphs, a prompt may exceed 1,000 tokens of a small model's tokenizer."""


class Relation(NamedTuple):
    """Leads from an entity of one kind to exactly one entity of another kind."""

    subject: str
    object: str
    fact: str
    """The sentence that states it of {a}, the subject, and {b}."""
    phrase: str
    """The words for the entity that the relation leads to from {}."""


RELATIONS = {
    "employer": Relation("person", "company", "{a} works for {b}.", "the company that employs {}"),
    "birthplace": Relation("person", "city", "{a} was born in {b}.", "the birthplace of {}"),
    "teacher": Relation("person", "person", "{a} was taught by {b}.", "the teacher of {}"),
    "seat": Relation("company", "city", "{a} is based in {b}.", "the city that is home to {}"),
    "founder": Relation("company", "person", "{a} was founded by {b}.", "the founder of {}"),
    "supplier": Relation("company", "company", "{a} is supplied by {b}.", "the company that supplies {}"),
    "stream": Relation("city", "river", "{a} lies on {b}.", "the river that flows through {}"),
    "region": Relation("city", "province", "{a} belongs to {b}.", "the province that contains {}"),
    "mayor": Relation("city", "person", "The mayor of {a} is {b}.", "the mayor of {}"),
    "mouth": Relation("river", "lake", "{a} flows into {b}.", "the lake that is fed by {}"),
    "bridge": Relation("river", "city", "The oldest bridge over {a} is in {b}.", "the city that bridges {}"),
    "capital": Relation("province", "city", "The capital of {a} is {b}.", "the capital of {}"),
    "senator": Relation("province", "person", "The senator of {a} is {b}.", "the senator of {}"),
    "port": Relation("lake", "city", "The largest port on {a} is {b}.", "the largest port on {}"),
    "ferries": Relation(
        "lake", "company", "The ferries on {a} belong to {b}.", "the owner of the ferries on {}"
    ),
}
"""A world has at most one fact of each relation for a subject, so that every question has one answer."""

KINDS = ("person", "company", "city", "river", "province", "lake")

_SHOWN = {"river": "the river {}", "province": "the province of {}", "lake": "Lake {}"}
_FIRM = ("Mills", "Works", "Yards", "Tools", "Looms", "Foods", "Glass", "Paper")
_HEAD = (
    "Bal",
    "Cor",
    "Dun",
    "El",
    "Fal",
    "Gar",
    "Hel",
    "Is",
    "Kel",
    "Lor",
    "Mar",
    "Or",
    "Quen",
    "Tav",
    "Vel",
)
_MIDDLE = ("", "a", "e", "i", "o", "en", "ar", "im")
_TAIL = ("ba", "den", "dor", "lin", "mir", "na", "ran", "ric", "sa", "ten", "tho", "va", "vin", "wen")

_PREFIX = re.compile(r"(?:the )?(?:(?:river|lake|province of|city of|company) )?")


class Entity(NamedTuple):
    kind: str
    name: str

    @property
    def shown(self) -> str:
        """The name as a text shows it, such as "the river Velmir"."""
        return _SHOWN.get(self.kind, "{}").format(self.name)


class Chain(NamedTuple):
    """The hops of a question: relation j leads from entity j to entity j + 1."""

    entities: tuple[Entity, ...]
    relations: tuple[str, ...]

    @property
    def question(self) -> str:
        wanted = self.entities[0].shown
        for relation in self.relations:
            wanted = RELATIONS[relation].phrase.format(wanted)
        return f"What is the name of {wanted}?"


class MultiHop(Procedural):
    """Questions of several hops, with the entities on the way as sub-answers: procedural, no files.

    A prompt describes an invented world of persons, companies, cities, rivers, provinces and lakes in short
    paragraphs, and asks for the entity that some relations lead to, one after the other. The sub-answers are
    the entities between, the final answer is the last one. Prompt i depends on i and the settings alone.
    About one question in ten is in the test split. After Trivedi et al. 2022, "MuSiQue: Multihop questions
    via single-hop question composition".
    """

    def __init__(
        self,
        *,
        hops: int = 3,
        min_hops: int | None = None,
        distractors: int = 6,
        split: str = "train",
        size: int = 100_000,
        template: str = "interleave",
        reward: Mapping[str, Any] | None = None,
        system: str | None = INSTRUCTIONS,
    ) -> None:
        """The number of hops is drawn uniformly from min_hops..hops, by default it is `hops`.

        Each hop has a paragraph of two facts, one of which the question needs; `distractors` more paragraphs
        have facts of the same relations about other entities. `split`: train or test; `size`: number of
        prompts. `template` and `reward`: as of Interleaved. `system`: the system message, null for none;
        {instructions} stands for the explanation of the template.
        """
        super().__init__(split=split, size=size, template=template, reward=reward, system=system)
        self._lengths = numbers_up_to("hops", hops, min_hops, HOPS)
        if not 0 <= distractors <= MAX_DISTRACTORS:
            raise TaskError(f"distractors={distractors} is out of range; give 0 to {MAX_DISTRACTORS}")
        self._distractors = distractors

    def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Returns the question's parts as thoughts, and names drawn from the prompt as answers."""
        draws = Draws(rng.bit_generator)
        previous = prompt.info["start"]
        thoughts, answers = [], []
        for relation in prompt.info["relations"]:
            thoughts.append(f"I look for {RELATIONS[relation].phrase.format(previous)}.")
            previous = draws.one(prompt.info["names"])
            answers.append(previous)
        return thoughts, answers

    def normalized(self, text: str) -> str:
        """Returns a name in lower case, without final period, article and words such as "river"."""
        plain = super().normalized(text).removesuffix(".").rstrip()
        return _PREFIX.sub("", plain, count=1) if plain else plain

    def _drawn(self, draws: Draws) -> Prompt:
        hops = draws.one(self._lengths)
        chain, world = self._first(lambda: self._chain(draws, hops))
        paragraphs = world.paragraphs(chain, self._distractors)
        question = with_parts(
            self.template,
            f"{chain.question} The final answer is this name alone.",
            "A partial answer is the name alone that one step towards it leads to.",
        )
        names = tuple(entity.name for entity in world.entities)
        *steps, answer = (entity.name for entity in chain.entities[1:])
        start = chain.entities[0].shown
        info = {"start": start, "relations": chain.relations, "names": names, "steps": tuple(steps)}
        return self._asked("\n".join([*paragraphs, "", question]), {**info, "answer": answer})

    def _chain(self, draws: Draws, hops: int) -> tuple[Chain, InventedWorld] | None:
        """Returns a drawn chain and a world of its entities; None if it is not in this task's split."""
        world = InventedWorld(draws)
        entities = [world.new(draws.one(KINDS))]
        relations = []
        for _ in range(hops):
            relations.append(draws.one(_relations_of(entities[-1].kind)))
            entities.append(world.new(RELATIONS[relations[-1]].object))
        chain = Chain(tuple(entities), tuple(relations))
        return (chain, world) if self._is_own(chain.question) else None


class InventedWorld:
    """Entities with different invented names, and the drawn facts about them."""

    def __init__(self, draws: Draws) -> None:
        self.entities: list[Entity] = []
        self._draws = draws
        self._words: set[str] = set()

    def new(self, kind: str) -> Entity:
        """Returns a new entity, with a name that no other has."""
        name = self._word()
        if kind == "person":
            name = f"{name} {self._word()}"
        elif kind == "company":
            name = f"{name} {self._draws.one(_FIRM)}"
        self.entities.append(Entity(kind, name))
        return self.entities[-1]

    def paragraphs(self, chain: Chain, distractors: int) -> list[str]:
        """Returns the paragraphs about the chain's entities, and about others, in random order."""
        texts = [
            self._paragraph(subject, relation, target)
            for subject, relation, target in zip(
                chain.entities[:-1], chain.relations, chain.entities[1:], strict=True
            )
        ]
        for _ in range(distractors):
            # The relations are the question's, so that its words alone do not lead to the paragraphs needed.
            relation = self._draws.one(chain.relations)
            subject = self.new(RELATIONS[relation].subject)
            texts.append(self._paragraph(subject, relation, self._object(subject, relation)))
        return self._draws.some(texts, len(texts))

    def _paragraph(self, subject: Entity, relation: str, target: Entity) -> str:
        """Returns a paragraph of two facts about `subject`: the given one, and one of another relation."""
        other = self._draws.one([name for name in _relations_of(subject.kind) if name != relation])
        facts = [_fact(subject, relation, target), _fact(subject, other, self._object(subject, other))]
        return " ".join(self._draws.some(facts, 2))

    def _object(self, subject: Entity, relation: str) -> Entity:
        """Returns an entity for a fact about `subject`; it is new or not, each with probability 1/2.

        If all objects were new, the entities named twice would be those of the question.
        """
        kind = RELATIONS[relation].object
        known = [entity for entity in self.entities if entity.kind == kind and entity != subject]
        return self._draws.one(known) if known and self._draws.below(2) else self.new(kind)

    def _word(self) -> str:
        while True:
            word = self._draws.one(_HEAD) + self._draws.one(_MIDDLE) + self._draws.one(_TAIL)
            if word not in self._words:
                self._words.add(word)
                return word


def _relations_of(kind: str) -> list[str]:
    return [name for name, relation in RELATIONS.items() if relation.subject == kind]


def _fact(subject: Entity, relation: str, target: Entity) -> str:
    sentence = RELATIONS[relation].fact.format(a=subject.shown, b=target.shown)
    return sentence[0].upper() + sentence[1:]
