"""The units of known networks: names, tensor shapes and work, derived from the design.

A unit is a layer with parameters of its own. Names and order are those of torchvision
(resnet50) and of Hugging Face transformers (bert, gpt2), where the order of
registration is also the order of execution. Knows nothing of time.

Work is floating-point operations of one sample's forward, a multiplication and an
addition counted as two. Only its distribution over the units matters; element-wise
work (activations, residual sums) is left out, and norms and look-ups, which memory
bounds, are charged a few operations an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

IMAGE = 224  # pixels a side
BERT_SEQUENCE = 128  # tokens; BERT's first phase of pre-training
GPT2_SEQUENCE = 1024  # tokens; the whole context
NORM_OPS = 8  # an element: mean, variance, normalise, scale and shift
LOOKUP_OPS = 1  # an element copied


@dataclass(frozen=True)
class Unit:
    """One layer: its dotted name, its tensors in order, and its work in operations.

    `positions` of a sample are what a Linear or a convolution is applied to: layers
    that K-FAC can precondition. 0 for all others.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    work: int
    positions: int = 0


def units(architecture: str) -> list[Unit]:
    """The architecture's layers in order of registration and execution."""
    return list(ARCHITECTURES[architecture]())


def linear(name: str, inputs: int, outputs: int, tokens: int, extra: int = 0) -> Unit:
    """A matrix with bias, applied to `tokens` vectors; `extra` is work before it."""
    shapes = (("weight", (outputs, inputs)), ("bias", (outputs,)))
    return Unit(name, shapes, 2 * inputs * outputs * tokens + extra, tokens)


def norm(name: str, width: int, positions: int) -> Unit:
    """A scale and a shift per channel (batch norm or layer norm)."""
    shapes = (("weight", (width,)), ("bias", (width,)))
    return Unit(name, shapes, NORM_OPS * width * positions)


def embedding(name: str, rows: int, width: int, tokens: int) -> Unit:
    """A table of which `tokens` rows are read."""
    return Unit(name, (("weight", (rows, width)),), LOOKUP_OPS * width * tokens)


def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Unit:
    """A square convolution without bias whose output has `side` x `side` pixels."""
    work = 2 * inputs * outputs * kernel**2 * side**2
    shapes = (("weight", (outputs, inputs, kernel, kernel)),)
    return Unit(name, shapes, work, side**2)


