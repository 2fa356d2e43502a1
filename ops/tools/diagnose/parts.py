"""Where tau is lost: by context, turn, kind of token and group of the data, and what the training learnt there.

The tables of tau are those of `evaluate`: sums over the same steps. Beside each part stands the training's share of
learnt tokens there. A part whose tau is certainly below that of the rest is named; it is a cause where the training
has less than LACK of the share that the held-out answers have. Only steps that begin at least a block before the
answer's end are compared, as its end cuts what later ones accept: calls are short, and stand at the end.

N prompts, L learnt tokens of a sample
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from attrs import define, field, frozen

from dsl.finding import Finding
from ops.evaluate.intervals import OTHERS, REST, context_label
from ops.evaluate.prompts import Prompt
from ops.evaluate.statistics import context_part, reported_groups, steps_of, tau_by
from ops.evaluate.verdicts import CATEGORY_RATIO
from ops.lib.data.batching import spread
from ops.lib.data.token_shards import KINDS, TokenReader
from ops.lib.drafts.decoding.decode import Decoded
from ops.tokenize_chat.kinds import END, TokenKinds
from ops.tools.diagnose.bench import CHANCE, tau_of, unpaired_gain
from ops.tools.diagnose.judgement import CONTEXTS, GROUPS, KINDS_OF_TOKENS, TURNS, PartFigures, judged, too_few
from ops.tools.diagnose.training_data import LOOKED_AT

LACK = 0.25
PLANNED = (
    0.02  # error probability of what the training lacks against all else: one comparison, chosen before tau is seen
)
NAMES = {"context": CONTEXTS, "turn": TURNS, "kind": KINDS_OF_TOKENS, "group": GROUPS}
RESAMPLINGS = 2000  # for the intervals
NORMAL = (
    f"about the same everywhere; a part with less than {LACK:.0%} of its share in the training is one that the draft "
    "did not learn"
)
HARD = (
    f"within a factor of {CATEGORY_RATIO:g} where the training has it; no mistake: texts that are hard to predict have "
    "a lower tau with any draft"
)


@frozen
class Steps:
    """The steps of one prompt in a part, and the tokens that they generated."""

    steps: int = 0
    generated: int = 0


@define
class Learnt:
    """The tokens that a training learns, by table and part. longest: the most tokens before one of them."""

    tokens: dict[str, Counter[str]] = field(factory=lambda: {table: Counter() for table in NAMES})
    longest: int = 0


@frozen(kw_only=True)
class Part:
    """A part of a table of tau.

    own, others: its steps and all other steps of each prompt, [N], of those that the answer's end does not cut.
    """

    figures: PartFigures
    own: Sequence[Steps]
    others: Sequence[Steps]

    @property
    def lost(self) -> float:
        """The passes of the target that would be saved with the tau of all other steps."""
        steps = sum(each.steps for each in self.own)
        return steps - sum(each.generated for each in self.own) / tau_of(self.others)

    @property
    def is_lacking(self) -> bool:
        return self.figures.learnt is not None and self.figures.learnt < LACK * self.figures.share


def learnt_tokens(reader: TokenReader, kinds: TokenKinds | None) -> Learnt:
    """Count the learnt tokens of some samples, spread over a training's split.

    kinds: gives kinds to tokens that are stored without; None if they are not known.
    """
    found = Learnt()
    for place in spread(range(len(reader)), LOOKED_AT):
        ids_S, mask_S = (each.numpy() for each in reader.labels(place))
        learnt_L = np.flatnonzero(mask_S)
        if not len(learnt_L):
            continue
        record = reader.records[place]
        found.longest = max(found.longest, int(learnt_L[-1]))
        found.tokens["context"].update(context_part(int(before)) for before in learnt_L)
        runs = np.split(learnt_L, np.flatnonzero(np.diff(learnt_L) > 1) + 1)
        answers = record.get("answers", [(int(run[0]), turn) for turn, run in enumerate(runs)])
        starts, turns = np.array(answers).T
        turns_L = turns[np.searchsorted(starts, learnt_L, side="right") - 1]
        found.tokens["turn"].update(str(turn) for turn in turns_L.tolist())
        found.tokens["group"][record.get("topic", REST)] += len(learnt_L)
        stored = reader.kinds(place)
        kinds_L: list[int] = []
        if stored is not None:
            kinds_L = stored.numpy()[learnt_L].tolist()
        elif kinds is not None:
            kinds_L = [
                kind for run in runs for kind in kinds.of(ids_S[run].tolist(), ids_S[: run[0]].tolist()).tolist()
            ]
        found.tokens["kind"].update(KINDS[kind] for kind in kinds_L if kind != END)
    return found


def tables_of_tau(
    prompts: Sequence[Prompt],
    answers: Sequence[Decoded],
    kinds: TokenKinds | None,
    learnt: Learnt | None,
    block_size: int,
) -> dict[str, list[Part]]:
    """The parts of each table that is known. learnt: by the training; None if it is gone."""
    keys = _keys(prompts, answers, kinds)
    total = sum(answer.generated for answer in answers)
    found: dict[str, list[Part]] = {}
    for table, key in keys.items():
        taus = tau_by(answers, key, RESAMPLINGS, 0, block_size)
        sums = _sums(answers, key, block_size)
        counts = _grouped(learnt.tokens[table], taus) if learnt is not None else Counter()
        every = counts.total()
        found[table] = [
            Part(
                figures=PartFigures(
                    label=_label(table, name),
                    tau=tau.generated / tau.steps,
                    low=tau.low,
                    high=tau.high,
                    prompts=tau.prompts,
                    share=tau.generated / total,
                    learnt=counts[name] / every if every else None,
                ),
                own=sums[name],
                others=_joined(steps for part, steps in sums.items() if part != name),
            )
            for name, tau in sorted(taus.items(), key=lambda part: _order(table, part[0]))
        ]
    return found


def part_findings(tables: Mapping[str, Sequence[Part]], learnt: Learnt | None) -> list[Finding]:
    """A finding for each table: the part in which most is lost, and what the training has there."""
    return [_finding(table, parts, learnt) for table, parts in tables.items()]


def _keys(
    prompts: Sequence[Prompt], answers: Sequence[Decoded], kinds: TokenKinds | None
) -> dict[str, Callable[[int, int], str]]:
    """Of each table, the part of a step by the place of its prompt and of its anchor in the answer."""
    keys: dict[str, Callable[[int, int], str]] = {
        "context": lambda place, anchor: context_part(prompts[place].length + anchor)
    }
    if all(prompt.turn is not None for prompt in prompts):
        keys["turn"] = lambda place, _: str(prompts[place].turn)
    if kinds is not None:
        of_tokens = [kinds.of(answer.tokens, prompt.ids()) for prompt, answer in zip(prompts, answers, strict=True)]
        keys["kind"] = lambda place, anchor: KINDS[of_tokens[place][anchor]]
    groups = reported_groups([prompt.topic for prompt in prompts])
    if set(groups) != {REST}:
        keys["group"] = lambda place, _: groups[place]
    return keys


def _sums(answers: Sequence[Decoded], key: Callable[[int, int], str], block_size: int) -> dict[str, list[Steps]]:
    """The steps of each prompt in every part, without those that the answer's end may cut."""
    sums: dict[str, list[Steps]] = defaultdict(lambda: [Steps()] * len(answers))
    for place, answer in enumerate(answers):
        for anchor, tokens in steps_of(answer):
            if anchor + block_size > answer.generated:
                break
            of_part = sums[key(place, anchor)]
            before = of_part[place]
            of_part[place] = Steps(before.steps + 1, before.generated + tokens)
    return sums


