"""Tokenises text: bytes, or byte pairs with a vocabulary trained on the text.

Byte pairs need the package tokenizers, which is written in Rust; Python would take hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

BYTES = 256
# The token that ends documents, with GPT-2's name.
END = "<|endoftext|>"
FILE = "tokenizer.json"


class Tokenizer(Protocol):
    @property
    def size(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class Bytes:
    """The 256 bytes, and one token that ends documents.

    >>> [tokens.tolist() for tokens in Bytes().encode(["aé"])], Bytes().decode([97, 195, 169, 256])
    ([[97, 195, 169]], 'aé')
    """

    size = BYTES + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < BYTES).decode(errors="replace")


class BytePairs:
    def __init__(self, made: Any) -> None:
        self._made = made
        self._made.encode_special_tokens = True  # END inside a text becomes letters, not the token

    @property
    def size(self) -> int:
        return int(self._made.get_vocab_size())

    @classmethod
    def trained(cls, texts: Iterable[str], vocabulary: int) -> BytePairs:
        tokenizers = library()
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        # GPT-2's rule separates words, numbers and runs of spaces; a word begins with its space.
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary - 1,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(texts, trainer)
        made.add_special_tokens([END])
        return cls(made)

    @classmethod
    def load(cls, path: Path) -> BytePairs:
        made = library().Tokenizer
        try:
            return cls(made.from_file(str(path)))
        except Exception as error:
            raise ValueError(f"{path} must be a vocabulary of the package tokenizers; got {error}") from error

    def save(self, path: Path) -> None:
        self._made.save(str(path))

    def spelled(self, token: int) -> str:
        return "" if token == self.size - 1 else str(self._made.id_to_token(token))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(part.ids, np.uint32) for part in self._made.encode_batch(list(texts))]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._made.decode(list(tokens), skip_special_tokens=True))


def library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ValueError(
            "a byte-pair vocabulary needs the package tokenizers: pip install tokenizers, or sparseflash[lm], or cut "
            "into bytes with --vocabulary 256"
        ) from None
    return tokenizers


def load(folder: Path) -> Tokenizer:
    path = folder / FILE
    return BytePairs.load(path) if path.is_file() else Bytes()
