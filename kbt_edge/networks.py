"""Two transformers as plain torch modules, split at the readout (method.md §1): ``trunk`` is T1, ``readout`` is W_O.

Train ``model`` as any torch module, then export ``model.trunk`` (``kbt_edge.export``) and hand ``model.readout`` to a
``Head``. Both trunks take a batch for training, or a single sample without the batch axis, which is what is exported.

Choices that keep the exported graph plain: post-norm layers with ReLU, no dropout (the deployed trunk is deterministic,
and these networks are too small to need it), fixed lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kbt_edge.errors import RangeError

__all__ = ["DecisionTransformer", "TokenTransformer"]

_MASKED = -1e9  # Added to attention scores. Finite, so that a source of nothing but padding gives an average, not NaN.


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise RangeError(f"{name} must be at least 1, got {value}")
    if sizes["width"] % sizes["heads"]:
        raise RangeError(f"width must be a multiple of heads, got width={sizes['width']} and heads={sizes['heads']}")


class _ControlTrunk(nn.Module):
    """States (context, state_dim), oldest first → the hidden row of the newest (1, width); a batch axis may lead."""

    def __init__(self, state_dim: int, context: int, width: int, layers: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.embed = nn.Linear(state_dim, width)
        # A single position needs no embedding: it would only add to the bias.
        self.position = nn.Parameter(0.02 * torch.randn(context, width)) if context > 1 else None
        layer = nn.TransformerEncoderLayer(width, heads, feedforward, dropout=0.0, activation="relu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, states: Tensor) -> Tensor:
        if states.dim() == 2:
            return self.forward(states[None])[0]  # as a batch of one, torch projects queries, keys and values at once
        h = self.embed(states)
        if self.position is not None:
            h = h + self.position
        rows: Tensor = self.encoder(h)[:, -1:]
        return rows


class DecisionTransformer(nn.Module):
    """The policy of the paper's cart-pole: the last ``context`` states → an action.

    ``forward``: (batch, context, state_dim) → (batch, action_dim).
    """

    def __init__(
        self,
        state_dim: int = 4,
        action_dim: int = 1,
        context: int = 1,
        width: int = 16,
        layers: int = 2,
        heads: int = 2,
        feedforward: int = 8,
    ) -> None:
        super().__init__()
        _check_sizes(
            state_dim=state_dim,
            action_dim=action_dim,
            context=context,
            width=width,
            layers=layers,
            heads=heads,
            feedforward=feedforward,
        )
        self.trunk = _ControlTrunk(state_dim, context, width, layers, heads, feedforward)
        self.readout = nn.Linear(width, action_dim)

    def forward(self, states: Tensor) -> Tensor:
        action: Tensor = self.readout(self.trunk(states)[..., -1, :])
        return action


class _TokenTrunk(nn.Module):
    """Source ids (max_len,) and target ids (max_len,) → one hidden row per target position (max_len, width).

    Row i sees the whole source and the targets up to i (method.md §6: causal T1), so sequences shorter than ``max_len``
    are padded with ``pad`` at the end and only their first rows are used. A batch axis may lead.
    """

    causal: Tensor

    def __init__(
        self,
        vocab: int,
        width: int,
        encoder_layers: int,
        decoder_layers: int,
        heads: int,
        feedforward: int,
        max_len: int,
        pad: int,
    ) -> None:
        super().__init__()
        self.pad = pad
        self.source = nn.Embedding(vocab, width)
        self.target = nn.Embedding(vocab, width)
        self.source_position = nn.Parameter(0.02 * torch.randn(max_len, width))
        self.target_position = nn.Parameter(0.02 * torch.randn(max_len, width))
        layer = nn.TransformerEncoderLayer(width, heads, feedforward, dropout=0.0, activation="relu", batch_first=True)
        self.transformer = nn.Transformer(
            width,
            heads,
            encoder_layers,
            decoder_layers,
            feedforward,
            dropout=0.0,
            activation="relu",
            # The default encoder without nested tensors: with them torch returns zeros where the source is padding.
            custom_encoder=nn.TransformerEncoder(
                layer, encoder_layers, nn.LayerNorm(width), enable_nested_tensor=False
            ),
            batch_first=True,
        )
        future = torch.ones(max_len, max_len).triu(1)
        self.register_buffer("causal", _MASKED * future, persistent=False)

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        if source_ids.dim() == 1:
            return self.forward(source_ids[None], target_ids[None])[0]
        padding = _MASKED * source_ids.eq(self.pad).to(self.causal.dtype)
        rows: Tensor = self.transformer(
            self.source(source_ids) + self.source_position,
            self.target(target_ids) + self.target_position,
            tgt_mask=self.causal,
            # Stated, because torch.export cannot follow the detection, which looks at the values of the mask.
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return rows


class TokenTransformer(nn.Module):
    """An encoder-decoder over token ids 0 … vocab-1, of which ``pad`` means "no token here".

    ``forward``: ids (batch, max_len), ids (batch, max_len) → logits (batch, max_len, vocab).
    """

    def __init__(
        self,
        vocab: int,
        width: int = 16,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        heads: int = 2,
        feedforward: int = 32,
        max_len: int = 16,
        pad: int = 0,
    ) -> None:
        super().__init__()
        _check_sizes(
            vocab=vocab,
            width=width,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            heads=heads,
            feedforward=feedforward,
            max_len=max_len,
        )
        if not 0 <= pad < vocab:
            raise RangeError(f"pad must be a token id from 0 to {vocab - 1}, got {pad}")
        self.trunk = _TokenTrunk(vocab, width, encoder_layers, decoder_layers, heads, feedforward, max_len, pad)
        self.readout = nn.Linear(width, vocab)

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        logits: Tensor = self.readout(self.trunk(source_ids, target_ids))
        return logits
