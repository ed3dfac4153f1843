"""The token study: the task is what it says, the comparison is fair, and the head learns the new rule."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kbt_edge import cli
from kbt_edge.bundle import find
from kbt_edge.cli import demo_tokens
from kbt_edge.errors import RangeError
from kbt_edge.head import Head
from kbt_edge.model import Model
from kbt_edge.sequence import Sequences
from kbt_edge.studies import tokens
from kbt_edge.studies.tokens import END, FIRST, KBT, LETTERS, METHODS, OLD, PAD, REFERENCE, START, Adam, Kbt, Pair, Rule

pytestmark = pytest.mark.long("a study: thousands of updates, and the retraining it is compared with")

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load("tokens", backend="onnxruntime")


@pytest.fixture(scope="module")
def result(model: Model) -> dict[str, Any]:
    """A small study: one new rule, 60 sequences."""
    return tokens.run_study(model, [3], checkpoints=(20, 60), held_out=60)


def fresh(model: Model) -> Head:
    return Head.from_bytes(model.head.to_bytes())


def word(text: str) -> np.ndarray:
    return np.array([FIRST + LETTERS.index(letter) for letter in text])


def method(name: str) -> tokens.Method:
    return next(method for method in METHODS if method.name == name)


# ---- the task --------------------------------------------------------------------------------------------------------


def test_a_letter_after_a_vowel_is_shifted_before_it_is_replaced() -> None:
    rule = Rule(tuple(range(12)), +1)  # replaces nothing
    assert tokens.written(rule(word("abcdbaab"))) == "accdbabc"
    assert tokens.written(rule(word("lilek"))) == "liael"  # behind l comes a
    assert tokens.written(Rule(rule.table, -1)(word("aaib"))) == "alha"
    replaced = Rule((*range(1, 12), 0), +1)(word("abc"))
    assert tokens.written(replaced) == "bdd"
    assert replaced[-1] == END


def test_in_a_new_rule_no_letter_keeps_its_meaning_and_the_shift_turns_round() -> None:
    rules = [tokens.new_rule(np.random.default_rng(seed)) for seed in range(20)]
    assert len({rule.table for rule in rules}) == 20
    for rule in rules:
        assert sorted(rule.table) == list(range(12))
        assert rule.shift == -OLD.shift
        assert all(rule.table[s] != OLD.table[s] for s in range(12))


def test_unseen_words_are_unseen() -> None:
    pairs, unseen = tokens.stream(tokens.STUDY, 7, 40_000, 3000)  # so many that some words would come twice
    learned = {pair.source.tobytes() for pair in pairs}
    assert len(unseen) == 3000
    assert not learned & {pair.source.tobytes() for pair in unseen}
    assert {len(pair.source) for pair in pairs} == {6, 7, 8}


def test_a_seed_is_one_stream_and_another_one_for_choices() -> None:
    def first_words(kind: int, seed: int) -> list[bytes]:
        pairs, _ = tokens.stream(kind, seed, 50, 0)
        return [np.concatenate(pair).tobytes() for pair in pairs]

    words = first_words(tokens.STUDY, 7)
    assert words == first_words(tokens.STUDY, 7)
    assert not set(words) & set(first_words(tokens.STUDY, 8))
    assert not set(words) & set(first_words(tokens.CHOICE, 7))


# ---- the model -------------------------------------------------------------------------------------------------------


def test_the_shipped_model_knows_the_old_rule(model: Model) -> None:
    pairs = tokens.sample_pairs(np.random.default_rng(5), 300, OLD)
    rows = tokens.hidden_rows(model.trunk, pairs)
    score = tokens.evaluate(model.head, pairs, rows)
    assert score.token > 0.999
    assert tokens.evaluate(tokens.frozen(model.head), pairs, rows).confidence > 0.99
    answers = Sequences(model, start=START, pad=PAD)
    for source, target in pairs[:20]:
        np.testing.assert_array_equal(answers.generate(source, end=END), target)
    assert sum(path.stat().st_size for path in find("tokens").iterdir()) < 200_000  # it is part of every wheel


def test_the_rows_of_the_scores_are_those_that_are_learned(model: Model) -> None:
    pair = tokens.sample_pairs(np.random.default_rng(1), 1, OLD)[0]
    (rows,) = tokens.hidden_rows(model.trunk, [pair])
    assert rows.shape == (len(pair.target), model.head.d)
    sequences = Sequences(model, start=START, pad=PAD)
    for i in range(len(pair.target)):
        expected = sequences.predict(pair.source, pair.target[:i]).mean
        np.testing.assert_allclose(model.head.predict(rows[i]).mean, expected, atol=1e-5)


def test_a_greedy_answer_is_right_where_every_next_token_is(model: Model) -> None:
    pairs, unseen = tokens.stream(tokens.STUDY, 0, 25, 80)
    learner = Kbt(model.trunk, fresh(model))
    (score,) = tokens.follow(learner, pairs, [25], unseen, tokens.hidden_rows(model.trunk, unseen))
    decoded = [np.array_equal(learner.sequences.generate(pair.source, end=END), pair.target) for pair in unseen]
    assert 0.1 < score.answer < 0.9  # some of both
    assert score.answer == pytest.approx(np.mean(decoded))


# ---- the comparison --------------------------------------------------------------------------------------------------


def test_retraining_is_softmax_regression_with_adam(model: Model) -> None:
    torch = pytest.importorskip("torch")
    pairs, _ = tokens.stream(tokens.STUDY, 1, 6, 0)
    adam = Adam(model.trunk, fresh(model), None, None, 25, 0.02)
    for pair in pairs:
        adam.learn(pair)
    adam.finish()

    start = torch.tensor(model.head.layers[0].mean)
    weight, bias = start[:, :-1].clone().requires_grad_(), start[:, -1].clone().requires_grad_()
    optimiser = torch.optim.Adam([weight, bias], 0.02)
    h = torch.tensor(np.concatenate(tokens.hidden_rows(model.trunk, pairs)))
    labels = torch.tensor(np.concatenate([pair.target for pair in pairs]))
    for _ in range(25):
        optimiser.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(h @ weight.T + bias, labels))
        optimiser.step()
    learned = torch.cat([weight, bias[:, None]], 1).detach().numpy()
    assert np.abs(learned - start.numpy()).max() > 0.1
    np.testing.assert_allclose(adam.head.layers[0].mean, learned, atol=5e-4)


def test_retraining_sees_the_last_pairs_only(model: Model) -> None:
    pairs, _ = tokens.stream(tokens.STUDY, 2, 5, 0)

    def learned(memory: int | None, pairs: list[Pair]) -> np.ndarray:
        adam = Adam(model.trunk, fresh(model), memory, None, 10, 0.1)
        for pair in pairs:
            adam.learn(pair)
        adam.finish()
        return adam.head.layers[0].mean

    np.testing.assert_array_equal(learned(2, pairs), learned(None, pairs[-2:]))
    assert not np.array_equal(learned(3, pairs), learned(None, pairs[-2:]))


def test_the_shipped_prior_is_the_smallest_beyond_which_nothing_is_gained(model: Model) -> None:
    """The labels of the task have no noise, so nothing speaks against a wide prior."""
    (prior,) = model.head.config["prior_var"]
    weights = model.head.layers[0].mean
    likelihood = {
        factor: tokens.prequential(model.trunk, lambda f=factor: tokens.one_layer(weights, f * prior), [0, 1], 300)
        for factor in (0.1, 1.0, 10.0)
    }
    assert likelihood[1.0] > likelihood[0.1] + 0.05
    assert likelihood[1.0] > likelihood[10.0] - 0.02


# ---- the study -------------------------------------------------------------------------------------------------------


def test_the_frozen_model_fails_and_the_head_learns_the_new_rule(result: dict[str, Any]) -> None:
    assert result["rows"] == "unique"
    assert result["sequences"] == [0, 20, 60]
    token = {name: scores["token"]["runs"][0] for name, scores in result["methods"].items()}
    assert max(token["frozen"]) < 0.25
    for name, (before, early, late) in token.items():
        assert before == pytest.approx(token["frozen"][0], abs=0.01)
        if name != "frozen":
            assert before < early < late
    assert token[KBT][2] > 0.88
    assert token["kbt, 2 layers"][2] > 0.88
    assert token[KBT][2] > token["Adam, last 1"][2] + 0.03  # with the same memory
    answer = result["methods"][KBT]["answer"]["runs"][0]
    assert answer[0] == 0.0
    assert answer[2] > 0.4
    assert any(example["after"] == example["wanted"] != example["before"] for example in result["examples"])


def test_the_head_knows_better_than_the_frozen_model_how_sure_it_may_be(result: dict[str, Any]) -> None:
    def overconfidence(name: str) -> float:
        scores = result["methods"][name]
        return scores["confidence"]["mean"][-1] - scores["token"]["mean"][-1]

    assert overconfidence("frozen") > 0.7
    assert abs(overconfidence(KBT)) < 0.12


@pytest.mark.slow("learns 500 sequences")
def test_500_sequences_give_95_percent_of_what_retraining_on_all_of_them_gives(model: Model) -> None:
    scores: dict[str, list[tokens.Score]] = {KBT: [], REFERENCE: []}
    for seed, name in itertools.product(range(5), scores):
        pairs, unseen = tokens.stream(tokens.STUDY, seed, 500)
        learner = method(name).make(model.trunk, fresh(model))
        rows = tokens.hidden_rows(model.trunk, unseen)
        scores[name].append(list(tokens.follow(learner, pairs, tokens.CHECKPOINTS, unseen, rows))[-1])
    kbt, reference = (np.mean(scores[name], axis=0) for name in (KBT, REFERENCE))
    assert reference[0] > 0.99  # so that it is a reference
    assert kbt[0] >= 0.95 * reference[0]  # next tokens
    assert kbt[1] >= 0.95 * reference[1]  # whole answers


def test_one_seed_gives_one_result(model: Model, result: dict[str, Any]) -> None:
    again = tokens.run_study(model, [3], checkpoints=(20, 60), held_out=60)
    assert {**again, "cost": None} == {**result, "cost": None}
    other = tokens.run_study(model, [4], checkpoints=(5,), held_out=10)
    assert other["examples"] != result["examples"]


def test_the_result_is_plain_json_of_one_form(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result, allow_nan=False)) == {**result, "prior_var": list(result["prior_var"])}
    names = ["frozen", *(method.name for method in METHODS)]
    assert list(result["methods"]) == names
    assert list(result["cost"]) == names[1:]
    for scores in result["methods"].values():
        assert set(scores) == {"token", "answer", "confidence", "log_likelihood"}
        for score in scores.values():
            assert score["runs"] == [score["mean"]]  # of one seed
            assert len(score["mean"]) == 3
            assert score["std"] is None
        assert all(0 <= share <= 1 for share in scores["token"]["mean"])
    for cost in result["cost"].values():
        assert cost["step_ms"] > 0
        assert (cost["sequence_ms"] is None) == (cost["every"] is None)
    assert set(result["share_of_reference"]) == {"token", "answer"}


def test_the_text_holds_the_figures_of_the_result(model: Model, result: dict[str, Any]) -> None:
    text = demo_tokens.text(result)
    assert f"{100 * result['methods'][KBT]['token']['mean'][-1]:.1f}" in text
    assert f"{100 * result['share_of_reference']['token']:.1f} % of the tokens" in text
    assert result["examples"][0]["wanted"] in text
    two = tokens.run_study(model, [0, 1], checkpoints=(5,), held_out=10)
    runs = np.array(two["methods"][KBT]["token"]["runs"])[:, 1]
    half = abs(runs[0] - runs[1]) / np.sqrt(2)
    assert f"{100 * runs.mean():.1f} ± {100 * half:.1f}" in demo_tokens.text(two)


def test_a_negative_seed_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "tokens", "--seed", "-1", "--backend", "onnxruntime"]) == 1
    assert capsys.readouterr() == ("", "kbt-edge: seed: expected 0 or more, got -1\n")
    with pytest.raises(RangeError, match="seed"):
        tokens.stream(tokens.STUDY, -1, 5)


@pytest.mark.slow("takes seconds")
def test_the_study_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from kbt_edge.studies import tokens; tokens.Model.load('tokens')"
    subprocess.run([sys.executable, "-c", code], check=True)
