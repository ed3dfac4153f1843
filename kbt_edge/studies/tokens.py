"""A spelling rule changes, and a token model learns the new one from a stream of sequences.

The task is a transduction of words over twelve letters. A rule is a substitution table and a shift: a letter after a
vowel is first moved ``shift`` places along the alphabet, then every letter is replaced by the table. The bundle
"tokens" holds an encoder-decoder that was pre-trained on the rule ``OLD`` (tools/pretrain_tokens.py) and is nearly
always right. Then the rule changes: a new table, in which no letter keeps its meaning, and the opposite shift. It is
not enough to rename the outputs. The old rule needed the sum of letter and shift, the new one needs the difference, so
it can be learned only as far as the frozen h distinguishes the two.

What is compared, on words that no method has learned from:

    frozen         the pre-trained model
    kbt            the head of the bundle, one layer; one joint update per pair (method.md §6), memory of one pair
    kbt, 2 layers  the same with a hidden layer of 2 d neurons
    Adam, last N   the readout retrained on the last N pairs, warm-started
    Adam, all      the readout retrained on every pair so far: the reference, which needs all the memory

Prior variances were chosen by the prequential log likelihood, which a device can know: the probability given to each
pair before it is learned, on streams that no study uses. The learning rates of Adam were chosen by the accuracy on
unseen words of those streams, which is more than a device would know. tools/pretrain_tokens.py makes all these choices.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kbt_edge._progress import Tell, silent
from kbt_edge.errors import RangeError
from kbt_edge.head import Head
from kbt_edge.model import Model
from kbt_edge.sequence import Sequences
from kbt_edge.trunk import Trunk

__all__ = ["METHODS", "OLD", "Adam", "Kbt", "Pair", "Rule", "Score", "new_rule", "run_study", "sample_pairs"]

Tokens = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

PAD, START, END, FIRST = 0, 1, 2, 3  # the letters follow from FIRST
LETTERS: Final = "abcdefghijkl"
VOWELS: Final = "aei"
VOCABULARY: Final = FIRST + len(LETTERS)
SHORTEST, LONGEST = 6, 8  # letters of a word
MAX_LEN: Final = LONGEST + 1  # tokens of an answer, with END

STUDY, CHOICE = 0, 1  # kinds of streams: no seed of the one gives a stream of the other
CHECKPOINTS: Final = (50, 200, 500)
SEEDS: Final = 5
HELD_OUT: Final = 200


# ---- the task --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A word and its answer, as token ids; the answer ends with END."""

    source: Tokens
    target: Tokens


@dataclass(frozen=True)
class Rule:
    """Letter number s at the place i becomes ``table[s]``, or ``table[s + shift]`` if a vowel stands at i - 1."""

    table: tuple[int, ...]
    shift: int

    def __call__(self, source: Tokens) -> Tokens:
        letters = source - FIRST
        moved = letters.copy()
        moved[1:] += self.shift * np.isin(letters[:-1], [LETTERS.index(vowel) for vowel in VOWELS])
        return np.append(np.asarray(self.table)[moved % len(LETTERS)] + FIRST, END)


OLD: Final = Rule((7, 2, 10, 5, 0, 8, 3, 11, 6, 1, 9, 4), +1)


def new_rule(rng: np.random.Generator) -> Rule:
    """Another table, in which no letter keeps its meaning, and the opposite shift."""
    while True:
        table = tuple(map(int, rng.permutation(len(LETTERS))))
        if all(new != old for new, old in zip(table, OLD.table, strict=True)):
            return Rule(table, -OLD.shift)


def sample_pairs(rng: np.random.Generator, count: int, rule: Rule) -> list[Pair]:
    """Random words of random length with their answers."""
    lengths = rng.integers(SHORTEST, LONGEST + 1, count)
    sources = [rng.integers(FIRST, VOCABULARY, length) for length in lengths]
    return [Pair(source, rule(source)) for source in sources]


def stream(kind: int, seed: int, count: int, held_out: int = HELD_OUT) -> tuple[list[Pair], list[Pair]]:
    """``count`` pairs of a new rule, and ``held_out`` more whose words are not among them."""
    if seed < 0:
        raise RangeError(f"seed: expected 0 or more, got {seed}")
    rng = np.random.default_rng([kind, seed])
    rule = new_rule(rng)
    pairs = sample_pairs(rng, count, rule)
    known = {pair.source.tobytes() for pair in pairs}
    unseen: list[Pair] = []
    while len(unseen) < held_out:
        unseen += (pair for pair in sample_pairs(rng, 1, rule) if pair.source.tobytes() not in known)
    return pairs, unseen


