"""BERT and GPT-2 as Hugging Face transformers defines them, with random weights; no download.

Number of parameters: of the model that is trained, each shared matrix once. `--data` names a folder
with `train.bin`, a flat file of 16-bit token numbers. The learning rate is the one that these
models are trained at with Adam (`--optimizer adamw`); with plain SGD it is safe, but slow.

Legend: B samples, L tokens per sample, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from testbed.base.axes import WorkloadFacts
from testbed.base.errors import UsageError
from testbed.base.parts import Part, installed
from testbed.base.spec import options_class
from testbed.workloads.samples import spread_subset
from testbed.workloads.workload import Samples, Workload

from .checks import check_at_least
from .tokens import HiddenTokens, NextToken, TokenWindows, synthetic_tokens, token_loss

SYNTHETIC_NUM_SAMPLES = 50_000
_MASK_TOKEN = 103  # [MASK] in BERT's vocabulary


class Logits(nn.Module):
    """A Hugging Face model that returns its logits [B, L, V] instead of an output object."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [B, L] to logits [B, L, V]."""
        logits: torch.Tensor = self.inner(input_ids=tokens).logits
        return logits


def gpt2_model(sizes: dict[str, int], dropout: float) -> nn.Module:
    """The decoder, its last layer tied to the embedding; tokens [B, L] to logits [B, L, V].

        x = embed(tokens) + position;  12 x (x += attention(norm(x)); x += mlp(norm(x)));  x embed^T

    Args:
        sizes: `vocabulary_size`, `max_sequence_length`, `hidden_size`, `num_layers`, `num_heads`.
        dropout: probability, in all places.

    Raises:
        UsageError: a size below 1, a sequence longer than `max_sequence_length`, or a `hidden_size`
            that is no multiple of `num_heads`.
        Unavailable: transformers is not installed.

    Example:
        >>> sizes = dict(vocabulary_size=128, max_sequence_length=8, hidden_size=4, num_layers=1,
        ...              num_heads=2)
        >>> gpt2_model(sizes, dropout=0.0)(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 128])

    Reference:
        Radford et al., 2019, OpenAI (GPT-2; the smallest has 124,439,808 parameters). Departs:
        plain text files of token numbers instead of WebText.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes["vocabulary_size"],
        n_positions=sizes["max_sequence_length"],
        n_embd=sizes["hidden_size"],
        n_layer=sizes["num_layers"],
        n_head=sizes["num_heads"],
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Logits(GPT2LMHeadModel(config))


def bert_model(sizes: dict[str, int], dropout: float) -> nn.Module:
    """The encoder with the layers that predict hidden tokens; tokens [B, L] to logits [B, L, V].

        x = norm(embed(tokens) + position + type);  12 x (x = norm(x + attention(x));
        x = norm(x + mlp(x)));  norm(gelu(linear(x))) embed^T

    Args:
        sizes: `vocabulary_size`, `max_sequence_length`, `hidden_size`, `num_layers`, `num_heads`.
        dropout: probability, in all places.

    Raises:
        UsageError: a size below 1, a vocabulary without the mask token (103), a sequence longer
            than `max_sequence_length`, or a `hidden_size` that is no multiple of `num_heads`.
        Unavailable: transformers is not installed.

    Example:
        >>> sizes = dict(vocabulary_size=128, max_sequence_length=8, hidden_size=4, num_layers=1,
        ...              num_heads=2)
        >>> bert_model(sizes, dropout=0.0)(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 128])

    Reference:
        Devlin et al., 2019, NAACL (BERT). Departs: masked tokens are the only task, so 109,514,298
        and 335,174,458 parameters (with the second task 110,106,428 and 336,226,108; the paper
        rounds to 110 and 340 million); see `HiddenTokens` for which tokens are hidden.
    """
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=sizes["vocabulary_size"],
        max_position_embeddings=sizes["max_sequence_length"],
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        intermediate_size=4 * sizes["hidden_size"],
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return Logits(BertForMaskedLM(config))


def _next_token(windows: Callable[[int], Samples], length: int, seed: int) -> Samples:
    return NextToken(windows(length + 1))


def _hidden_tokens(windows: Callable[[int], Samples], length: int, seed: int) -> Samples:
    return HiddenTokens(windows(length), _MASK_TOKEN, seed)


def language_model(
    name: str,
    summary: str,
    make_model: Callable[[dict[str, int], float], nn.Module],
    make_samples: Callable[[Callable[[int], Samples], int, int], Samples],
    num_parameters: int,
    **sizes: int,
) -> Part:
    """A registry entry for a language model; `sizes` are options handed to `make_model`."""

    def build(
        sequence_length: int,
        batch_size: int,
        num_samples: int,
        dropout: float,
        data_dir: str | None,
        seed: int,
        **sizes: int,
    ) -> Workload:
        _check(name, sequence_length, batch_size, num_samples, sizes)
        vocabulary = sizes["vocabulary_size"]

        def windows(length: int) -> Samples:
            if data_dir is not None:
                return TokenWindows(Path(data_dir), length, vocabulary)
            wanted = num_samples or SYNTHETIC_NUM_SAMPLES
            return synthetic_tokens(wanted, length, vocabulary, seed)

        real = f"tokens from {data_dir}"
        synthetic = f"synthetic (random tokens, sequences of {sequence_length})"
        samples = make_samples(windows, sequence_length, seed)
        return Workload(
            model=make_model(sizes, dropout),
            train=spread_subset(samples, num_samples),
            loss=token_loss,
            batch_size=batch_size,
            learning_rate=1e-4,
            data=synthetic if data_dir is None else real,
        )

    return Part(
        name=name,
        summary=summary,
        build=lambda options, **given: build(**vars(options), **given),
        options=options_class(
            sequence_length=128, batch_size=8, num_samples=0, dropout=0.1, **sizes
        ),
        facts=lambda options: WorkloadFacts(num_parameters, imports=("transformers",)),
        probe=installed("transformers", "pip install 'testbed[transformers]'"),
    )


def _check(
    name: str, sequence_length: int, batch_size: int, num_samples: int, sizes: dict[str, int]
) -> None:
    check_at_least(name, 1, sequence_length=sequence_length, batch_size=batch_size, **sizes)
    check_at_least(name, 0, num_samples=num_samples)
    check_at_least(name, _MASK_TOKEN + 1, vocabulary_size=sizes["vocabulary_size"])
    if sequence_length > sizes["max_sequence_length"]:
        raise UsageError(
            f"{name}: sequence_length is {sequence_length}; expected at most "
            f"{sizes['max_sequence_length']}, the option max_sequence_length"
        )
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise UsageError(
            f"{name}: hidden_size is {sizes['hidden_size']}; expected a multiple of num_heads, "
            f"which is {sizes['num_heads']}"
        )


BERT_BASE = language_model(
    "bert-base",
    "BERT base, masked tokens (Devlin et al., 2019)",
    bert_model,
    _hidden_tokens,
    109_514_298,
    vocabulary_size=30522,
    max_sequence_length=512,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
)
BERT_LARGE = language_model(
    "bert-large",
    "BERT large, masked tokens (Devlin et al., 2019)",
    bert_model,
    _hidden_tokens,
    335_174_458,
    vocabulary_size=30522,
    max_sequence_length=512,
    hidden_size=1024,
    num_layers=24,
    num_heads=16,
)
GPT2 = language_model(
    "gpt2",
    "GPT-2 small, next token (Radford et al., 2019)",
    gpt2_model,
    _next_token,
    124_439_808,
    vocabulary_size=50257,
    max_sequence_length=1024,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
)
