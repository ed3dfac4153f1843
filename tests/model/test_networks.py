"""The two networks: what a row may depend on, and that one sample and a batch mean the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the networks are torch modules, and torch is not installed")

from kbt_edge.errors import RangeError  # noqa: E402
from kbt_edge.networks import DecisionTransformer, TokenTransformer  # noqa: E402


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


def ids(*rows: list[int]) -> Any:
    return torch.tensor(rows if len(rows) > 1 else rows[0])


@pytest.mark.parametrize("context", [1, 5])
def test_a_batch_of_states_is_its_single_states(context: int) -> None:
    network = DecisionTransformer(context=context).eval()
    states = torch.randn(8, context, 4)
    with torch.no_grad():
        rows, actions = network.trunk(states), network(states)
        singles = [network.trunk(state) for state in states]
    assert rows.shape == (8, 1, 16)
    assert actions.shape == (8, 1)
    torch.testing.assert_close(rows, torch.stack(singles), atol=1e-5, rtol=0)
    torch.testing.assert_close(actions, network.readout(rows[:, 0]), atol=1e-6, rtol=0)


def test_every_state_of_the_context_and_its_place_matter() -> None:
    network = DecisionTransformer(context=5).eval()
    states = torch.randn(5, 4)
    with torch.no_grad():
        h = network.trunk(states)
        for place in range(5):
            changed = states.clone()
            changed[place] += 1.0
            assert (network.trunk(changed) - h).abs().max() > 1e-4
        assert (network.trunk(states[[1, 0, 2, 3, 4]]) - h).abs().max() > 1e-6


def test_the_defaults_are_the_papers_trunk() -> None:
    network = DecisionTransformer()
    layer = network.trunk.encoder.layers[0]
    assert len(network.trunk.encoder.layers) == 2
    assert (layer.self_attn.num_heads, layer.linear1.out_features, layer.self_attn.embed_dim) == (2, 8, 16)
    assert network.readout.weight.shape == (1, 16)


def test_a_token_row_sees_the_source_and_the_targets_up_to_its_own() -> None:
    network = TokenTransformer(vocab=9, max_len=6).eval()
    source, target = ids([3, 1, 4, 1, 5, 2]), ids([2, 7, 1, 8, 2, 8])
    with torch.no_grad():
        rows = network.trunk(source, target)
        for place in range(6):
            changed = target.clone()
            changed[place] = 6
            moved = (network.trunk(source, changed) - rows).abs().amax(dim=1)
            assert moved[:place].eq(0).all()
            assert (moved[place:] > 1e-6).all()
            changed = source.clone()
            changed[place] = 6
            assert ((network.trunk(changed, target) - rows).abs().amax(dim=1) > 1e-6).all()


def test_padding_is_as_if_it_were_not_there() -> None:
    """The same weights in a network of length 4 and, with padding, in one of length 9."""
    short, long = TokenTransformer(vocab=9, max_len=4).eval(), TokenTransformer(vocab=9, max_len=9).eval()
    weights = long.state_dict()
    for name, tensor in short.state_dict().items():
        if name.endswith("_position"):
            weights[name][:4] = tensor
        else:
            weights[name] = tensor
    long.load_state_dict(weights)
    source, target = [3, 1, 4, 1], [2, 7, 1, 8]
    padding = [0] * 5
    with torch.no_grad():
        expected = short.trunk(ids(source), ids(target))
        rows = long.trunk(ids(source + padding), ids(target + padding))
    torch.testing.assert_close(rows[:4], expected, atol=1e-5, rtol=0)


def test_a_source_of_nothing_but_padding_is_finite() -> None:
    """As trained and as exported; torch's own kernels for evaluation mode are not as careful."""
    network = TokenTransformer(vocab=9, max_len=4)
    assert network.trunk(ids([0, 0, 0, 0]), ids([1, 2, 3, 4])).isfinite().all()


def test_a_batch_of_sequences_is_its_single_sequences_and_trains() -> None:
    network = TokenTransformer(vocab=9, max_len=5)
    source, target = torch.randint(0, 9, (8, 5)), torch.randint(0, 9, (8, 5))
    logits = network(source, target)
    assert logits.shape == (8, 5, 9)
    logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    network.eval()
    with torch.no_grad():
        singles = [network.trunk(s, t) for s, t in zip(source, target, strict=True)]
        torch.testing.assert_close(network.trunk(source, target), torch.stack(singles), atol=1e-5, rtol=0)


def test_evaluation_mode_computes_what_training_mode_does() -> None:
    """torch has other kernels for it, which treat padding in ways of their own."""
    source, target = torch.randint(1, 9, (8, 5)), torch.randint(1, 9, (8, 5))
    source[:, 3:] = 0
    for network, inputs in (
        (TokenTransformer(vocab=9, max_len=5), (source, target)),
        (DecisionTransformer(context=5), (torch.randn(8, 5, 4),)),
    ):
        trained = network(*inputs).detach()
        network.eval()
        with torch.no_grad():
            torch.testing.assert_close(network(*inputs), trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DecisionTransformer(context=0), "context must be at least 1, got 0"),
        (lambda: DecisionTransformer(width=15), "width must be a multiple of heads, got width=15 and heads=2"),
        (lambda: TokenTransformer(vocab=0), "vocab must be at least 1, got 0"),
        (lambda: TokenTransformer(vocab=5, pad=5), "pad must be a token id from 0 to 4, got 5"),
    ],
)
def test_impossible_sizes_are_rejected(build: Any, message: str) -> None:
    with pytest.raises(RangeError, match=message):
        build()
