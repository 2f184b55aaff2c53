"""The texts of the tool game: in few symbols for tiny models, and in plain English for chat models."""

from __future__ import annotations

from collections.abc import Iterable

from areal_jax.tasks.datasets.warehouse import CALLS, HELD, KEY, LETTERS, Building, Game, GameCall, GameState

SYMBOLS = {"go": "g", "take": "t", "put": "p", "look": "l"}
"""Tool -> its letter in compact calls. The key is k; the parcel is x, or c while it is in its locked case."""

ASK, RESULT, END = ">", "=", ";"
"""Stand before a compact call, between it and its result, and after the result."""

_COMPACT_RULES = "gA:go.to.A;tk,tx:take;pk,px:put;l:look;c.needs.k;px.at.goal.ends;"

ALPHABET = LETTERS + "".join(sorted({*_COMPACT_RULES, *"+-/|", ASK, RESULT} - {*LETTERS}))
"""The characters of compact texts: the same for all settings."""


class CompactTexts:
    """Rules, a game, a call and its result in few symbols.

    A turn is ">gB=B-ACE/k/x;": call, room and its corridors, what lies there, what the player carries.
    """

    def rules(self, of: Building) -> str:
        corridors = ",".join(LETTERS[one] + LETTERS[two] for one, two in of.corridors)
        return f"{_COMPACT_RULES}{corridors}|"

    def game(self, of: Building, game: Game) -> str:
        start = game.start
        places = f"k{LETTERS[start.key]}c{LETTERS[start.parcel]}+{LETTERS[game.goal]}"
        return f"{places}:{self.seen(of, start)}{END}"

    def call(self, call: GameCall) -> str:
        item = "k" if call.argument == KEY else "x"
        argument = call.argument if call.tool == "go" else item if call.argument else ""
        return SYMBOLS[call.tool] + argument

    def seen(self, of: Building, state: GameState) -> str:
        around = "".join(LETTERS[room] for room in of.neighbours[state.room])
        parcel = "x" if state.is_open else "c"
        lying, held = (
            "k" * (state.key == place) + parcel * (state.parcel == place) for place in (state.room, HELD)
        )
        return f"{LETTERS[state.room]}-{around}/{lying}/{held}"


_RULES = """\
You work in a warehouse and act through tools. A customer's parcel is somewhere in the building, and you
bring it to the room that the task names. You see the building only through the results of your calls, and
through the plan below, which is the same in every task. Read all of these rules before your first call.

How to call a tool. Each of your messages is exactly one call of one tool, written on a single line: the
tool's name, one space, and the argument, if the tool has one. Write nothing else: no explanation, no
punctuation, no quotation marks, no second call. A message with anything beside the call is not carried out,
and counts as a mistake. Room names are single capital letters, and the names of tools and things are in
lower case. You get the result of a call as the next message, and then make your next call. There is no
limit on time, but each call costs money, so use as few calls as you can.

The tools.

- go ROOM: you walk through a corridor into a room. It works only if a corridor joins the room in which you
are and the room that you name. You cannot walk through two corridors in one call: to reach a room that is
further away, call the tool again and again, once for each corridor. Corridors can be walked in both
directions, and never close. You take with you all that you carry. Example: go B
- take THING: you pick up a thing that lies in the room in which you are. The things are key and parcel. At
the start of a task the parcel is in a locked case. You can take it out only while you carry the key, and
you need no other tool for that: take parcel opens the case and takes the parcel. From then on the case
stays open, and the key has no use any more. You may carry the key and the parcel at the same time.
Examples: take key, take parcel
- put THING: you put down a thing that you carry, in the room in which you are. It lies there until you take
it again. If you put the parcel down in the room that the task names, then the task is solved, and there are
no further calls. If you put it down in any other room, nothing is lost, but you must take it again.
Examples: put parcel, put key
- look: you look around and get the same description as after any other call. Nothing changes. Since every
result describes the room anyway, you rarely need this tool. Example: look

The results. After each call that works you are told in which room you are, to which rooms corridors lead
from there, which things lie there, and what you carry. A call that is not possible, such as going to a room
without a corridor to it, taking a thing that is elsewhere, taking the parcel out of its locked case without
the key, or putting down a thing that you do not carry, changes nothing and counts as a mistake.

How you are judged. A call is good if it brings the end of the task nearer: if after the call fewer calls
are needed than before it, with the best choice of all further calls. A call that is possible but does not
help is worth nothing: walking away from where you have to go, looking around, or putting down a thing that
you still need. A call that is not possible, or that is not written as these rules say, is worth less than
nothing. So before each call, ask yourself what is missing: without the key, and with the case still locked,
walk towards the key on a shortest way, and take it. With the key, walk to the parcel and take it. With the
parcel, walk to the room that the task names, and put the parcel down there. Other people have sometimes
worked on a task before you, and some of their calls were of no use; go on from the state that they left,
which is described in the last result, and do not repeat their mistakes.

The plan of the building. Each corridor joins two rooms:"""


class PlainTexts:
    """The same in plain English, for chats."""

    def rules(self, of: Building) -> str:
        corridors = (f"{LETTERS[one]} and {LETTERS[two]}" for one, two in of.corridors)
        return f"{_RULES} {'; '.join(corridors)}."

    def game(self, of: Building, game: Game) -> str:
        start = game.start
        return (
            f"The task: bring the parcel to room {LETTERS[game.goal]}. The parcel is in its locked case in "
            f"room {LETTERS[start.parcel]}, and the key lies in room {LETTERS[start.key]}. "
            f"{self.seen(of, start)}"
        )

    def call(self, call: GameCall) -> str:
        return " ".join(call).strip()

    def seen(self, of: Building, state: GameState) -> str:
        around = of.neighbours[state.room]
        leads = "Corridors lead" if len(around) > 1 else "A corridor leads"
        to = f"{leads} to {_listed(LETTERS[room] for room in around)}."
        parcel = "the parcel" if state.is_open else "the parcel in its locked case"
        lying, held = (
            _listed(["the key"] * (state.key == place) + [parcel] * (state.parcel == place)) or "nothing"
            for place in (state.room, HELD)
        )
        return f"You are in room {LETTERS[state.room]}. {to} Here lies: {lying}. You carry: {held}."


def all_calls(texts: CompactTexts | PlainTexts) -> dict[str, GameCall]:
    """Returns the text of each call -> the call."""
    return {texts.call(call): call for call in CALLS}


def _listed(names: Iterable[str]) -> str:
    *most, last = list(names) or [""]
    return f"{', '.join(most)} and {last}" if most else last