def padded(pairs: Sequence[Pair]) -> tuple[Tokens, Tokens, Tokens]:
    """Sources, decoder inputs (START, then the answer without its end) and answers, each (len(pairs), MAX_LEN)."""
    sources, inputs, targets = (np.full((len(pairs), MAX_LEN), fill) for fill in (PAD, START, PAD))
    for i, (source, target) in enumerate(pairs):
        sources[i, : len(source)] = source
        inputs[i, 1 : len(target)] = target[:-1]
        targets[i, : len(target)] = target
    return sources, inputs, targets


def hidden_rows(trunk: Trunk, pairs: Sequence[Pair]) -> list[Float32]:
    """h of each pair, one row per token of the answer."""
    sources, inputs, _ = padded(pairs)
    return [trunk(*ids, copy=True)[: len(pair.target)] for *ids, pair in zip(sources, inputs, pairs, strict=True)]


def written(tokens: Tokens) -> str:
    """Tokens as text, with "·" for tokens that are no letters."""
    letters = tokens[: -1 if END in tokens[-1:] else None]
    return "".join(LETTERS[t - FIRST] if t >= FIRST else "·" for t in letters)


# ---- the learners ----------------------------------------------------------------------------------------------------


class Kbt:
    """One joint update of the head per pair, after which the pair is forgotten."""

    def __init__(self, trunk: Trunk, head: Head) -> None:
        self.head = head
        self.sequences = Sequences((trunk, head), start=START, pad=PAD)
        self.log_likelihood = 0.0  # of all pairs, each before it was learned
        self.step_seconds: list[float] = []  # of each update, with its run of the trunk

    def learn(self, pair: Pair) -> None:
        started = time.perf_counter()
        self.log_likelihood += self.sequences.update(*pair).log_likelihood
        self.step_seconds.append(time.perf_counter() - started)

    def finish(self) -> None:
        """Nothing to do: every pair was learned at once."""