def _joined(parts: Iterable[Sequence[Steps]]) -> list[Steps]:
    """The steps of each prompt in all these parts."""
    return [
        Steps(sum(each.steps for each in of_prompt), sum(each.generated for each in of_prompt))
        for of_prompt in zip(*parts, strict=True)
    ]


def _grouped(tokens: Counter[str], parts: Mapping[str, object]) -> Counter[str]:
    """The tokens by the parts that are reported: a group that is not, of which many may be, is among the rest."""
    counts: Counter[str] = Counter()
    for name, count in tokens.items():
        counts[name if name in parts or REST not in parts else REST] += count
    return counts


def _order(table: str, name: str) -> tuple[int, str]:
    places: dict[str, Callable[[str], int]] = {"turn": int, "kind": KINDS.index}
    return (places[table](name) if table in places else 0, name)


def _label(table: str, name: str) -> str:
    return context_label(name) if table == "context" else name or OTHERS


def _finding(table: str, parts: Sequence[Part], learnt: Learnt | None) -> Finding:
    code = NAMES[table]
    text = "tau " + ", ".join(f"{part.figures.label} {part.figures.tau:.2f}" for part in parts)
    if len(parts) == 1:
        return _only(table, parts[0], text, learnt)
    certain = [part for part in parts if unpaired_gain(part.others, part.own, CHANCE / len(parts)).is_certain]
    lacking = [part for part in parts if part.is_lacking]
    learnt_there = _joined(part.own for part in parts if not part.is_lacking)
    gain = unpaired_gain(learnt_there, _joined(part.own for part in lacking), PLANNED)
    if not certain and gain.is_open:
        return too_few(code, f"{text}; the training hardly has {_where(table, lacking[0].figures.label)}")
    if not certain and not gain.is_certain:
        return judged(name=code, measured=text, normal=NORMAL)
    lacking = [part for part in certain if part.is_lacking] or (lacking if gain.is_certain else [])
    worst = max(lacking or certain, key=lambda part: part.lost)
    measured = (
        f"tau {tau_of(worst.own):.2f} {_where(table, worst.figures.label)}, {tau_of(worst.others):.2f} elsewhere; "
        f"{worst.figures.share:.0%} of the held-out tokens are there, {_learnt_text(table, worst, learnt)}"
    )
    if also := [part.figures.label for part in lacking if part is not worst]:
        measured += f"; the training hardly has {', '.join(also)} either"
    is_far = tau_of(worst.others) > CATEGORY_RATIO * tau_of(worst.own)
    return judged(
        name=code,
        measured=measured,
        normal=NORMAL if lacking else HARD,
        advice=_advice(table, worst.figures.label),
        is_cause=bool(lacking),
        is_note=not lacking and is_far,
    )