def resnet(blocks: tuple[int, int, int, int]) -> Iterator[Unit]:
    """ResNet v1.5 with bottlenecks (He et al., 2015; the stride is in the 3 x 3).

    ResNet-50 has 3, 4, 6 and 3 of them and 25,557,032 parameters; ResNet-152 has 3, 8,
    36 and 3 and 60,192,808.
    """
    yield convolution("conv1", 3, 64, 7, IMAGE // 2)
    yield norm("bn1", 64, (IMAGE // 2) ** 2)
    width, side = 64, IMAGE // 4  # after the max-pooling
    for stage, num_blocks in enumerate(blocks):
        planes, stride = 64 << stage, 1 if stage == 0 else 2
        for block in range(num_blocks):
            name = f"layer{stage + 1}.{block}"
            yield from bottleneck(name, width, planes, side, stride)
            width, side, stride = 4 * planes, side // stride, 1
    yield linear("fc", width, 1000, tokens=1)


def bottleneck(
    name: str, inputs: int, planes: int, side: int, stride: int
) -> Iterator[Unit]:
    """1 x 1, strided 3 x 3, 1 x 1 to four times the planes; a projection at need."""
    outputs, small = 4 * planes, side // stride
    yield convolution(f"{name}.conv1", inputs, planes, 1, side)
    yield norm(f"{name}.bn1", planes, side**2)
    yield convolution(f"{name}.conv2", planes, planes, 3, small)
    yield norm(f"{name}.bn2", planes, small**2)
    yield convolution(f"{name}.conv3", planes, outputs, 1, small)
    yield norm(f"{name}.bn3", outputs, small**2)
    if inputs != outputs:
        yield convolution(f"{name}.downsample.0", inputs, outputs, 1, small)
        yield norm(f"{name}.downsample.1", outputs, small**2)


def densenet(blocks: tuple[int, int, int, int]) -> Iterator[Unit]:
    """DenseNet with a growth of 32 and bottlenecks (Huang et al., CVPR 2017).

    DenseNet-201 has 6, 12, 48 and 32 layers in its blocks, and 20,013,928 parameters in
    604 tensors: many, and small ones.
    """
    growth, width, side = 32, 64, IMAGE // 4  # after the max-pooling
    yield convolution("conv0", 3, width, 7, IMAGE // 2)
    yield norm("norm0", width, (IMAGE // 2) ** 2)
    for block, num_layers in enumerate(blocks):
        if block > 0:
            yield norm(f"transition{block}.norm", width, side**2)
            width //= 2
            yield convolution(f"transition{block}.conv", 2 * width, width, 1, side)
            side //= 2
        for layer in range(num_layers):
            name = f"block{block + 1}.{layer}"
            yield norm(f"{name}.norm1", width, side**2)
            yield convolution(f"{name}.conv1", width, 4 * growth, 1, side)
            yield norm(f"{name}.norm2", 4 * growth, side**2)
            yield convolution(f"{name}.conv2", 4 * growth, growth, 3, side)
            width += growth
    yield norm("norm5", width, side**2)
    yield linear("classifier", width, 1000, tokens=1)


def attention_work(width: int, tokens: int) -> int:
    """Scores and the weighted sum: two products of (tokens, tokens) by width."""
    return 2 * 2 * tokens**2 * width


def bert(layers: int, width: int, heads: bool = False) -> Iterator[Unit]:
    """BERT with its pooler (Devlin et al., 2018), and the heads of its pre-training.

    Base is 12 x 768: 109,482,240 parameters; large is 24 x 1024: 335,141,888. With
    heads these are 110,106,428 and 336,226,108. As in `gpt2`, the matrix of the decoder
    is the words' embedding.
    """
    tokens, inner, words = BERT_SEQUENCE, 4 * width, 30522
    for table, rows in (("word", words), ("position", 512), ("token_type", 2)):
        yield embedding(f"embeddings.{table}_embeddings", rows, width, tokens)
    yield norm("embeddings.LayerNorm", width, tokens)
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield linear(f"{name}.attention.self.{part}", width, width, tokens)
        mix, output = attention_work(width, tokens), f"{name}.attention.output"
        yield linear(f"{output}.dense", width, width, tokens, extra=mix)
        yield norm(f"{output}.LayerNorm", width, tokens)
        yield linear(f"{name}.intermediate.dense", width, inner, tokens)
        yield linear(f"{name}.output.dense", inner, width, tokens)
        yield norm(f"{name}.output.LayerNorm", width, tokens)
    yield linear("pooler.dense", width, width, tokens=1)
    if heads:
        yield linear("cls.predictions.transform.dense", width, width, tokens)
        yield norm("cls.predictions.transform.LayerNorm", width, tokens)
        decoder = (("bias", (words,)),)
        yield Unit("cls.predictions.decoder", decoder, 2 * width * words * tokens)
        yield linear("cls.seq_relationship", width, 2, tokens=1)


def transposed(name: str, inputs: int, outputs: int, extra: int = 0) -> Unit:
    """GPT-2 keeps its matrices as (inputs, outputs)."""
    shapes = (("weight", (inputs, outputs)), ("bias", (outputs,)))
    return Unit(name, shapes, 2 * inputs * outputs * GPT2_SEQUENCE + extra)


def gpt2(layers: int, width: int, vocabulary: int) -> Iterator[Unit]:
    """A GPT-2 (Radford et al., 2019).

    Small is 12 x 768 with 50257 tokens: 124,439,808 parameters. One of 8 x 512 with
    8192 has 29,938,688: as large as what others have measured rounds with.

    The head has work but no tensor: it is tied to `transformer.wte`, whose gradient
    autograd hands over only when the embedding's part has been added, that is, last.
    """
    tokens = GPT2_SEQUENCE
    yield embedding("transformer.wte", vocabulary, width, tokens)
    yield embedding("transformer.wpe", 1024, width, tokens)
    for layer in range(layers):
        name, mix = f"transformer.h.{layer}", attention_work(width, tokens)
        yield norm(f"{name}.ln_1", width, tokens)
        yield transposed(f"{name}.attn.c_attn", width, 3 * width)
        yield transposed(f"{name}.attn.c_proj", width, width, extra=mix)
        yield norm(f"{name}.ln_2", width, tokens)
        yield transposed(f"{name}.mlp.c_fc", width, 4 * width)
        yield transposed(f"{name}.mlp.c_proj", 4 * width, width)
    yield norm("transformer.ln_f", width, tokens)
    yield Unit("lm_head", (), 2 * width * vocabulary * tokens)


ARCHITECTURES: dict[str, Callable[[], Iterator[Unit]]] = {
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "resnet152": partial(resnet, (3, 8, 36, 3)),
    "densenet201": partial(densenet, (6, 12, 48, 32)),
    "bert-base": partial(bert, layers=12, width=768),
    "bert-large": partial(bert, layers=24, width=1024),
    "bert-base-pretraining": partial(bert, layers=12, width=768, heads=True),
    "bert-large-pretraining": partial(bert, layers=24, width=1024, heads=True),
    "gpt2": partial(gpt2, layers=12, width=768, vocabulary=50257),
    "gpt-30m": partial(gpt2, layers=8, width=512, vocabulary=8192),
}