class Adam:
    """Softmax regression on h, warm-started: ``steps`` steps of Adam over the whole memory.

    memory   how many of the latest pairs are kept; None keeps all
    every    retrain after so many pairs; None: only when ``finish`` is called
    """

    def __init__(
        self, trunk: Trunk, head: Head, memory: int | None, every: int | None, steps: int, learning_rate: float
    ) -> None:
        self._trunk, self._every, self._steps, self._rate = trunk, every, steps, learning_rate
        self._memory: deque[tuple[Float32, Tokens]] = deque(maxlen=memory)
        self._waiting = 0  # pairs since the last retraining
        self._weights: Float32 = head.layers[0].mean  # (d_o, d + 1), bias last
        self.step_seconds: list[float] = []  # of each retraining, without the trunk

    @property
    def head(self) -> Head:
        return _head(self._weights)

    def learn(self, pair: Pair) -> None:
        (h,) = hidden_rows(self._trunk, [pair])
        self._memory.append((h, pair.target))
        self._waiting += 1
        if self._waiting == self._every:
            self.finish()

    def finish(self) -> None:
        """Retrain, unless that was done with the latest pair."""
        if self._waiting == 0:
            return
        self._waiting = 0
        started = time.perf_counter()
        h, labels = (np.concatenate(part) for part in zip(*self._memory, strict=True))
        z = np.column_stack([h, np.ones(len(h), np.float32)])
        each, w = np.arange(len(labels)), self._weights.copy()
        first, second = np.zeros_like(w), np.zeros_like(w)  # Adam's moments, with decays 0.9 and 0.999
        for step in range(1, self._steps + 1):
            u = z @ w.T
            p = np.exp(u - u.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            p[each, labels] -= 1  # now the gradient of the cross entropy by u
            gradient = p.T @ z / np.float32(len(labels))
            first += np.float32(0.1) * (gradient - first)
            second += np.float32(0.001) * (gradient**2 - second)
            unbiased = first / np.float32(1 - 0.9**step), second / np.float32(1 - 0.999**step)
            w -= np.float32(self._rate) * unbiased[0] / (np.sqrt(unbiased[1]) + np.float32(1e-8))
        self._weights = w
        self.step_seconds.append(time.perf_counter() - started)


def _head(weights: Float32, hidden: Sequence[int] = (), prior_var: float | Sequence[float] = 1.0) -> Head:
    """A head for this task that starts as the readout ``weights``, (d_o, d + 1) with the bias last."""
    return Head(
        weights[:, :-1],
        weights[:, -1],
        hidden=hidden,
        prior_var=prior_var,
        output="softmax",
        drift=0.0,
        noise="multinomial",
        max_rows=MAX_LEN,
    )


def one_layer(weights: Float32, prior_var: float) -> Head:
    return _head(weights, (), prior_var)


def frozen(head: Head) -> Head:
    """The readout that ``head`` began as, with no doubt about its weights."""
    return _head(head.layers[0].mean, (), 1e-12)


def two_layers(weights: Float32, prior_var: Sequence[float]) -> Head:
    return _head(weights, (2 * (weights.shape[1] - 1),), prior_var)


@dataclass(frozen=True)
class Method:
    name: str
    memory: int | None  # pairs; None for all
    every: int | None  # pairs between two learning steps; None: whenever it is evaluated
    make: Callable[[Trunk, Head], Kbt | Adam]


def _retraining(memory: int | None, every: int | None, steps: int, learning_rate: float) -> Method:
    name = "Adam, all" if memory is None else f"Adam, last {memory}"
    return Method(name, memory, every, lambda trunk, head: Adam(trunk, head, memory, every, steps, learning_rate))


FROZEN, KBT, REFERENCE = "frozen", "kbt", "Adam, all"
METHODS: Final = (
    Method(KBT, 1, 1, lambda trunk, head: Kbt(trunk, head)),
    Method("kbt, 2 layers", 1, 1, lambda trunk, head: Kbt(trunk, two_layers(head.layers[0].mean, (1e-4, 10.0)))),
    _retraining(memory=1, every=1, steps=10, learning_rate=0.03),
    _retraining(memory=20, every=10, steps=100, learning_rate=0.03),
    _retraining(memory=100, every=10, steps=100, learning_rate=0.01),
    _retraining(memory=None, every=None, steps=1000, learning_rate=0.01),
)


# ---- the scores ------------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """On unseen words: shares from 0 to 1, and the mean log probability of a token."""

    token: float  # next tokens that are right, given the right ones before
    answer: float  # whole answers that are right when the model continues its own tokens
    confidence: float  # mean probability of the token that it takes; for a calibrated model the same as ``token``
    log_likelihood: float


def evaluate(head: Head, unseen: Sequence[Pair], rows: Sequence[Float32]) -> Score:
    """``rows`` are the ``hidden_rows`` of ``unseen``.

    A greedy answer is right if and only if each token is the most probable one after the right ones before it, so
    nothing has to be decoded.
    """
    right: list[float] = []
    whole: list[float] = []
    taken: list[float] = []
    logs: list[float] = []
    for h, (_, target) in zip(rows, unseen, strict=True):
        p = np.asarray(head.predict(h).mean, np.float64)
        hits = p.argmax(axis=1) == target
        right += hits.tolist()
        whole.append(float(hits.all()))
        taken += p.max(axis=1).tolist()
        logs += np.log(np.maximum(p[np.arange(len(target)), target], 1e-30)).tolist()
    return Score(*(statistics.fmean(values) for values in (right, whole, taken, logs)))


def follow(
    learner: Kbt | Adam,
    pairs: Sequence[Pair],
    checkpoints: Sequence[int],
    unseen: Sequence[Pair],
    rows: Sequence[Float32],
) -> Iterator[Score]:
    """Learn the pairs one after the other; the score at each checkpoint."""
    for count, pair in enumerate(pairs, 1):
        learner.learn(pair)
        if count in checkpoints:
            learner.finish()
            yield evaluate(learner.head, unseen, rows)


# How settings are chosen, on streams that no study uses.


def prequential(trunk: Trunk, make: Callable[[], Head], seeds: Sequence[int], count: int = CHECKPOINTS[-1]) -> float:
    """Mean log probability of a pair before it is learned."""
    total = 0.0
    for seed in seeds:
        learner = Kbt(trunk, make())
        for pair in stream(CHOICE, seed, count, held_out=0)[0]:
            learner.learn(pair)
        total += learner.log_likelihood
    return total / (len(seeds) * count)


def unseen_accuracy(trunk: Trunk, make: Callable[[], Adam], seeds: Sequence[int]) -> float:
    """Mean next-token accuracy on unseen words over the checkpoints."""
    scores: list[Score] = []
    for seed in seeds:
        pairs, unseen = stream(CHOICE, seed, CHECKPOINTS[-1])
        scores += follow(make(), pairs, CHECKPOINTS, unseen, hidden_rows(trunk, unseen))
    return statistics.fmean(score.token for score in scores)


# ---- the study -------------------------------------------------------------------------------------------------------


def run_study(
    model: Model,
    seeds: Sequence[int],
    checkpoints: Sequence[int] = CHECKPOINTS,
    held_out: int = HELD_OUT,
    tell: Tell = silent,
) -> dict[str, Any]:
    """Every method on the stream of every seed, as plain data; a score before learning and one per checkpoint."""
    state = model.head.to_bytes()
    scores: dict[str, list[list[Score]]] = {}  # by method, seed and moment
    seconds: dict[str, list[float]] = {}  # of learning steps, by method
    examples: list[dict[str, str]] = []
    for seed in seeds:
        pairs, unseen = stream(STUDY, seed, checkpoints[-1], held_out)
        rows = hidden_rows(model.trunk, unseen)
        before = evaluate(frozen(model.head), unseen, rows)
        scores.setdefault(FROZEN, []).append([before] * (1 + len(checkpoints)))
        for method in METHODS:
            learner = method.make(model.trunk, Head.from_bytes(state))
            run = [evaluate(learner.head, unseen, rows)]
            for score, count in zip(follow(learner, pairs, checkpoints, unseen, rows), checkpoints, strict=True):
                run.append(score)
                tell(f"seed {seed}, {method.name}: {count} sequences, {100 * score.token:.1f} % of tokens")
            scores.setdefault(method.name, []).append(run)
            # Of the reference only the last retraining counts: those before had less to learn from.
            steps = learner.step_seconds if method.every is not None else learner.step_seconds[-1:]
            seconds.setdefault(method.name, []).extend(steps)
            if method.name == KBT and not examples:
                examples = [_example(model.trunk, Head.from_bytes(state), learner.head, pair) for pair in unseen[:3]]
    tell(None)
    means = {name: Score(*np.mean([run[-1] for run in runs], axis=0).tolist()) for name, runs in scores.items()}
    return {
        "seeds": list(seeds),
        "sequences": [0, *checkpoints],
        "held_out": held_out,
        "rows": Kbt(model.trunk, Head.from_bytes(state)).sequences.rows,
        "prior_var": model.head.config["prior_var"],
        "methods": {
            name: {
                field: {
                    "mean": np.mean(values, axis=0).tolist(),
                    "std": np.std(values, axis=0, ddof=1).tolist() if len(seeds) > 1 else None,
                    "runs": values,
                }
                for i, field in enumerate(Score._fields)
                for values in [[[score[i] for score in run] for run in runs]]
            }
            for name, runs in scores.items()
        },
        "share_of_reference": {
            "token": means[KBT].token / means[REFERENCE].token,
            "answer": means[KBT].answer / means[REFERENCE].answer,
        },
        "cost": _cost(seconds),
        "examples": examples,
        "backend": model.trunk.backend,
        "backend_reason": model.trunk.backend_reason,
    }


def _cost(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Median time of a learning step, and what that makes for one sequence; None where it is up to the evaluation."""
    step = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    return {
        method.name: {
            "memory": method.memory,
            "every": method.every,
            "step_ms": step[method.name],
            "sequence_ms": step[method.name] / method.every if method.every else None,
            "times_kbt": step[method.name] / method.every / step[KBT] if method.every else None,
        }
        for method in METHODS
    }


def _example(trunk: Trunk, before: Head, after: Head, pair: Pair) -> dict[str, str]:
    answers = [
        Sequences((trunk, head), start=START, pad=PAD).generate(pair.source, end=END) for head in (before, after)
    ]
    return dict(zip(("word", "wanted", "before", "after"), map(written, (*pair, *answers)), strict=True))