def _only(table: str, part: Part, text: str, learnt: Learnt | None) -> Finding:
    """The finding where all held-out answers are in one part, whose tau cannot be compared."""
    if not part.is_lacking:
        return judged(name=NAMES[table], measured=text, normal="there is no other part to compare with")
    where = f"all held-out tokens are {_where(table, part.figures.label)}"
    return judged(
        name=NAMES[table],
        measured=f"{text}; {where}, {_learnt_text(table, part, learnt)}",
        normal=NORMAL,
        advice=_advice(table, part.figures.label),
        is_note=True,
    )


def _where(table: str, label: str) -> str:
    return {
        "context": f"at contexts {label}",
        "turn": "in first answers" if label == "0" else f"behind {label} answers",
        "kind": {"call": "in calls of tools"}.get(label, f"in {label}"),
        "group": f'in the group "{label}"',
    }[table]


def _learnt_text(table: str, part: Part, learnt: Learnt | None) -> str:
    if learnt is None or part.figures.learnt is None:
        return "and the store no longer has the training samples"
    text = f"and {part.figures.learnt:.1%} of the {learnt.tokens[table].total():,} tokens that the training learnt"
    if table == "context" and part.is_lacking:
        text += f", of which none has more than {learnt.longest:,} tokens before it"
    return text


def _advice(table: str, label: str) -> str:
    more = {
        "context": "add samples as long as those to be served, and raise max_length of tokenize_chat if it drops them",
        "turn": "add conversations with as many turns as those to be served",
        "kind": {
            "call": "add conversations that call tools, with the tools of each row",
            "reasoning": "add answers with reasoning, as the target writes it",
        }.get(label, "add answers with more text"),
        "group": f'add samples of "{label}" to the data',
    }[table]
    return f"{more}, with answers of the target's own, and train again"
