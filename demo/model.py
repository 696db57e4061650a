"""SmolLM2-135M-Instruct in numpy: a real model, small enough for two CPU cores.

Arithmetic is float32. Keys and values are rounded to bfloat16 as they enter the cache, as in an engine whose
KV cache is bfloat16: so attention reads the same numbers from a live cache and from a restored page. Keys are
kept after rotary embedding, in the dimension order of `transformers`.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from demo.pages import FloatArray, from_bf16, to_bf16
from demo.weights import WEIGHTS_SHA256, GgufFile, find_weights

MODEL_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_REVISION: Final = f"gguf-sha256:{WEIGHTS_SHA256[:16]}"

# Prompts are computed in chunks of this many tokens. The last bits of a matrix product depend on its shape:
# the same chunks give the same bits, others need not.
CHUNK_TOKENS: Final = 256

_CONTROL_TOKEN: Final = 3  # token_type of GGUF


@dataclass(frozen=True)
class Shape:
    """The model's sizes, read from the weights' own header."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Layer:
    attention_norm: FloatArray
    qkv: FloatArray  # [(heads + 2 kv_heads) head_dim, hidden]
    output: FloatArray
    mlp_norm: FloatArray
    gate_up: FloatArray  # [2 inner, hidden]
    down: FloatArray


class KvCache:
    """Live KV of one sequence: float32 `[layers, 2, kv_heads, capacity, head_dim]`, rounded to bfloat16."""

    def __init__(self, shape: Shape, capacity: int) -> None:
        """Makes an empty cache for `capacity` tokens."""
        size = (shape.layers, 2, shape.kv_heads, capacity, shape.head_dim)
        self.data: FloatArray = np.zeros(size, np.float32)
        self.tokens = 0

    def append(self, kv: FloatArray) -> None:
        """Takes a restored page as the next tokens, `[layers, 2, kv_heads, tokens, head_dim]`."""
        end = self.tokens + kv.shape[3]
        self.data[:, :, :, self.tokens : end] = kv
        self.tokens = end

    def page(self, index: int, page_tokens: int) -> FloatArray:
        """Returns one whole page, `[layers, 2, kv_heads, page_tokens, head_dim]`."""
        return self.data[:, :, :, index * page_tokens : (index + 1) * page_tokens]


