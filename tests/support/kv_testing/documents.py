"""Prompts of documents, for the tests of blending."""

from dataclasses import dataclass

SYSTEM = [5 + (31 * i) % 1900 for i in range(40)]
DOCUMENTS = [[3 + ((17 * s + 7919) * i + s * s) % 2000 for i in range(n)] for s, n in enumerate((300, 410, 128, 333))]
QUESTION = [9 + (977 * i) % 1900 for i in range(25)]
SELECTIONS: dict[str, dict[str, object]] = {"first": {}, "question": {"select": "question", "question": QUESTION}}
"""Options of a plan, by what they select."""


@dataclass(frozen=True)
class Prompt:
    """The documents in this order, each followed by a token of its own, between what is common and the question."""

    order: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*SYSTEM, *(token for at in self.order for token in [*DOCUMENTS[at], 7]), *QUESTION]

    @property
    def segments(self) -> list[tuple[int, int]]:
        found, first = [], len(SYSTEM)
        for at in self.order:
            found.append((first, first + len(DOCUMENTS[at])))
            first = found[-1][1] + 1
        return found

    @property
    def documents_tokens(self) -> int:
        return sum(len(DOCUMENTS[at]) for at in self.order)


FIRST, SECOND = Prompt((0, 1, 2, 3)), Prompt((2, 0, 3, 1))

BEFORE = Prompt((2, 1, 0, 3, 1))
"""A conversation of which `SECOND` is what is left when the second document is dropped."""
UNCHANGED = Prompt((2,)).segments[0][1] + 1
"""Tokens before that document."""
DROPPED = len(BEFORE.tokens) - len(SECOND.tokens)

WRONG_PLANS = [
    ([[9, 4]], "segment 0 is [9, 4), which has no tokens"),
    ([[40, 340], [300, 500]], "segment 1 begins at token 300, before segment 0 ends at 340"),
    ([[400, 500], [40, 340]], "segment 1 begins at token 40, before segment 0 ends at 500"),
    ([[40, 9000]], f"the last segment ends at token 9000 of {len(SECOND.tokens)}"),
]
"""Segments that `SECOND` cannot have, and why."""

MARK = "w999"
"""A word between documents, for clients that send text."""
TEXTS = [" ".join(f"w{300 + (17 * number + 79) * at % 690}" for at in range(300)) for number in range(3)]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def text(*order: int) -> str:
    """A prompt of texts in this order."""
    return f" {MARK} ".join(["w5 w6 w7", *(TEXTS[at] for at in order), "w9 w10 w11"])