class SmolLM2:
    """The model and its tokenizer."""

    def __init__(self, file: GgufFile) -> None:
        """Takes the weights out of a parsed file."""

        def size(key: str) -> int:
            return int(file.fields[f"llama.{key}"])

        heads, hidden = size("attention.head_count"), size("embedding_length")
        kv_heads = size("attention.head_count_kv")
        self.shape = Shape(size("block_count"), hidden, heads, kv_heads, hidden // heads)
        self.tokenizer = _tokenizer(file)
        self.end_of_turn = self.tokenizer.token_to_id("<|im_end|>")
        self._epsilon = np.float32(file.fields["llama.attention.layer_norm_rms_epsilon"])
        dims = np.arange(0, self.shape.head_dim, 2, dtype=np.float64)
        self._frequencies = float(file.fields["llama.rope.freq_base"]) ** -(dims / self.shape.head_dim)
        self._embedding = file.tensor("token_embd.weight")
        self._norm = file.tensor("output_norm.weight")
        self._layers = [self._layer(file, f"blk.{i}") for i in range(self.shape.layers)]

    @classmethod
    def load(cls) -> "SmolLM2":
        """Loads the installed weights and checks their SHA-256 (about two seconds).

        Raises:
            WeightsError: They are missing, or not the pinned file.
        """
        return cls(GgufFile.open(find_weights(), WEIGHTS_SHA256))

    def cache(self, capacity: int) -> KvCache:
        """Makes an empty cache for `capacity` tokens."""
        return KvCache(self.shape, capacity)

    def prefill(self, tokens: list[int], cache: KvCache) -> FloatArray:
        """Appends a prompt to an empty cache by chunks; returns the last one's states `[tokens, hidden]`."""
        for start in range(0, len(tokens), CHUNK_TOKENS):
            states = self.forward(tokens[start : start + CHUNK_TOKENS], cache)
        return states

    def forward(self, tokens: list[int], cache: KvCache) -> FloatArray:
        """Appends tokens to the cache in one step; returns their final hidden states, `[tokens, hidden]`."""
        shape, past, new = self.shape, cache.tokens, len(tokens)
        total, group = past + new, shape.heads // shape.kv_heads
        positions = np.arange(past, total)
        mask = np.where(np.arange(total)[None] <= positions[:, None], 0.0, -np.inf).astype(np.float32)
        angles = positions[:, None] * self._frequencies
        turn = np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]
        scale = np.float32(shape.head_dim**-0.5)
        cut = (shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim)
        x = self._embedding[tokens]
        for layer, (keys, values) in zip(self._layers, cache.data[:, :, :, :total], strict=True):
            q, k, v = np.split(self._rms(x, layer.attention_norm) @ layer.qkv.T, cut, axis=1)
            k, v = k.reshape(new, shape.kv_heads, -1), v.reshape(new, shape.kv_heads, -1)
            keys[:, past:] = from_bf16(to_bf16(_rotate(k, *turn))).swapaxes(0, 1)
            values[:, past:] = from_bf16(to_bf16(v)).swapaxes(0, 1)
            q = _rotate(q.reshape(new, shape.heads, -1), *turn) * scale
            q = np.ascontiguousarray(q.swapaxes(0, 1)).reshape(shape.kv_heads, group * new, -1)
            scores = (q @ keys.swapaxes(1, 2)).reshape(shape.kv_heads, group, new, total)
            scores += mask
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            seen = scores.reshape(shape.kv_heads, group * new, total) @ values
            seen = seen.reshape(shape.heads, new, shape.head_dim).swapaxes(0, 1).reshape(new, shape.hidden)
            x = x + seen @ layer.output.T
            gate, up = np.split(self._rms(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
        cache.tokens = total
        return self._rms(x, self._norm)

    def logits(self, states: FloatArray) -> FloatArray:
        """Returns the logits of hidden states, `[tokens, vocabulary]`."""
        logits: FloatArray = states @ self._embedding.T
        return logits

    def generate(self, logits: FloatArray, cache: KvCache, limit: int) -> str:
        """Continues greedily from the last row of `logits` to the end of the turn or for `limit` tokens."""
        tokens: list[int] = []
        while len(tokens) < limit:
            token = int(logits[-1].argmax())
            if token == self.end_of_turn:
                break
            tokens.append(token)
            logits = self.logits(self.forward([token], cache))
        text: str = self.tokenizer.decode(tokens)
        return text

    def _layer(self, file: GgufFile, prefix: str) -> _Layer:
        def weight(name: str) -> FloatArray:
            return file.tensor(f"{prefix}.{name}.weight")

        # llama.cpp interleaves the two halves of each rotary head of Q and K; undone here.
        def plain_rotary(name: str, heads: int) -> FloatArray:
            rows = weight(name).reshape(heads, self.shape.head_dim // 2, 2, self.shape.hidden)
            return rows.swapaxes(1, 2).reshape(-1, self.shape.hidden)

        q, k = plain_rotary("attn_q", self.shape.heads), plain_rotary("attn_k", self.shape.kv_heads)
        return _Layer(
            attention_norm=weight("attn_norm"),
            qkv=np.concatenate([q, k, weight("attn_v")]),
            output=weight("attn_output"),
            mlp_norm=weight("ffn_norm"),
            gate_up=np.concatenate([weight("ffn_gate"), weight("ffn_up")]),
            down=weight("ffn_down"),
        )

    def _rms(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        mean_square = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32)
        normed: FloatArray = x / np.sqrt(mean_square + self._epsilon) * weight
        return normed


def _rotate(x: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """Rotary embedding of `[tokens, heads, head_dim]`; `cos` and `sin` are `[tokens, 1, head_dim / 2]`."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _tokenizer(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer of the file: byte-level BPE that splits numbers into digits (`pre = smollm`)."""
    words: list[str] = file.fields["tokenizer.ggml.tokens"]
    kinds: list[int] = file.fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in file.fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    digits, text = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    return tokenizer
